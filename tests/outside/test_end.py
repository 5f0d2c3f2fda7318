"""Rule 12: the end always comes, and nothing that was trained is missing from the result."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import messages as msg
from decoupled_diloco.protocol.versions import Asking
from outside.measures import all_told_once, nothing_trained_is_missing
from outside.nodes import Chances, Node, Spec
from outside.world import World


def world_of(options: Options, upload: float = 3.0, chances: Chances | None = None) -> World:
    specs = [Spec(), Spec(step=2.0), Spec(upload=upload), Spec(step=0.5, download=0.5)]
    world = World(options, specs, chances=chances)
    world.run(60.3)
    return world


@pytest.mark.parametrize("alignment", ["overwrite", "carry"])
@pytest.mark.parametrize("missed", ["overwrite", "rebase"])
@pytest.mark.parametrize("quorum", [1, 4])
@pytest.mark.parametrize("shards", [1, 2])
def test_rule_12_nothing_trained_is_missing(
    alignment: str, missed: str, quorum: int, shards: int
) -> None:
    options = Options(
        fragments=8,
        period=8,
        overlap=2,
        quorum=quorum,
        shards=shards,
        alignment="carry" if alignment == "carry" else "overwrite",
        missed="rebase" if missed == "rebase" else "overwrite",
    )
    world = world_of(options)
    world.end(within=200.0)
    nothing_trained_is_missing(world, world.learners)
    all_told_once(world)


def test_rule_12_with_late_bodies_under_way() -> None:
    options = Options(fragments=8, period=8, overlap=2)
    world = world_of(options, upload=20.0)
    under_way = [c for c in world.contributions.values() if c.arrived is None]
    assert any(world.now - c.sent > 2.0 for c in under_way)
    world.end(within=400.0)
    nothing_trained_is_missing(world, world.learners)
    all_told_once(world)


def test_rule_12_with_a_loop_that_stands_still() -> None:
    world = world_of(Options(fragments=8, period=8, overlap=2))
    world.learners[1].still_until = world.now + 30.0
    world.end(within=200.0)
    nothing_trained_is_missing(world, world.learners)


def test_rule_12_with_a_loop_that_never_steps_again() -> None:
    world = world_of(Options(fragments=8, period=8, overlap=2))
    world.learners[1].still_until = 1e9
    world.end(within=1000.0)
    nothing_trained_is_missing(world, [world.learners[n] for n in (0, 2, 3)])


@pytest.mark.parametrize("seed", range(5))
def test_rule_12_with_merges_uploads_and_fetches_that_fail(seed: int) -> None:
    options = Options(fragments=8, period=8, overlap=2)
    chances = Chances(spoiled=0.1, upload_fails=0.1, fetch_fails=0.1, merge_fails=0.2)
    world = World(options, [Spec()] * 3, seed=seed, chances=chances)
    world.run(40.0)
    world.end(within=600.0)


def test_rule_12_with_a_learner_that_goes_during_the_sweep() -> None:
    world = world_of(Options(fragments=8, period=8, overlap=2, quorum=4), upload=6.0)
    world.at(5.0, world.learners[2].crash, 1e9)
    world.end(within=300.0)
    nothing_trained_is_missing(world, [world.learners[n] for n in (0, 1, 3)])


def test_rule_12_with_a_shard_that_restarts_during_the_sweep() -> None:
    world = world_of(Options(fragments=8, period=8, overlap=2, shards=2), upload=6.0)
    world.at(5.0, world.shards[1].crash, 3.0)
    world.end(within=600.0)
    nothing_trained_is_missing(world, world.learners)


def test_rule_12_the_budget_in_steps_ends_the_run() -> None:
    options = Options(fragments=8, period=8, overlap=2, budget_steps=50)
    world = World(options, [Spec()] * 3)
    world.run(200.0)
    assert world.over
    assert all(50 <= learner.done <= 53 for learner in world.learners)
    nothing_trained_is_missing(world, world.learners)


def test_rule_4_who_is_refused_is_told_nothing_more() -> None:
    """One asking has one last outcome; only what was kept may be followed by another."""
    world = World(Options(fragments=1, period=4), [Spec(), Spec(download=70.0)])
    told: dict[tuple[str, Asking], list[str]] = {}

    def watch(node: Node, event: Any, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, do.Send) and isinstance(effect.message, msg.Outcome):
                key = (effect.peer, effect.message.ask)
                told.setdefault(key, []).append(effect.message.verdict)

    world.watchers.append(watch)
    world.run(300.3)
    world.end(within=1000.0)
    assert all(set(verdicts[:-1]) <= {"kept"} for verdicts in told.values()), told
