"""A virtual process's own clock, which may have leapt ahead."""

from __future__ import annotations

import pytest

from decoupled_diloco.protocol.options import Options
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.world import World


@pytest.mark.parametrize("seconds", [0.0, 0.1, 1000.0, 1e6 / 3, 7e9 / 11])
def test_who_is_woken_at_a_deadline_has_reached_it(seconds: float) -> None:
    """Else it would be woken for it at the same instant, for ever."""
    shard = World(Options(), [LearnerSpec("a")]).shards[0]
    shard.ahead_seconds = seconds
    for number in range(10_000):
        deadline = seconds + number / 7
        instant = shard.instant_of(deadline)
        assert instant + seconds >= deadline
        assert instant == pytest.approx(number / 7, abs=1e-6)
