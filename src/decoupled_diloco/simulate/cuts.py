"""Consistent cuts of a virtual world: what its disks have of them, and the world that goes on.

`check_run_checkpoint` asserts that a complete cut is consistent: no part knows of what another did
after its own. `resumed` makes a new world of a cut; lineage goes on across it, so that `NoBodies`
sees whatever would be merged twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol.checkpoints.effects import KeepCheckpoint
from decoupled_diloco.protocol.coordinator import CoordinatorState
from decoupled_diloco.protocol.events import KeptFragment, ShardMemory
from decoupled_diloco.simulate.bodies import Life, Value

if TYPE_CHECKING:
    from decoupled_diloco.simulate.shard_disk import Kept
    from decoupled_diloco.simulate.world import World


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A shard's part: its fragments as its worker had them, and what else it knew."""

    kept: dict[int, Kept]
    memory: ShardMemory


@dataclass(frozen=True, slots=True)
class LearnerPart:
    """A learner's part: its checkpoint of one boundary; no values where tensors are real.

    ``life`` and ``steps``: how many steps this life had made.
    """

    fragments: tuple[KeptFragment, ...]
    values: Any
    life: Life = ("", 0)
    steps: int = 0


@dataclass(slots=True)
class WorldCuts:
    """All cuts of a world.

    Attributes:
        shards: What each shard has of each cut.
        learners: What each learner has of each cut.
        complete: The complete ones, by number, with the coordinator's part.
    """

    shards: dict[tuple[int, int], ShardPart] = field(default_factory=dict)
    learners: dict[tuple[int, str], LearnerPart] = field(default_factory=dict)
    complete: dict[int, tuple[KeepCheckpoint, CoordinatorState]] = field(default_factory=dict)


def check_run_checkpoint(world: World, number: int) -> None:
    """Asserts that a complete cut is consistent."""
    cut, _ = world.cuts.complete[number]
    assert len(cut.shards) == len(world.shards), "a cut without a shard is complete"
    for part in cut.learners:
        own = world.cuts.learners[number, part.who]
        for index, kept in enumerate(own.fragments):
            shard = world.options.owner(kept.fragment)
            there = world.cuts.shards[number, shard].kept[kept.fragment]
            version = there.copy.version
            assert kept.version <= version, (
                f"cut {number}: {part.who} holds {kept.version} of fragment {kept.fragment}, "
                f"its shard has {version}"
            )
            held, _, spans = own.values[index]
            value: Value = there.content
            merged = value.last(own.life)
            assert merged <= own.steps, f"cut {number}: step {merged} of {own.life} is merged"
            same = kept.version == version
            assert not same or held.number == value.number, "one version, two contents"
            for span in spans if same else ():
                assert not value.has(span), f"cut {number}: {span} is in the shard's part, too"


def resumed(world: World, number: int, make: Any) -> World:
    """A new world in which every process goes on from its part of a cut.

    Args:
        world: Where the cut was taken.
        number: Of a complete cut.
        make: Makes a world with the same options, learners and bodies, and nothing in it.
    """
    cut, state = world.cuts.complete[number]
    after: World = make()
    after.coordinator.go_back(state, world.coordinator)
    for shard in after.shards:
        part = world.cuts.shards[number, shard.shard]
        for kept in part.kept.values():
            shard.disk.keep(0, kept, part.memory)
        shard.exact = True
    for learner in cut.learners:
        own = world.cuts.learners[number, learner.who]
        after.learners[learner.who].disk.put(own.fragments, own.values)
    return after
