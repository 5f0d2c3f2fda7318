"""What is read off a world: rounds, who was heard, how busy a link was."""

from __future__ import annotations

from collections import Counter
from typing import Any

from outside.world import Learner, Node, Spec, World

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol import effects as do


class Rounds:
    """Every round of a world: when it opened and how it ended."""

    def __init__(self, world: World) -> None:
        self.opened: list[tuple[float, do.RoundOpened]] = []
        self.finished: list[tuple[float, do.RoundFinished]] = []
        self.step_ends: dict[str, list[float]] = {}
        world.watchers.append(self)

    def __call__(self, node: Node, event: Any, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, do.RoundOpened):
                self.opened.append((node.world.now, effect))
            elif isinstance(effect, do.RoundFinished):
                self.finished.append((node.world.now, effect))

    def merged(self, after: float, before: float) -> int:
        return sum(r.verdict == "merged" and after < t <= before for t, r in self.finished)


def nominal(options: Options, seconds: float, step: float = 1.0) -> float:
    return seconds / step / options.period * options.fragments


def heard(world: World, learner: Learner, after: float = 0.0) -> Counter[int]:
    """How often each fragment was told something by a learner that went into a version."""
    counted = Counter[int]({p: 0 for p in range(world.options.fragments)})
    for contribution in world.contributions.values():
        if contribution.learner == learner.name and contribution.version is not None:
            if contribution.arrived is not None and contribution.arrived > after:
                counted[contribution.fragment] += 1
    return counted


def calm(options: Options, specs: list[Spec], **more: Any) -> tuple[World, Rounds]:
    world = World(options, specs, check_every=20, **more)
    return world, Rounds(world)


def nothing_lost(world: World) -> None:
    """What a shard folded is in a version, its learner heard it once, and nothing twice."""
    for c in world.contributions.values():
        verdicts = [outcome.verdict for outcome in c.told]
        assert verdicts.count("accepted") <= 1, f"seed {world.seed}: {c}"
        if c.arrived is not None and not c.term_over:
            assert c.folded or c.dropped, f"seed {world.seed}: neither folded nor dropped: {c}"
        if c.folded and not c.merge_failed and not c.term_over:
            assert c.version is not None, f"seed {world.seed}: folded, never merged: {c}"
            told = [o.version for o in c.told if o.verdict == "accepted"]
            assert told == [c.version], f"seed {world.seed}: in {c.version}, told {told}: {c}"
