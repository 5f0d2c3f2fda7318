"""The checkers of worlds report only real violations."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import Failed, Merge, Version
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from worlds.checkers import Checker
from worlds.scene import ENDLESS_STEPS, config_of

OPTIONS = Options(fragments=2, period=4, overlap=1, max_steps=ENDLESS_STEPS)
LEARNERS = (LearnerSpec("learner-0"), LearnerSpec("learner-1"))


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """A shard and two learners."""
    system = System(config_of(OPTIONS, tmp_path, learners=2), LEARNERS, tmp_path)
    yield system
    system.close()


def test_a_shard_pauses_after_a_failed_merge_by_its_own_clock(system: System) -> None:
    checker, (shard,) = Checker(system), system.shards
    failed = Failed(Merge(1, 0, Version(1, 1), Version(1, 0), ""), "disk full")
    system.run(until=1.0)
    checker(shard.name, system.now, failed, [])
    shard.leap(5.0)
    system.run(until=1.5)
    checker(shard.name, system.now, failed, [])
    system.run(until=2.0)
    with pytest.raises(AssertionError, match=r"0\.500 s after a failure"):
        checker(shard.name, system.now, failed, [])


def test_a_learner_asked_to_stop_does_not_wait_for_the_end(system: System) -> None:
    learner = system.learners["learner-0"]
    system.run(until=10.0)
    system.request_stop(learner, 30.0, signal.SIGTERM)
    system.run(until=20.0)
    assert not learner.alive
    assert learner.waited_seconds is None
