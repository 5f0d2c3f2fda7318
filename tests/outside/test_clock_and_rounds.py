"""Compare rules 1 and 2 with naive models, with learners of many speeds that come and go."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from decoupled_diloco.protocol import Options
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.stage import Recorder
from decoupled_diloco_lab.simulate.system import System
from outside.naive import Clock, Queue
from worlds.faults import Fault, strike
from worlds.scene import ENDLESS_STEPS, config_of

SIZE = 8 * 2
"""Bytes of a fragment's payload."""


@contextmanager
def world(
    folder: Path,
    options: Options,
    specs: list[LearnerSpec],
    models: Sequence[Recorder],
    seed: int = 0,
) -> Iterator[System]:
    system = System(config_of(options, folder, learners=len(specs)), specs, folder, seed=seed)
    system.recorders.extend(models)
    yield system
    system.close()


def options_of(rng: random.Random, learners: int) -> Options:
    fragments = rng.choice([1, 2, 3, 6, 8, 24])
    period = rng.choice([1, 2, 6, 8, 24])
    return Options(
        fragments=fragments,
        period=period,
        overlap=rng.choice([each for each in (0, 1, 2, 5) if each < period]),
        quorum=rng.randint(1, learners),
        participants=rng.choice(["reported", "all"]),
        max_steps=ENDLESS_STEPS,
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_clock_and_the_rounds_match_the_naive_models(tmp_path: Path, seed: int) -> None:
    rng = random.Random(f"clock {seed}")
    specs = [
        LearnerSpec(
            f"learner-{number}",
            step_seconds=rng.choice([0.5, 1.0, 1.0, 2.0, 3.7]),
            up_bytes_per_second=SIZE / rng.choice([0.02, 0.02, 1.0, 4.0]),
            joins_at=rng.uniform(0.0, 10.0),
        )
        for number in range(rng.choice([2, 3, 4, 5]))
    ]
    options = options_of(rng, len(specs))
    clock, queue = Clock(options), Queue(options)
    with world(tmp_path, options, specs, [clock, queue], seed) as system:
        system.run(until=2000.0, stop=lambda: clock.t > 0)
        begun = system.now
        for number in range(5 * (seed % 2)):
            at, seconds = begun + 20.0 * number + rng.uniform(0.0, 15.0), rng.uniform(1.0, 40.0)
            strike(system, [Fault(at, "crash", rng.choice(specs).name, seconds)])
        system.run(until=begun + 100.0)
    assert clock.checked > 100
    assert queue.opened > 0


def test_rule_1_the_clock_shifts_when_the_fastest_learner_has_left(tmp_path: Path) -> None:
    options = Options(fragments=4, period=4, overlap=1, max_steps=ENDLESS_STEPS)
    specs = [LearnerSpec("learner-0"), LearnerSpec("learner-1", step_seconds=2.0)]
    clock = Clock(options)
    with world(tmp_path, options, specs, [clock]) as system:
        strike(system, [Fault(40.0, "crash", "learner-0", 100.0)])
        system.run(until=100.0)
    assert clock.shifts == 1
    assert clock.t == clock.run_step["learner-1"] > 39


def test_rule_2_a_fragment_due_while_its_round_is_open_opens_once_after_it(tmp_path: Path) -> None:
    """K = M and a link that takes a period and a half for a payload."""
    options = Options(fragments=1, period=4, overlap=1, quorum=2, max_steps=ENDLESS_STEPS)
    specs = [LearnerSpec("learner-0"), LearnerSpec("learner-1", up_bytes_per_second=SIZE / 6.0)]
    queue = Queue(options)
    with world(tmp_path, options, specs, [queue]) as system:
        system.run(until=200.0)
    assert queue.opened >= 200 / 8
