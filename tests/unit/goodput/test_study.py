"""Rows of a table: intervals, horizons, published figures."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from decoupled_diloco_plan.goodput.cluster_settings import Cluster, Constants
from decoupled_diloco_plan.goodput.study import INTERVAL_POINTS, Effort, cells, half_width, study


def test_the_horizon_is_extended_until_the_interval_is_narrow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decoupled_diloco_plan.goodput.study.FAILURES_FIRST", 100)
    monkeypatch.setattr("decoupled_diloco_plan.goodput.study.DAYS_MIN", 0.01)
    cluster = Cluster("elastic", 1_200_000)
    first, row = study(cluster, Effort(seeds=5, days=0.05)), study(cluster, Effort(seeds=5))
    assert first.interval is not None
    assert row.interval is not None
    assert row.interval <= INTERVAL_POINTS < first.interval
    assert row.days > 3 * first.days


def test_given_days_are_simulated() -> None:
    row = study(Cluster("elastic", 150_000), Effort(seeds=1, days=0.5))
    assert row.days == 0.5
    assert row.interval is None
    assert row.as_json(1.0)["goodput_interval"] is None


def test_a_row_as_json() -> None:
    row = study(Cluster("decoupled", 150_000, 8), Effort(seeds=2, days=1.0))
    document = json.loads(json.dumps(row.as_json(1000.0)))
    assert document["system"] == "decoupled"
    assert document["chips"] == 150_000
    assert document["learners"] == 8
    assert document["goodput"] + sum(document["badput"].values()) == pytest.approx(100, abs=0.01)
    assert document["published"] == 98
    tokens = 150_000 * 1000 * 3600 * document["goodput"] / 100
    assert document["tokens_per_hour"] == pytest.approx(tokens, rel=1e-3)


def test_published_figures_apply_only_to_the_same_cluster() -> None:
    row = study(Cluster("decoupled", 150_000, 8, sudden=True), Effort(seeds=1, days=0.1))
    assert row.published is None


def test_half_width_uses_students_t() -> None:
    assert half_width([1.0]) is None
    assert half_width([5.0, 5.0]) == 0.0
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30 / 3**0.5)


def test_cells_of_a_table() -> None:
    found = list(cells(["elastic", "decoupled"], [10**5, 10**6], [2, 4], quorum=2))
    assert [(c.system, c.chips, c.learners, c.quorum) for c in found] == [
        ("elastic", 10**5, 1, 1),
        ("elastic", 10**6, 1, 1),
        ("decoupled", 10**5, 2, 2),
        ("decoupled", 10**5, 4, 2),
        ("decoupled", 10**6, 2, 2),
        ("decoupled", 10**6, 4, 2),
    ]


def test_a_cluster_may_have_its_own_constants() -> None:
    cluster = Cluster("elastic", 150_000, constants=replace(Constants(), slice_chips=4096))
    assert cluster.slices == 37
