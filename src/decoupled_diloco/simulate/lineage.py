"""Which training step is in which version: nothing is merged twice, and nothing goes missing.

Follows what the processes of a `System` really do to their tensors: what a snapshot is taken of,
what is sent, folded, merged and applied, and what a checkpoint brings back. The machines' own
counters are not believed, they are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from decoupled_diloco.learner.store import ModuleStore
from decoupled_diloco.learner.taking_part import FAREWELL_SECONDS
from decoupled_diloco.merge import values_digest
from decoupled_diloco.protocol.effects import (
    Apply,
    Fold,
    Install,
    Merge,
    Relabel,
    SendBody,
    Snapshot,
)
from decoupled_diloco.protocol.events import (
    Began,
    DiskRead,
    DurableCopy,
    Lost,
    Merged,
    MergeFailed,
    Paused,
    Received,
    StepFinished,
)
from decoupled_diloco.protocol.messages import Outcome
from decoupled_diloco.protocol.peers import is_shard_peer, shard_of
from decoupled_diloco.protocol.versions import Asking, Version

if TYPE_CHECKING:
    from decoupled_diloco.simulate.hosts import CheckpointId, ShardHost
    from decoupled_diloco.simulate.system import System

Life = tuple[str, int]
"""A learner and the number of its process."""

Steps = dict[Life, int]
"""Steps of lives, as bits: bit s is step s."""


def steps_of(life: Life, first: int, last: int) -> Steps:
    """The steps ``first < s <= last`` of a life."""
    return {life: (2 << last) - (2 << first)} if last > first else {}


def union(a: Steps, b: Steps) -> Steps:
    """The steps of either."""
    return {life: a.get(life, 0) | b.get(life, 0) for life in a.keys() | b.keys()}


def without(a: Steps, b: Steps) -> Steps:
    """The steps of the first that the second has not."""
    return {life: bits & ~b.get(life, 0) for life, bits in a.items() if bits & ~b.get(life, 0)}


def common(a: Steps, b: Steps) -> Steps:
    """The steps of both."""
    return {life: bits & b[life] for life, bits in a.items() if bits & b.get(life, 0)}


def count(steps: Steps) -> int:
    """How many they are."""
    return sum(bits.bit_count() for bits in steps.values())


@dataclass
class Local:
    """One fragment at a learner.

    Attributes:
        held: The version that its parameters go back to.
        own: Steps that are in its parameters and not in that version.
        snapshot: Those that are in the snapshot.
        sent: Those that are in what was sent since.
        given_up: What was thrown away.
        under_way: What was sent, and not answered yet.
        parted: What was under way as the connection broke: nobody says what became of it, and it
            counts as discarded, unless it is merged.
    """

    held: Version | None = None
    own: Steps = field(default_factory=dict)
    snapshot: Steps = field(default_factory=dict)
    sent: Steps | None = None
    given_up: Steps = field(default_factory=dict)
    under_way: dict[Asking, Steps] = field(default_factory=dict)
    parted: Steps = field(default_factory=dict)


@dataclass
class Trainer:
    """A learner's present life.

    Attributes:
        restored: The bits of each fragment in its checkpoint, until they are looked at.
    """

    life: Life
    steps: int = 0
    fragments: list[Local] = field(default_factory=list)
    restored: list[str | None] = field(default_factory=list)


class Lineage:
    """Watches a system; raises `AssertionError` at the event that breaks a rule."""

    def __init__(self, system: System) -> None:
        self.contents: dict[tuple[int, Version], Steps] = {}
        self.newest: dict[int, Version] = {}
        self.digests: dict[tuple[int, Version], str] = {}
        self.by_digest: dict[tuple[int, str], Steps] = {}
        self.sent: dict[tuple[str, int, Asking], Steps] = {}
        self.epochs: dict[tuple[str, int], int] = {}
        self.kept: dict[tuple[str, CheckpointId | None], list[Local]] = {}
        self.bits: dict[tuple[str, CheckpointId | None], list[str | None]] = {}
        self._earlier_lives = 0
        self.resumed(system)

    def resumed(self, system: System) -> None:
        """Follows another system, which starts from checkpoints of the one before, if any.

        Versions, checkpoints and epochs are the run's, and stay; processes count their lives anew.
        """
        self._earlier_lives = max(self.epochs.values(), default=0)
        self.system = system
        self.shards = {host.name: host for host in system.shard_processes}
        self.newest.clear()
        self.trainers: dict[str, Trainer] = {}
        self.folded: dict[tuple[str, int, int], Steps] = defaultdict(dict)
        self.merging: dict[tuple[str, int, int], tuple[Merge, Steps]] = {}
        system.recorders.append(self)

    def __call__(self, who: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        """One event that a machine has handled."""
        if who in self.system.learners:
            self._learner(self._trainer(who), event, effects)
        elif who in self.shards:
            self._shard(self.shards[who], event, effects)

    def _trainer(self, who: str) -> Trainer:
        host = self.system.learners[who]
        trainer, life = self.trainers.get(who), self._earlier_lives + host.life
        if trainer is None or trainer.life[1] != life:
            count = self.system.config.sync.fragments
            trainer = Trainer((who, life), 0, [Local() for _ in range(count)])
            self.trainers[who] = trainer
            epoch = host.machine.epoch
            other = self.epochs.setdefault((who, epoch), life)
            assert other == life, f"two processes of {who} have epoch {epoch}"
        return trainer

    def checkpoint(self, who: str, taken: CheckpointId, told: int) -> None:
        """A learner keeps what it has at this moment.

        Args:
            told: How many more its machine was told of, which will not come.
        """
        trainer = self._trainer(who)
        host = self.system.learners[who]
        last = steps_of(trainer.life, trainer.steps - told, trainer.steps)
        self.kept[who, taken] = [Local(f.held, without(f.own, last)) for f in trainer.fragments]
        self.bits[who, taken] = [host.bits_of(p) for p in range(len(trainer.fragments))]

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
            assert bits == trainer.restored, f"{host.name} is not what its checkpoint was"
            trainer.restored = []
        if isinstance(event, StepFinished):
            trainer.steps += 1
            step = steps_of(trainer.life, trainer.steps - 1, trainer.steps)
            for local in trainer.fragments:
                local.own = union(local.own, step)
        elif isinstance(event, Lost) and is_shard_peer(event.peer):
            of_shard = slice(shard_of(event.peer), None, len(self.system.shards))
            for local in trainer.fragments[of_shard]:
                for sent in local.under_way.values():
                    local.parted = union(local.parted, sent)
                local.under_way.clear()
        elif isinstance(event, Received) and isinstance(event.message, Outcome):
            outcome = event.message
            sent = trainer.fragments[outcome.fragment].under_way.pop(outcome.ask, {})
            if outcome.verdict != "accepted":
                local = trainer.fragments[outcome.fragment]
                local.given_up = union(local.given_up, without(sent, local.own))
                if local.sent == sent:
                    local.sent = None
        for effect in effects:
            match effect:
                case Snapshot(fragment, base):
                    local = trainer.fragments[fragment]
                    assert base == local.held, f"a snapshot against {base}, {local.held} is held"
                    local.snapshot = dict(local.own)
                case SendBody(fragment=fragment, ask=ask, base=base, steps=steps):
                    local = trainer.fragments[fragment]
                    assert base == local.held
                    assert steps == count(local.snapshot), f"{steps} steps are told"
                    local.under_way[ask] = local.sent = local.snapshot
                    self.sent[trainer.life[0], fragment, ask] = local.sent
                case Apply(fragment, version, mode):
                    self._check_bits(trainer.life[0], fragment, version)
                    self._apply(trainer, trainer.fragments[fragment], fragment, version, mode)
                case Relabel(fragment, version, _, staged):
                    if not staged:
                        trainer.fragments[fragment].held = version

    def _check_bits(self, who: str, fragment: int, version: Version) -> None:
        """A copy that is about to be applied has the bits that its shard has published."""
        tensors = self.system.learners[who].tensors
        values = tensors.staged[fragment] if isinstance(tensors.store, ModuleStore) else None
        if isinstance(values, Tensor):  # else it is held already, or other processes have it
            text = f"{who} applies other bits than those of {version} of fragment {fragment}"
            assert values_digest(values) == self.digests[fragment, version], text

    def _apply(
        self, trainer: Trainer, local: Local, fragment: int, version: Version, mode: str
    ) -> None:
        content, before = self.contents[fragment, version], local.own
        if mode == "overwrite":
            local.own = {}
        elif mode in ("carry", "blend"):
            assert local.sent is not None, "carrying needs what was sent"
            local.own = without(before, local.sent)
        twice = common(local.own, content)
        assert not twice, f"{trainer.life[0]}: {count(twice)} steps would be merged twice ({mode})"
        lost = without(without(without(before, local.own), content), local.sent or {})
        local.given_up = union(local.given_up, lost)
        local.held, local.sent, local.snapshot = version, None, {}

    def _shard(self, host: ShardHost, event: Any, effects: Sequence[Any]) -> None:
        who, life = host.name, host.life
        if isinstance(event, Merged):
            order, folded = self.merging.pop((who, life, event.fragment))
            base = self.contents[event.fragment, order.base]
            self._is_new(event.fragment, folded, base)
            self._content(event.fragment, order.version, event.digest, union(base, folded))
        elif isinstance(event, DiskRead):
            for copy in event.copies:
                self._recovered(host, copy)
        elif isinstance(event, MergeFailed):
            self.merging.pop((who, life, event.fragment), None)
        for effect in effects:
            match effect:
                case Fold(fragment, learner, ask):
                    sent = self.sent[learner, fragment, ask]
                    folded = self.folded[who, life, fragment]
                    self._is_new(fragment, sent, folded)
                    self.folded[who, life, fragment] = union(folded, sent)
                case Merge(fragment=fragment):
                    taken = self.folded.pop((who, life, fragment), {})
                    self.merging[who, life, fragment] = (effect, taken)
                case Install(fragment, version):
                    digest = host.machine.state.fragments[fragment].digest
                    content = self.by_digest.get((fragment, digest), {})
                    self._content(fragment, version, digest, content)

    def _recovered(self, host: ShardHost, copy: DurableCopy) -> None:
        """The disk may have a version of which its process had no time to tell anybody."""
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
        self.by_digest[fragment, digest] = content

    @staticmethod
    def _is_new(fragment: int, folded: Steps, known: Steps) -> None:
        twice = common(folded, known)
        assert not twice, f"fragment {fragment}: {count(twice)} steps are merged twice: {twice}"

    def check_end(self) -> None:
        """Whatever was trained by who saw the end is in the result, or was given up and counted."""
        for who, trainer in self.trainers.items():
            machine = self.system.learners[who].machine
            if machine is None or not machine.state.over:
                waited = self.system.learners[who].waited_seconds
                text = f"{who} has waited for the end for {waited} s only"
                assert waited is None or waited >= FAREWELL_SECONDS, text
                continue  # it has not seen the end
            if not machine.state.ready:
                continue  # it was joining as the run ended
            everything = steps_of(trainer.life, 0, trainer.steps)
            for fragment, local in enumerate(trainer.fragments):
                assert local.held is not None
                content = self.contents[fragment, local.held]
                accounted = union(content, local.given_up)
                missing = without(everything, union(accounted, local.parted))
                bits = self.system.learners[who].bits_of(fragment)
                text = f"{who} ends with other bits than {local.held} of fragment {fragment}"
                assert bits == self.digests[fragment, local.held], text
                assert not local.own, f"{who} ends with {count(local.own)} steps in {fragment}"
                if local.held < self.newest[fragment]:
                    continue  # its link was too slow for the last copy
                assert not missing, f"{count(missing)} steps of {who} are not in {fragment}"
