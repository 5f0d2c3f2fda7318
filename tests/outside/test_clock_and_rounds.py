"""Rules 1 and 2 beside naive models, in worlds of many speeds with learners that come and go."""

from __future__ import annotations

import random

import pytest

from decoupled_diloco.protocol import Options
from outside.naive import Clock, Queue
from outside.nodes import Spec
from outside.world import World


def world_of(seed: int) -> World:
    rng = random.Random(f"clock {seed}")
    learners = rng.choice([2, 3, 4, 5])
    options = Options(
        fragments=rng.choice([1, 2, 3, 6, 8, 24]),
        period=rng.choice([1, 2, 6, 8, 24]),
        overlap=rng.choice([0, 1, 2, 5]),
        quorum=rng.randint(1, learners),
        participants=rng.choice(["reported", "all"]),
    )
    speeds = [0.5, 1.0, 1.0, 2.0, 3.7]
    specs = [
        Spec(rng.choice(speeds), rng.choice([0.02, 0.02, 1.0, 4.0]), joins=rng.uniform(0.0, 10.0))
        for _ in range(learners)
    ]
    world = World(options, specs, seed=seed, check_every=20)

    def crash() -> None:
        rng.choice(world.learners).crash(rng.uniform(1.0, 40.0))
        world.at(rng.expovariate(1 / 20), crash)

    if rng.random() < 0.5:
        world.at(30.0, crash)
    return world


def begun(world: World) -> None:
    while not world.coordinator.begun:
        world.run(world.now + 1.0)


@pytest.mark.parametrize("seed", range(12))
def test_rule_1_the_clock_is_the_naive_one(seed: int) -> None:
    world = world_of(seed)
    clock = Clock(world)
    begun(world)
    world.run(world.now + 100.0)
    assert clock.checked > 100
    assert clock.t > 0


def test_rule_1_the_clock_shifts_when_who_led_has_gone() -> None:
    world = World(Options(fragments=4, period=4), [Spec(), Spec(step=2.0)])
    clock = Clock(world)
    world.run(40.0)
    world.learners[0].crash(back_after=100.0)
    world.run(100.0)
    assert clock.shifts == 1
    assert clock.t == clock.run_step["l1"] > 39


@pytest.mark.parametrize("seed", range(12))
def test_rule_2_rounds_open_in_order_as_soon_as_there_is_a_slot(seed: int) -> None:
    world = world_of(seed)
    queue = Queue(world.options)
    world.watchers.append(queue)
    begun(world)
    world.run(world.now + 100.0)
    assert queue.opened > 0


def test_rule_2_what_is_due_while_its_round_is_open_opens_once_after_it() -> None:
    """K = M and a link that takes a period and a half for a body."""
    options = Options(fragments=1, period=4, overlap=1, quorum=2)
    world = World(options, [Spec(), Spec(upload=6.0)])
    queue = Queue(options)
    world.watchers.append(queue)
    world.run(200.0)
    assert queue.opened >= 200 / 8
