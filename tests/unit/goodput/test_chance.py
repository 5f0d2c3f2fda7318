"""Random draws have the expected distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from decoupled_diloco_plan.goodput.chip_learner import Repair, Slices, failures
from decoupled_diloco_plan.goodput.cluster_settings import SECOND


@pytest.mark.parametrize(("power", "tail"), [(1.0, 1.0), (2.0, 0.6), (0.7, 2.0), (5.0, 0.4)])
def test_repairs_have_their_mean_and_their_distribution(power: float, tail: float) -> None:
    repair = Repair(600.0, power, tail)
    seconds = repair.draw(np.random.default_rng(0), 400_000) / SECOND
    error = seconds.std() / math.sqrt(len(seconds))
    assert abs(seconds.mean() - 600.0) < 5 * error
    share = np.array([0.1, 0.5, 0.9])
    at = repair.at(share) / SECOND
    scale = at[1] / (-math.log(1 - 0.5 ** (1 / power))) ** (1 / tail)
    distribution = (1 - np.exp(-((at / scale) ** tail))) ** power
    assert np.allclose(distribution, share, atol=1e-4)


def test_the_mean_is_that_of_weibull_for_power_1() -> None:
    scale = Repair(1.0, 1.0, 0.6).at(np.array([1 - math.exp(-1)]))[0] / SECOND
    assert scale == pytest.approx(1 / math.gamma(1 + 1 / 0.6), rel=1e-4)


@pytest.mark.parametrize(("chips", "count"), [(10, 3), (7, 7), (256, 1), (1000, 300)])
def test_each_chip_is_in_one_slice_of_the_right_size(chips: int, count: int) -> None:
    slices = Slices(chips, count)
    holding = slices.holding(np.arange(chips))
    assert np.bincount(holding, minlength=count).tolist() == slices.sizes()
    assert sum(slices.sizes()) == chips


def test_failures_are_those_of_independent_chips() -> None:
    """Superposition: the right rate, exponential gaps, and slices in proportion to their sizes."""
    slices, mtbi = Slices(50, 4), 1000.0
    source = failures(slices, mtbi, Repair(1, 1, 1), np.random.default_rng(1))
    at, which = [], []
    for _ in range(10):
        times, slice_of, _ = next(source)
        at += times
        which += slice_of
    gaps = np.diff(np.array(at)) / SECOND
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(mtbi / 50, rel=0.03)
    assert gaps.std() == pytest.approx(mtbi / 50, rel=0.04)
    shares = np.bincount(which) / len(which)
    assert np.allclose(shares, np.array(slices.sizes()) / 50, atol=0.01)
