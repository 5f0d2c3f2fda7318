"""Waiting at unequal speeds, and the published heterogeneous case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decoupled_diloco_plan.goodput.cluster_settings import Cluster
from decoupled_diloco_plan.goodput.pace import pace_of

MIXED = (1.0,) * 4 + (1.18,) * 4


def mixed(quorum: int, slack_steps: int = 0, jitter: float = 0.1) -> Cluster:
    return Cluster(
        "decoupled",
        10_000,
        8,
        quorum=quorum,
        slowdowns=MIXED,
        jitter=jitter,
        slack_steps=slack_steps,
    )


def test_with_a_quorum_of_one_no_learner_waits() -> None:
    pace = pace_of(mixed(1), 0)
    assert pace.useful == (1.0,) * 8
    assert pace.against_fastest == pytest.approx(1.0, abs=0.01)


def test_with_a_full_quorum_chips_wait_as_published() -> None:
    pace = pace_of(mixed(8), 0)
    assert sum(pace.useful) / 8 == pytest.approx(0.84, abs=0.015)
    assert pace.took_part == (1.0,) * 8


def test_slack_absorbs_the_jitter_but_not_the_speed_difference() -> None:
    pace = pace_of(mixed(8, slack_steps=2), 0)
    assert pace.against_fastest == pytest.approx(1 / 1.18, abs=0.015)
    exact = pace_of(mixed(8, slack_steps=2, jitter=0.0), 0)
    assert exact.against_fastest == pytest.approx(1 / 1.18, abs=0.002)
    assert exact.useful[7] == pytest.approx(1.0)


def test_the_grace_window_includes_slow_learners_at_no_cost() -> None:
    cluster = mixed(1, slack_steps=2)
    without, within = (pace_of(replace(cluster, grace=g), 0) for g in (False, True))
    assert within.useful == without.useful == (1.0,) * 8
    assert max(without.took_part[4:]) < 0.9
    assert min(within.took_part) > 0.99
