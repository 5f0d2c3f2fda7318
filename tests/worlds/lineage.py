"""Track which training step is in which version: no step is merged twice, and none is lost.

The tracker follows what the processes of a `System` really do to their tensors: snapshots, uploads,
folds, merges, applied copies and restored checkpoints. It does not trust the machines' own
counters, but compares them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from decoupled_diloco.learner.ending import FAREWELL_SECONDS
from decoupled_diloco.learner.parameter_store import ModuleStore, MomentStore
from decoupled_diloco.merge import values_digest
from decoupled_diloco.protocol.messages import (
    Apply,
    Asking,
    Began,
    DiskRead,
    Done,
    DurableCopy,
    Failed,
    Fold,
    FoldSum,
    ForgetFolded,
    ForgetSum,
    Install,
    Lost,
    Made,
    Merge,
    Outcome,
    Paused,
    Receipt,
    Received,
    Relabel,
    SendBody,
    SendSum,
    Snapshot,
    StepFinished,
    SumArrived,
    TakeStep,
    Version,
    is_shard_peer,
    shard_of,
)

if TYPE_CHECKING:
    from decoupled_diloco_lab.simulate.hosts import CheckpointId, ShardHost
    from decoupled_diloco_lab.simulate.system import System

Life = tuple[str, int]
"""A learner and the number of its incarnation."""

Steps = dict[Life, int]
"""Steps by incarnation, as bit sets: bit s is step s."""


def steps_of(life: Life, first: int, last: int) -> Steps:
    """Return the steps ``first < s <= last`` of an incarnation."""
    return {life: (2 << last) - (2 << first)} if last > first else {}


def union(a: Steps, b: Steps) -> Steps:
    """Return the steps in either set."""
    return {life: a.get(life, 0) | b.get(life, 0) for life in a.keys() | b.keys()}


def without(a: Steps, b: Steps) -> Steps:
    """Return the steps in the first set that are not in the second."""
    return {life: bits & ~b.get(life, 0) for life, bits in a.items() if bits & ~b.get(life, 0)}


def common(a: Steps, b: Steps) -> Steps:
    """Return the steps in both sets."""
    return {life: bits & b[life] for life, bits in a.items() if bits & b.get(life, 0)}


def count(steps: Steps) -> int:
    """Return the number of steps."""
    return sum(bits.bit_count() for bits in steps.values())


@dataclass
class Local:
    """One fragment at a learner.

    Attributes:
        held: The version that its parameters are based on.
        own: Steps in its parameters that are not in that version.
        snapshot: Steps in the snapshot.
        sent: Steps in the contribution sent since.
        discarded: Steps that were discarded.
        in_flight: Steps in contributions without an outcome yet.
        parted: Steps that were in flight when the connection broke. Their outcome is unknown, so
            they count as discarded unless they are merged.
    """

    held: Version | None = None
    own: Steps = field(default_factory=dict)
    snapshot: Steps = field(default_factory=dict)
    sent: Steps | None = None
    discarded: Steps = field(default_factory=dict)
    in_flight: dict[Asking, Steps] = field(default_factory=dict)
    parted: Steps = field(default_factory=dict)


@dataclass
class Trainer:
    """A learner's present incarnation.

    Attributes:
        restored: The digest of each fragment in its checkpoint, until they are compared.
    """

    life: Life
    steps: int = 0
    fragments: list[Local] = field(default_factory=list)
    restored: list[str | None] = field(default_factory=list)


class Lineage:
    """Checks one system. It raises `AssertionError` at the event that breaks a rule."""

    def __init__(self, system: System) -> None:
        self.contents: dict[tuple[int, Version], Steps] = {}
        self.newest: dict[int, Version] = {}
        self.digests: dict[tuple[int, Version], str] = {}
        # Two versions may have the same values; a restored one keeps its counter.
        self.by_digest: dict[tuple[int, int, str], Steps] = {}
        self.sent: dict[tuple[str, int, Asking], Steps] = {}
        self.epochs: dict[tuple[str, int], int] = {}
        self.kept: dict[tuple[str, CheckpointId | None], list[Local]] = {}
        self.bits: dict[tuple[str, CheckpointId | None], list[str | None]] = {}
        self._earlier_lives = 0
        self.resumed(system)

    def resumed(self, system: System) -> None:
        """Follow another system, which starts from checkpoints of the previous one, if any.

        Versions, checkpoints and epochs belong to the run and stay. Processes count their
        incarnations from the start again.
        """
        self._earlier_lives = max(self.epochs.values(), default=0)
        self.system = system
        self.shards = {host.name: host for host in system.shard_processes}
        self.newest.clear()
        self.trainers: dict[str, Trainer] = {}
        self.folded: dict[tuple[str, int, int], Steps] = defaultdict(dict)
        self.merging: dict[tuple[str, int, int], tuple[Merge, Steps]] = {}
        self.relays = {host.name: host for host in system.relays}
        self.at_relays: dict[tuple[str, int, int], list[Asking]] = defaultdict(list)
        self.sums: dict[tuple[str, int, int], tuple[Asking, ...]] = {}
        self.learner_of: dict[tuple[int, Asking], str] = {}
        self.opened = set[tuple[int, Asking]]()
        system.recorders.append(self)

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """Check one event that a state machine has handled."""
        if process in self.system.learners:
            self._learner(self._trainer(process), event, effects)
        elif process in self.shards:
            self._shard(self.shards[process], event, effects)
        elif process.removeprefix("relay-") in self.relays:
            self._relay(process.removeprefix("relay-"), event, effects)

    def _trainer(self, process: str) -> Trainer:
        host = self.system.learners[process]
        trainer, life = self.trainers.get(process), self._earlier_lives + host.life
        if trainer is None or trainer.life[1] != life:
            count = self.system.config.sync.fragments
            trainer = Trainer((process, life), 0, [Local() for _ in range(count)])
            self.trainers[process] = trainer
            epoch = host.machine.epoch
            other = self.epochs.setdefault((process, epoch), life)
            assert other == life, f"two processes of {process} have epoch {epoch}"
        return trainer

    def checkpoint(self, process: str, taken: CheckpointId, untrained: int) -> None:
        """Record the contents of a learner's checkpoint, which it writes now.

        Args:
            process: The learner.
            taken: Identifies the checkpoint.
            untrained: Number of the last steps that its machine counted but that did not train.
        """
        trainer = self._trainer(process)
        host = self.system.learners[process]
        last = steps_of(trainer.life, trainer.steps - untrained, trainer.steps)
        self.kept[process, taken] = [Local(f.held, without(f.own, last)) for f in trainer.fragments]
        self.bits[process, taken] = [host.bits_of(p) for p in range(len(trainer.fragments))]

    def _learner(self, trainer: Trainer, event: Any, effects: Sequence[Any]) -> None:
        if isinstance(event, Began) and event.kept:
            loaded = self.system.learners[trainer.life[0]].loaded
            trainer.restored = self.bits[trainer.life[0], loaded]
            for part in event.kept:
                local = trainer.fragments[part.fragment]
                kept = self.kept[trainer.life[0], loaded][part.fragment]
                assert (part.version, part.steps) == (kept.held, count(kept.own))
                local.held, local.own = kept.held, dict(kept.own)
        if isinstance(event, Paused) and trainer.restored:
            host = self.system.learners[trainer.life[0]]
            bits = [host.bits_of(p) for p in range(len(trainer.fragments))]
            assert bits == trainer.restored, f"{host.name} differs from its checkpoint"
            trainer.restored = []
        if isinstance(event, StepFinished):
            trainer.steps += 1
            step = steps_of(trainer.life, trainer.steps - 1, trainer.steps)
            for local in trainer.fragments:
                local.own = union(local.own, step)
        elif isinstance(event, Lost) and is_shard_peer(event.peer):
            of_shard = slice(shard_of(event.peer), None, len(self.system.shards))
            for local in trainer.fragments[of_shard]:
                for sent in local.in_flight.values():
                    local.parted = union(local.parted, sent)
                local.in_flight.clear()
        elif isinstance(event, Received) and isinstance(event.message, Receipt):
            # A device waits no longer. If the shard then crashes before its merge, it is lost.
            local = trainer.fragments[event.message.fragment]
            sent = local.in_flight.get(event.message.ask, {})
            local.parted = union(local.parted, sent)
        elif isinstance(event, Received) and isinstance(event.message, Outcome):
            outcome = event.message
            sent = trainer.fragments[outcome.fragment].in_flight.pop(outcome.ask, {})
            if outcome.verdict != "accepted":
                local = trainer.fragments[outcome.fragment]
                lost = without(sent, local.own)
                if self.system.options.secure and outcome.verdict == "abandoned":
                    # Only training of a sum that was opened must not be in another one.
                    if (outcome.fragment, outcome.ask) in self.opened:
                        local.discarded = union(local.discarded, sent)
                    else:
                        assert not lost, f"{trainer.life[0]} masked {count(lost)} steps in vain"
                local.discarded = union(local.discarded, without(sent, local.own))
                if local.sent == sent and (outcome.fragment, outcome.ask) not in self.opened:
                    local.sent = None
        for effect in effects:
            match effect:
                case Snapshot(fragment, base):
                    local = trainer.fragments[fragment]
                    assert base == local.held, f"snapshot against {base} while {local.held} is held"
                    local.snapshot = dict(local.own)
                case TakeStep(_, fragment, ask, "open"):
                    self.opened.add((fragment, ask))
                case SendBody(fragment=fragment, ask=ask, base=base, steps=steps):
                    local = trainer.fragments[fragment]
                    assert base == local.held
                    assert steps == count(local.snapshot), f"{steps} steps are reported"
                    local.in_flight[ask] = local.sent = local.snapshot
                    self.sent[trainer.life[0], fragment, ask] = local.sent
                case Apply(fragment, version, mode):
                    self._check_bits(trainer.life[0], fragment, version)
                    self._apply(trainer, trainer.fragments[fragment], fragment, version, mode)
                case Relabel(fragment, version, _, staged):
                    if not staged:
                        trainer.fragments[fragment].held = version

    def _check_bits(self, process: str, fragment: int, version: Version) -> None:
        """Check that a copy has the bits that its shard has published before it is applied."""
        tensors = self.system.learners[process].tensors
        alone = isinstance(tensors.store, ModuleStore | MomentStore)
        values = tensors.staged[fragment] if alone else None
        if isinstance(values, Tensor):  # otherwise it is held already, or other ranks have it
            text = f"{process} applies a copy that differs from {version} of fragment {fragment}"
            assert values_digest(values) == self.digests[fragment, version], text

    def _apply(
        self, trainer: Trainer, local: Local, fragment: int, version: Version, mode: str
    ) -> None:
        content, before = self.contents[fragment, version], local.own
        if mode == "overwrite":
            local.own = {}
        elif mode in ("carry", "blend"):
            assert local.sent is not None, f"mode={mode!r} without a contribution that was sent"
            local.own = without(before, local.sent)
        twice = common(local.own, content)
        assert not twice, f"{trainer.life[0]}: {count(twice)} steps would be merged twice ({mode})"
        lost = without(without(without(before, local.own), content), local.sent or {})
        local.discarded = union(local.discarded, lost)
        local.held, local.sent, local.snapshot = version, None, {}

    def _shard(self, host: ShardHost, event: Any, effects: Sequence[Any]) -> None:
        process, life = host.name, host.life
        match event:
            case Done(Merge(fragment=fragment, base=base, version=version), Made(digest)):
                _, folded = self.merging.pop((process, life, fragment))
                content = self.contents[fragment, base]
                self._is_new(fragment, folded, content)
                self._content(fragment, version, digest, union(content, folded))
            case DiskRead(copies):
                for copy in copies:
                    self._recovered(host, copy)
            case Failed(Merge(fragment=fragment)):
                self.merging.pop((process, life, fragment), None)
        for effect in effects:
            match effect:
                case Fold(fragment, learner, ask, relay=relay) if relay:
                    self.learner_of[fragment, ask] = learner
                case FoldSum(fragment, at="") if isinstance(event, SumArrived):
                    for ask in self._content_of_sum(event):
                        sent = self.sent[self.learner_of[fragment, ask], fragment, ask]
                        folded = self.folded[process, life, fragment]
                        self._is_new(fragment, sent, folded)
                        self.folded[process, life, fragment] = union(folded, sent)
                case Fold(fragment, learner, ask):
                    sent = self.sent[learner, fragment, ask]
                    folded = self.folded[process, life, fragment]
                    self._is_new(fragment, sent, folded)
                    self.folded[process, life, fragment] = union(folded, sent)
                case ForgetSum(fragment):
                    self.folded.pop((process, life, fragment), None)
                case Merge(fragment=fragment):
                    taken = self.folded.pop((process, life, fragment), {})
                    self.merging[process, life, fragment] = (effect, taken)
                case Install(fragment, version):
                    digest = host.machine.state.fragments[fragment].digest
                    content = self.by_digest.get((fragment, version.counter, digest), {})
                    self._content(fragment, version, digest, content)

    def _relay(self, relay: str, event: Any, effects: Sequence[Any]) -> None:
        """Follow what a relay has folded, and what it sends."""
        life = self.relays[relay].life
        for effect in effects:
            match effect:
                case Fold(fragment, ask=ask):
                    self.at_relays[relay, life, fragment].append(ask)
                case FoldSum(fragment, other, number):
                    self.at_relays[relay, life, fragment] += self.sums[other, fragment, number]
                case ForgetFolded(fragment):
                    self.at_relays.pop((relay, life, fragment), None)
                case SendSum(_, fragment, number, asks):
                    has = self.at_relays.pop((relay, life, fragment), [])
                    assert list(asks) == has, f"{relay} sends {has} as {asks}"
                    self.sums[relay, fragment, number] = asks

    def _content_of_sum(self, event: SumArrived) -> tuple[Asking, ...]:
        """Return the requests whose contributions are really in a sum."""
        content = self.sums[event.relay, event.fragment, event.number]
        assert content == event.asks, f"{event} contains {content}"
        return content

    def _recovered(self, host: ShardHost, copy: DurableCopy) -> None:
        """Account for a version on the disk that its process had no time to publish."""
        if (copy.fragment, copy.version) in self.contents:
            return
        mine = [other.name for other in self.system.hosts_of(host.shard)]
        for (shard, _, fragment), (order, folded) in self.merging.items():
            if shard in mine and (fragment, order.version) == (copy.fragment, copy.version):
                content = union(self.contents[fragment, order.base], folded)
                self._content(fragment, copy.version, copy.digest, content)

    def _content(self, fragment: int, version: Version, digest: str, content: Steps) -> None:
        self.contents[fragment, version] = content
        self.newest[fragment] = version
        self.digests[fragment, version] = digest
        self.by_digest[fragment, version.counter, digest] = content

    @staticmethod
    def _is_new(fragment: int, folded: Steps, known: Steps) -> None:
        twice = common(folded, known)
        assert not twice, f"fragment {fragment}: {count(twice)} steps are merged twice: {twice}"

    def check_end(self) -> None:
        """Check that all steps of learners that saw the end are merged, or counted as discarded."""
        for process, trainer in self.trainers.items():
            machine = self.system.learners[process].machine
            if machine is None or not machine.state.over:
                waited = self.system.learners[process].waited_seconds
                text = f"{process} waited for the end for only {waited} s"
                assert waited is None or waited >= FAREWELL_SECONDS, text
                continue  # it has not seen the end
            if not machine.state.ready:
                continue  # it was joining as the run ended
            everything = steps_of(trainer.life, 0, trainer.steps)
            for fragment, local in enumerate(trainer.fragments):
                assert local.held is not None
                content = self.contents[fragment, local.held]
                accounted = union(content, local.discarded)
                missing = without(everything, union(accounted, local.parted))
                bits = self.system.learners[process].bits_of(fragment, local.held.counter)
                text = (
                    f"{process} ends with bits that differ from {local.held} of fragment {fragment}"
                )
                assert bits == self.digests[fragment, local.held], text
                assert not local.own, (
                    f"{process} keeps {count(local.own)} steps in fragment {fragment}"
                )
                if local.held < self.newest[fragment]:
                    continue  # its link was too slow for the last copy
                assert not missing, f"fragment {fragment} lacks {count(missing)} steps of {process}"
