"""A run's weights, computed again from its tape and its payloads, and compared bit for bit.

The orders on the tape are carried out once more on fresh `ShardTensors`, by the same code that
carried them out in the run: each contribution that was folded is read from the payloads, each merge
computed, and the digest of every published version compared with the one that everybody was told.
A shard that was started again goes on from what is computed here; its disk's own state, which is
among the payloads, must be the same, or takes its place where the tape's last half second went with
the process that was killed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config.method import options_of, plan_of, read_settings
from decoupled_diloco.errors import MergeError, ProtocolError, StorageError
from decoupled_diloco.merge import body_digest, values_digest
from decoupled_diloco.merge.plan import values_of
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.samples import PayloadsEnded
from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.versions import Asking, Version
from decoupled_diloco.simulate.replay import by_process
from decoupled_diloco.storage.weights import load_weights
from decoupled_diloco.syncer.durable import as_tensors
from decoupled_diloco.syncer.fragments import FragmentTensors, OuterStep, ShardTensors
from decoupled_diloco.syncer.payloads import PAYLOADS, read_body, read_layout, read_recovered
from decoupled_diloco.syncer.result import share_file

logger = logging.getLogger(__name__)

STATES_KEPT = 4
"""Of each fragment: a disk can be that far behind what was merged."""


@dataclass
class WeightsReplay:
    """What has come out for one shard.

    Attributes:
        who: The shard.
        versions: Published versions that were computed again.
        merges: Merges among them.
        unknown: Published versions that could not be: see the notes.
        differences: Versions with other bits.
        notes: What was missing, in words.
        final: What the weights of the end are: ``"the same"``, ``"others"`` or ``"none"``.
    """

    who: str
    versions: int = 0
    merges: int = 0
    unknown: int = 0
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    final: str = "none"


def has_payloads(run: Path) -> bool:
    """Whether a run has kept its bodies."""
    return (run / PAYLOADS).is_dir()


def replay_weights(run: Path, until_seconds: float | None = None) -> list[WeightsReplay]:
    """Computes the weights of every shard of a run again.

    Args:
        run: The run folder.
        until_seconds: Only up to so many seconds after the run's first record.

    Raises:
        StorageError: There are no payloads, or something of them is torn.
        ProtocolError: The tape is not of this version.
    """
    if not has_payloads(run):
        raise StorageError(
            f"{run / PAYLOADS} does not exist: only a run with syncer.record_payloads = true keeps "
            "what its weights can be computed from"
        )
    lives: dict[int, list[list[Record]]] = {}
    for _, records in by_process(TapeReader(run), until_seconds, samples=True):
        header = records[0].data["header"]
        if header["machine"] == "shard":
            lives.setdefault(header["shard"], []).extend(_lives(records))
    results = []
    for number in sorted(lives):
        shard = _Shard(run, number)
        for life in sorted(lives[number], key=lambda records: records[0].wall):
            for record in life:
                shard.take(record)
        shard.end(whole=until_seconds is None)
        results.append(shard.result)
    return results


def _lives(records: list[Record]) -> list[list[Record]]:
    """The records of each life; a shard's standby has lives of the same shard."""
    lives: list[list[Record]] = []
    for record in records:
        if record.kind == "start":
            lives.append([])
        lives[-1].append(record)
    return lives


class _Shard:
    """One shard's tensors, through all its lives."""

    def __init__(self, run: Path, shard: int) -> None:
        self.result = WeightsReplay(f"shard-{shard}")
        self._run, self._shard = run, shard
        self._folder = run / PAYLOADS / f"shard-{shard}"
        self._layout = read_layout(self._folder)
        self._states: dict[int, dict[Version, FragmentTensors]] = {}
        self._seen: set[tuple[int, Version]] = set()
        self._tensors: ShardTensors

    def take(self, record: Record) -> None:
        """One record of the tape, in order."""
        if record.kind == "start":
            self._begin(record.data["header"]["settings"])
            return
        value: Any = record.value()
        match record.kind:
            case "event":
                self._event(value)
            case "effect":
                self._order(value)
            case "sample" if isinstance(value, PayloadsEnded):
                self.result.notes.append(f"recording ended: {value.problem}")

    def _begin(self, settings: Mapping[str, Any]) -> None:
        config = read_settings(settings)
        plan = plan_of(self._layout, config)
        owned = options_of(config).owned(self._shard)
        self._tensors = ShardTensors(plan, owned)
        self._bodies: dict[tuple[str, int, Asking], do.Expect] = {}
        self._copies: dict[tuple[str, int, int], do.ExpectCopy] = {}
        self._announced: dict[Asking, str] = {}
        self._merging: dict[int, tuple[do.Merge, OuterStep]] = {}
        self._lost_bodies: set[Asking] = set()
        self._lost: set[int] = set()
        self._unknown: set[int] = set()
        self._recovered: tuple[fact.DurableCopy, ...] = ()

    def _event(self, event: Any) -> None:
        match event:
            case fact.Received(_, say.Upload() as message):
                self._announced[message.ask] = message.digest
            case fact.BodyArrived():
                self._arrived(event)
            case fact.CopyArrived(learner, fragment, attempt, text):
                self._copied(fragment, self._copies[learner, fragment, attempt].path, text)
            case fact.WeightsLoaded(digests):
                for fragment, text in digests:
                    self._copied(fragment, f"file/{fragment}", text)
            case fact.DiskRead(copies):
                self._recovered = copies
            case fact.Received(_, say.ShardAdmitted() as admitted):
                self._recover(admitted.term)
            case fact.Merged(number, fragment, text):
                self._merged(number, fragment, text)
            case fact.MergeFailed(number, fragment):
                self._merging.pop(number, None)
                self._lost.discard(fragment)

    def _arrived(self, event: fact.BodyArrived) -> None:
        expected = self._bodies[event.learner, event.fragment, event.ask]
        path, codec = expected.path, expected.codec
        body = read_body(self._folder, path)
        if body is None:
            self._lose(event, f"{path} was not kept")
            return
        plan = self._tensors.plan
        text = self._announced.get(event.ask) or body_digest(
            body, plan.uplink_of(event.fragment, codec)
        )
        try:
            self._tensors.verify(event.fragment, event.ask, body, text, codec)
        except (ProtocolError, MergeError) as error:
            self._lose(event, f"{path}: {error}")

    def _lose(self, event: fact.BodyArrived, problem: str) -> None:
        if not self._lost_bodies:
            text = f"contribution {event.ask} to fragment {event.fragment} and what follows from it"
            self.result.notes.append(f"{text}: {problem}")
        self._lost_bodies.add(event.ask)

    def _copied(self, fragment: int, path: str, text: str) -> None:
        body = read_body(self._folder, path)
        if body is None:
            self._forget(fragment, f"{path} was not kept")
            return
        numel = self._tensors.plan.fragments[fragment].numel
        try:
            self._tensors.receive(fragment, values_of(body, numel), text)
        except (ProtocolError, MergeError) as error:
            self.result.differences.append(f"{path}, of fragment {fragment}: {error}")
        self._unknown.discard(fragment)

    def _recover(self, term: int) -> None:
        """The shard goes on from its disk: from what was computed here, and both must agree."""
        kept = read_recovered(self._folder, term, self._tensors) or {}
        for durable in self._recovered:
            fragment, version = durable.fragment, durable.version
            ours = self._states.get(fragment, {}).get(version)
            if ours is not None and values_digest(ours.published) != durable.digest:
                ours = None  # another merge took this version, and its record went with the process
            theirs = kept.get(fragment)
            if ours is not None and theirs is not None and not _same(ours, theirs):
                self.result.differences.append(f"fragment {fragment}: the disk had other bits")
            if ours is None and theirs is not None:
                self.result.notes.append(
                    f"version {version} of fragment {fragment} is taken from what the shard has "
                    f"recovered in term {term}: its merge is not on the tape"
                )
            entry = ours or theirs
            if entry is None:
                self._forget(fragment, f"nothing leads to version {version}, which the disk had")
            else:
                self._tensors.fragments[fragment] = entry
        self._recovered = ()

    def _forget(self, fragment: int, problem: str) -> None:
        self.result.notes.append(f"fragment {fragment} cannot be computed any more: {problem}")
        self._tensors.fragments.pop(fragment, None)
        self._unknown.add(fragment)

    def _order(self, order: Any) -> None:
        tensors = self._tensors
        match order:
            case do.Expect():
                self._bodies[order.learner, order.fragment, order.ask] = order
            case do.ExpectCopy():
                self._copies[order.learner, order.fragment, order.attempt] = order
            case do.Fold(fragment, _, ask, steps, tokens, _, scale, discount):
                if ask in self._lost_bodies:
                    self._lost.add(fragment)
                else:
                    tensors.fold(fragment, ask, steps, tokens, scale, discount)
            case do.Drop(ask=ask):
                tensors.drop(ask)
            case do.Merge():
                self._merge(order)
            case do.Install(fragment, version, digest=wanted):
                tensors.install_received(fragment, wanted)
                self._remember(fragment, version)
            case do.Broadcast(say.Published() as message) | do.Send(_, say.Published() as message):
                self._published(message)

    def _merge(self, order: do.Merge) -> None:
        if order.fragment in self._lost and order.fragment not in self._unknown:
            self._forget(order.fragment, f"round {order.round} of it is lost")
        self._lost.discard(order.fragment)
        if order.fragment in self._unknown:
            self._tensors.forget_folded(order.fragment)
            return
        try:
            step = self._tensors.prepare(order.fragment)
        except MergeError:
            return  # so it was in the run: the tape says so next
        self._merging[order.round] = (order, step)
        self._remember(order.fragment, order.version, step.after)

    def _merged(self, number: int, fragment: int, text: str) -> None:
        if number not in self._merging:
            return
        order, step = self._merging.pop(number)
        self._tensors.commit(fragment, step)
        self.result.merges += 1
        if step.copy.digest != text:
            self.result.differences.append(f"version {order.version} of fragment {fragment}")

    def _remember(
        self, fragment: int, version: Version, entry: FragmentTensors | None = None
    ) -> None:
        entry = entry or self._tensors.fragments.get(fragment)
        if entry is not None:
            states = self._states.setdefault(fragment, {})
            states.pop(version, None)
            states[version] = entry
            while len(states) > STATES_KEPT:
                del states[next(iter(states))]

    def _published(self, message: say.Published) -> None:
        place = (message.fragment, message.version)
        if place in self._seen:
            return
        self._seen.add(place)
        entry = self._tensors.fragments.get(message.fragment)
        if entry is None:
            self.result.unknown += 1
            return
        self.result.versions += 1
        text = f"version {message.version} of fragment {message.fragment}"
        if values_digest(entry.published) != message.digest and text not in self.result.differences:
            self.result.differences.append(text)

    def end(self, *, whole: bool) -> None:
        """Compares the last weights with those that the run has left."""
        path = share_file(self._run, self._shard)
        if not whole or not path.exists():
            return
        theirs = load_weights(path)
        ours = {f"fragment.{p}": e.published for p, e in self._tensors.fragments.items()}
        same = theirs.keys() == ours.keys() and all(
            torch.equal(theirs[name].view(torch.int32), ours[name].view(torch.int32))
            for name in ours
        )
        self.result.final = "the same" if same else "others"


def _same(left: FragmentTensors, right: FragmentTensors) -> bool:
    ours, theirs = as_tensors(left), as_tensors(right)
    return ours.keys() == theirs.keys() and all(map(_equal, ours.values(), theirs.values()))


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return values_digest(left) == values_digest(right)
