"""Compute and reductions on one link, compared with closed forms."""

from __future__ import annotations

import pytest

from decoupled_diloco_plan.bandwidth.published_tables import (
    gradient_seconds,
    strided,
    utilization,
    whole,
)


def test_without_traffic_compute_never_waits() -> None:
    for schedule in (whole(7, 1), whole(7, 20), strided(7, 20, 3, 1)):
        assert utilization(schedule, 0.5, 0.0) == pytest.approx(1.0)


def test_a_slow_link_dominates_in_data_parallel() -> None:
    """A step takes as long as its reductions, plus the compute before the first of them."""
    layers, step, each = 4, 1.1, 10.0
    first = min(gradient_seconds(layers, step))
    expected = step / (first + layers * each)
    assert utilization(whole(layers, 1), step, each) == pytest.approx(expected)


def test_diloco_waits_once_per_period() -> None:
    layers, step, each, period = 4, 1.1, 10.0, 25
    first = min(gradient_seconds(layers, step))
    expected = period * step / ((period - 1) * step + first + layers * each)
    assert utilization(whole(layers, period), step, each) == pytest.approx(expected)


def test_latency_adds_once_per_reduction() -> None:
    layers, step = 3, 1.0
    assert utilization(whole(layers, 1), step, 0.0, latency_seconds=0.5) == pytest.approx(1 / 1.5)


def test_an_overlap_hides_reductions_that_fit_into_it() -> None:
    """Twelve layers in four fragments; the three reductions of one take half a step."""
    late = strided(12, 100, 3, 0)
    hidden = strided(12, 100, 3, 1)
    assert utilization(hidden, 1.0, 1 / 6) == pytest.approx(1.0)
    assert utilization(late, 1.0, 1 / 6) < 1.0


def test_a_full_link_determines_the_length_of_a_period() -> None:
    """However the model is partitioned, on a full link a period takes as long as its bytes."""
    schedule = strided(12, 10, 3, 1)
    assert utilization(schedule, 0.01, 5.0) == pytest.approx(10 * 0.01 / (12 * 5.0), rel=0.02)


def test_the_gradients_come_from_the_last_layer_to_the_first() -> None:
    ready = gradient_seconds(5, 2.8)
    assert ready == sorted(ready, reverse=True)
    assert ready[0] == pytest.approx(2.8)
