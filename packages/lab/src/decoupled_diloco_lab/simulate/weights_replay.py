"""Compute a run's weights again from its tape and its payloads, and compare them bit for bit.

The orders on the tape are carried out again on fresh `ShardTensors`, by the code that ran in the
run. Each folded contribution is read from the payloads, and each merge is computed. Then the digest
of every published version is compared with the one that the shard broadcast.

A restarted shard continues from the state computed here. The state that it recovered from its disk
is among the payloads and must be equal. If a killed process took the last half second of its tape
with it, the recovered state replaces the computed one.

`weights_without` computes the weights as they would be without one learner, from the same orders.
Its contributions are not folded, and the outer optimizer runs over what remains. A merge without
any other contribution changes nothing. Weights that a shard recovered, or received from a learner,
are replaced by those computed here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of, plan_of, read_settings
from decoupled_diloco.errors import ConfigError, MergeError, ProtocolError, StorageError
from decoupled_diloco.merge import body_digest, values_digest
from decoupled_diloco.merge.plan import MergePlan, values_of
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Done, Failed, Made, Version, WeightsLoaded
from decoupled_diloco.storage.weight_files import load_weights, save_weights
from decoupled_diloco.syncer.durable import as_tensors
from decoupled_diloco.syncer.payload_archive import PAYLOADS, read_body, read_layout, read_recovered
from decoupled_diloco.syncer.result import by_name, share_file
from decoupled_diloco.syncer.shard_tensors import FragmentTensors, OuterStep, ShardTensors
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.replay import by_process
from decoupled_diloco.tape.samples import PayloadsEnded

logger = logging.getLogger(__name__)

STATES_KEPT = 4
"""Number of past states kept per fragment. A disk can be at most this far behind the last merge."""


@dataclass
class WeightsReplay:
    """The result for one shard.

    Attributes:
        process: The name of the shard.
        versions: Number of published versions that were computed again.
        merges: Number of merges among them.
        unknown: Number of published versions that could not be computed; see the notes.
        differences: Versions whose bits differ.
        notes: Descriptions of missing inputs.
        final: Comparison with the run's final weights: ``"the same"``, ``"others"`` or ``"none"``.
    """

    process: str
    versions: int = 0
    merges: int = 0
    unknown: int = 0
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    final: str = "none"


@dataclass(frozen=True)
class Without:
    """A learner whose contributions are left out.

    Attributes:
        learner: Its name.
        from_step: Contributions that a shard received before its clock reached this global step
            remain.
    """

    learner: str
    from_step: int = 0


@dataclass
class WeightsWithout:
    """The weights without a learner.

    Attributes:
        file: The file with the weights, under the model's names.
        left_out: Number of contributions that were left out.
        remaining: Number of contributions that were merged.
        unchanged: Number of merges that had no other contribution, so that nothing changed.
        notes: Descriptions of what could not be computed exactly.
    """

    file: Path
    left_out: int = 0
    remaining: int = 0
    unchanged: int = 0
    notes: list[str] = field(default_factory=list)


def replay_weights(run: Path, until_seconds: float | None = None) -> list[WeightsReplay]:
    """Compute the weights of every shard of a run again.

    Args:
        run: The run folder.
        until_seconds: Stop this many seconds after the run's first record.

    Raises:
        StorageError: There are no payloads, or one of them is torn.
        ProtocolError: The tape has another schema version.
    """
    shards = _replayed(run, until_seconds)
    for shard in shards:
        shard.end(whole=until_seconds is None)
    return [shard.result for shard in shards]


def weights_without(
    run: Path, without: Without, file: Path, until_seconds: float | None = None
) -> WeightsWithout:
    """Compute a run's weights as they would be without a learner, and write them.

    Args:
        run: The run folder.
        without: The learner, and since when it is left out.
        file: The file to write, safetensors.
        until_seconds: Stop this many seconds after the run's first record.

    Raises:
        ConfigError: The learner did not contribute to this run, or single contributions are not
            known: with relays, limited shares of parties, secure sums or differential privacy.
        StorageError: There are no payloads, or one that is needed is missing, torn or corrupted.
        ProtocolError: The tape has another schema version.
    """
    shards = _replayed(run, until_seconds, without)
    known = sorted({learner for shard in shards for learner in shard.learners})
    if without.learner not in known:
        raise ConfigError(
            f"learner {without.learner!r} sent no contribution in {run}: choose one of "
            f"{', '.join(known) or 'none'}"
        )
    found = WeightsWithout(file)
    copies: dict[int, torch.Tensor] = {}
    for shard in shards:
        copies |= shard.copies()
        found.left_out += shard.left_out
        found.remaining += shard.folded
        found.unchanged += shard.unchanged
        found.notes += [f"{shard.result.process}: {note}" for note in shard.result.notes]
    plan = shards[0].plan
    missing = sorted(set(range(len(plan.fragments))) - copies.keys())
    if missing:
        why = "; ".join(found.notes[:1]) or "the tapes of their shards are not here"
        raise StorageError(f"the weights of fragments {missing} cannot be computed: {why}")
    step = {"without": without.learner, "from_step": str(without.from_step)}
    save_weights(file, by_name(plan, copies), step)
    return found


def _replayed(
    run: Path, until_seconds: float | None, without: Without | None = None
) -> list[_Shard]:
    lives: dict[int, list[list[Record]]] = {}
    for _, records in by_process(TapeReader(run), until_seconds, samples=True):
        header = records[0].data["header"]
        if header["machine"] == "shard":
            lives.setdefault(header["shard"], []).extend(_lives(records))
            if without is not None:
                _require_single_contributions(read_settings(header["settings"]))
    if not (run / PAYLOADS).is_dir():
        raise StorageError(
            f"{run / PAYLOADS} does not exist: only a run with syncer.record_payloads = true, or "
            "with scores in [trust], records the payloads that a replay of its weights needs"
        )
    shards = []
    for number in sorted(lives):
        shard = _Shard(run, number, without)
        for life in sorted(lives[number], key=lambda records: records[0].wall):
            for record in life:
                shard.take(record)
        shards.append(shard)
    return shards


def _lives(records: list[Record]) -> list[list[Record]]:
    """Split the records of a process by incarnation."""
    lives: list[list[Record]] = []
    for record in records:
        if record.kind == "start":
            lives.append([])
        lives[-1].append(record)
    return lives


class _Shard:
    """One shard's tensors, through all its incarnations, also those of its standby."""

    def __init__(self, run: Path, shard: int, without: Without | None = None) -> None:
        self.result = WeightsReplay(f"shard-{shard}")
        self.learners: set[str] = set()
        self.left_out = self.folded = self.unchanged = 0
        self._without, self._clock = without, 0
        self._run, self._shard = run, shard
        self._folder = run / PAYLOADS / f"shard-{shard}"
        self._layout = read_layout(self._folder)
        self._states: dict[int, dict[Version, FragmentTensors]] = {}
        self._seen: set[tuple[int, Version]] = set()
        self._tensors: ShardTensors

    def take(self, record: Record) -> None:
        """Process the next record of the tape."""
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
        self._bodies: dict[tuple[str, int, Asking], messages.Expect] = {}
        self._copies: dict[tuple[str, int, int], messages.ExpectCopy] = {}
        self._announced: dict[Asking, str] = {}
        self._merging: dict[int, tuple[messages.Merge, OuterStep]] = {}
        self._lost_bodies: set[Asking] = set()
        self._lost: set[int] = set()
        self._unknown: set[int] = set()
        self._recovered: tuple[messages.DurableCopy, ...] = ()

    def _event(self, event: Any) -> None:
        match event:
            case messages.Received(_, messages.Upload() as message):
                self._announced[message.ask] = message.digest
            case messages.BodyArrived():
                self._arrived(event)
            case messages.CopyArrived(learner, fragment, attempt, text):
                self._copied(fragment, self._copies[learner, fragment, attempt].path, text)
            case Done(messages.LoadWeights(), WeightsLoaded(digests)):
                for fragment, text in digests:
                    self._copied(fragment, f"file/{fragment}", text)
            case messages.DiskRead(copies):
                self._recovered = copies
            case messages.Received(_, messages.ShardAdmitted() as admitted):
                self._recover(admitted.term)
            case Done(messages.Merge(number, fragment), Made(text)):
                self._merged(number, fragment, text)
            case Failed(messages.Merge(number, fragment)):
                failed = self._merging.pop(number, None)
                if failed is not None:
                    self._states[fragment].pop(failed[0].version, None)
                self._lost.discard(fragment)

    def _arrived(self, event: messages.BodyArrived) -> None:
        expected = self._bodies[event.learner, event.fragment, event.ask]
        path, codec = expected.path, expected.codec
        body = read_body(self._folder, path)
        if body is None:
            self._lose(event, f"{path} was not recorded")
            return
        plan = self._tensors.plan
        text = self._announced.get(event.ask) or body_digest(
            body, plan.uplink_of(event.fragment, codec)
        )
        try:
            self._tensors.verify(event.fragment, event.ask, body, text, codec)
        except (ProtocolError, MergeError) as error:
            self._lose(event, f"{path}: {error}")

    def _lose(self, event: messages.BodyArrived, problem: str) -> None:
        if not self._lost_bodies:
            self.result.notes.append(
                f"contribution {event.ask} to fragment {event.fragment} and all versions that "
                f"depend on it cannot be computed: {problem}"
            )
        self._lost_bodies.add(event.ask)

    def _copied(self, fragment: int, path: str, text: str) -> None:
        body = read_body(self._folder, path)
        if body is None:
            self._forget(fragment, f"{path} was not recorded")
            return
        numel = self._tensors.plan.fragments[fragment].numel
        try:
            self._tensors.receive(fragment, values_of(body, numel), text)
        except (ProtocolError, MergeError) as error:
            self.result.differences.append(f"{path} of fragment {fragment}: {error}")
        self._unknown.discard(fragment)

    def _recover(self, term: int) -> None:
        """Continue from the shard's recovered state, which must equal the computed state."""
        kept = read_recovered(self._folder, term, self._tensors) or {}
        for durable in self._recovered:
            fragment, version = durable.fragment, durable.version
            ours = self._states.get(fragment, {}).get(version)
            if self._without is not None:
                self._recover_without(fragment, version)
                continue
            if ours is not None and values_digest(ours.published) != durable.digest:
                ours = None  # another merge got this version, and its record died with the process
            theirs = kept.get(fragment)
            if ours is not None and theirs is not None and not _same(ours, theirs):
                self.result.differences.append(f"fragment {fragment}: the bits on the disk differ")
            if ours is None and theirs is not None:
                self.result.notes.append(
                    f"version {version} of fragment {fragment} comes from the state that the shard "
                    f"recovered in term {term}, because its merge is not on the tape"
                )
            entry = ours or theirs
            if entry is None:
                self._forget(
                    fragment, f"version {version}, which was on the disk, was not recorded"
                )
            else:
                self._tensors.fragments[fragment] = entry
        self._recovered = ()

    def _recover_without(self, fragment: int, version: Version) -> None:
        """Continue from the state computed here, because the recovered one has the learner."""
        states = self._states.get(fragment, {})
        if version not in states and states:
            self.result.notes.append(
                f"the merge of version {version} of fragment {fragment} is not on the tape, because"
                " its process was killed: it is left out as a whole"
            )
        if states:
            self._tensors.fragments[fragment] = states.get(version) or states[list(states)[-1]]
        else:
            self._forget(fragment, f"the tape has no version before {version}")

    def _install(self, order: messages.Install) -> None:
        """Install a copy that was received; without a learner, the same version computed here."""
        tensors, fragment = self._tensors, order.fragment
        before = tensors.fragments.get(fragment)
        tensors.install_received(fragment, order.digest)
        states = self._states.get(fragment, {})
        if self._without is not None and states and tensors.fragments.get(fragment) is not before:
            # The shard lost its disk, so a learner's copy with the same counter replaced its own.
            ours = [e for v, e in states.items() if v.counter == order.version.counter]
            if ours:
                tensors.install(fragment, ours[-1].published)
            else:
                self._forget(fragment, f"version {order.version}, a learner's copy, is unknown")
        self._remember(fragment, order.version)

    def _forget(self, fragment: int, problem: str) -> None:
        self.result.notes.append(f"fragment {fragment} cannot be computed from here: {problem}")
        self._tensors.fragments.pop(fragment, None)
        self._unknown.add(fragment)

    def _order(self, order: Any) -> None:
        tensors = self._tensors
        match order:
            case messages.Expect():
                self._bodies[order.learner, order.fragment, order.ask] = order
            case messages.ExpectCopy():
                self._copies[order.learner, order.fragment, order.attempt] = order
            case messages.RoundOpened():
                self._clock = max(self._clock, order.tick)
            case messages.Fold(fragment, learner, ask, steps, tokens, _, scale, discount, _, party):
                self.learners.add(learner)
                if self._leaves_out(order):
                    tensors.drop(fragment, ask)
                    self.left_out += 1
                elif ask in self._lost_bodies:
                    self._lost.add(fragment)
                else:
                    tensors.fold(fragment, ask, steps, tokens, scale, discount, party)
                    self.folded += 1
            case messages.Drop(fragment, ask=ask):
                tensors.drop(fragment, ask)
            case messages.Merge():
                self._merge(order)
            case messages.Install():
                self._install(order)
            case messages.Broadcast(messages.Published() as message) | messages.Send(
                _, messages.Published() as message
            ):
                self._published(message)

    def _leaves_out(self, fold: messages.Fold) -> bool:
        if self._without is None:
            return False
        for used, what in (
            (fold.relay, "relays send sums of contributions"),
            (fold.party, "parties have limited shares"),
        ):
            if used:
                raise ConfigError(
                    f"the weights without a learner cannot be computed, because {what}: go back "
                    "to a checkpoint (ddiloco train --resume --checkpoint)"
                )
        return fold.learner == self._without.learner and self._clock >= self._without.from_step

    def _merge(self, order: messages.Merge) -> None:
        if order.fragment in self._lost and order.fragment not in self._unknown:
            self._forget(order.fragment, f"its round {order.round} has a missing contribution")
        self._lost.discard(order.fragment)
        if order.fragment in self._unknown:
            self._tensors.forget_folded(order.fragment)
            return
        if self._without is not None and not self._tensors.has_folded(order.fragment):
            self.unchanged += 1
            self._remember(order.fragment, order.version)
            return
        try:
            step = self._tensors.prepare(order.fragment, order.factors)
        except MergeError:
            return  # the merge failed in the run, too: the tape's next record is its failure
        self._merging[order.round] = (order, step)
        self._remember(order.fragment, order.version, step.after)

    def _merged(self, number: int, fragment: int, text: str) -> None:
        if number not in self._merging:
            return
        order, step = self._merging.pop(number)
        self._tensors.commit(fragment, step)
        self.result.merges += 1
        if self._without is None and step.copy.digest != text:
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

    def _published(self, message: messages.Published) -> None:
        place = (message.fragment, message.version)
        if place in self._seen or self._without is not None:
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

    @property
    def plan(self) -> MergePlan:
        """How the run's tensors are divided, encoded and merged."""
        return self._tensors.plan

    def copies(self) -> dict[int, torch.Tensor]:
        """Return the published copies, each fp32 [N]."""
        return {p: entry.published for p, entry in self._tensors.fragments.items()}

    def end(self, *, whole: bool) -> None:
        """Compare the final weights with those that the run wrote."""
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


def _require_single_contributions(config: RunConfig) -> None:
    """Raise `ConfigError` if single contributions are not visible, or merges have noise."""
    for used, what in (
        (config.privacy.secure_sums, "secure_sums=true"),
        (config.privacy.dp is not None, "[privacy.dp]"),
    ):
        if used:
            raise ConfigError(
                f"the weights without a learner cannot be computed, because {what} hides what each "
                "one contributed: go back to a checkpoint (ddiloco train --resume --checkpoint)"
            )


def _same(left: FragmentTensors, right: FragmentTensors) -> bool:
    ours, theirs = as_tensors(left), as_tensors(right)
    return ours.keys() == theirs.keys() and all(map(_equal, ours.values(), theirs.values()))


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return values_digest(left) == values_digest(right)
