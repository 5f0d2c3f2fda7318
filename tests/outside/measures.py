"""What is read off a world: rounds, who was heard, how busy a link was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol import effects as do
from outside.content import Content, missing
from outside.learner import Learner
from outside.nodes import Node, Spec
from outside.world import World


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
    counted = Counter[int](dict.fromkeys(range(world.options.fragments), 0))
    for c in world.contributions.values():
        if c.learner == learner.name and c.version and (c.arrived or 0.0) > after:
            counted[c.fragment] += 1
    return counted


def calm(options: Options, specs: list[Spec], **more: Any) -> tuple[World, Rounds]:
    world = World(options, specs, check_every=20, **more)
    return world, Rounds(world)


def all_told_once(world: World) -> None:
    """What arrived is in one version, and its learner has heard of it once, and of that one."""
    for c in world.contributions.values():
        if c.arrived is not None:
            assert c.version is not None, f"arrived, never merged: {c}"
            heard = [o.version for o in c.heard if o.verdict == "accepted"]
            assert heard == [c.version], f"in {c.version}, heard {heard}: {c}"


def final(world: World) -> dict[int, Content]:
    return {p: s.current[p][1] for s in world.shards for p in s.owned}


def nothing_trained_is_missing(world: World, learners: Iterable[Learner]) -> None:
    """Rule 12: all that their parameters hold when they stop is in the result."""
    result = final(world)
    for learner in learners:
        for p, whole in result.items():
            lost = missing(learner.parameters(p), whole)
            assert not lost, f"{learner.name} trained fragment {p}: {lost[:3]} is not in the end"
