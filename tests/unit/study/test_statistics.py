"""Intervals and equivalence tests of paired runs."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_lab.study import interval, power
from decoupled_diloco_lab.study.statistics import tost

VALUES = [0.011, 0.004, 0.009, 0.013]


def test_an_interval_is_that_of_student() -> None:
    mean, low, high = interval(VALUES)
    error = statistics.stdev(VALUES) / 2
    assert (low, high) == pytest.approx(stats.t.interval(0.95, 3, mean, error))


def test_one_seed_has_no_interval() -> None:
    assert interval([0.5]) == (0.5, -math.inf, math.inf)


def test_a_run_that_diverged_has_no_interval() -> None:
    assert all(map(math.isnan, interval([0.5, math.nan, 0.4])))


@pytest.mark.parametrize(("sd", "seeds", "gap"), [(0.002, 3, 0.0), (0.004, 5, 0.002), (0.01, 2, 0)])
def test_power_is_the_share_of_simulated_studies(sd: float, seeds: int, gap: float) -> None:
    drawn = np.random.default_rng(1).normal(gap, sd, (40_000, seeds))
    half = stats.t.ppf(0.95, seeds - 1) * drawn.std(axis=1, ddof=1) / math.sqrt(seeds)
    share = (np.abs(drawn.mean(axis=1)) + half < 0.005).mean()
    assert power(0.005, sd, seeds, gap=gap) == pytest.approx(share, abs=0.01)


def test_a_wrong_verdict_has_at_most_the_probability_alpha() -> None:
    assert power(0.005, 0.002, 6, gap=0.005) == pytest.approx(0.05, abs=1e-6)


def test_an_equivalence_test_agrees_with_two_one_sided_tests() -> None:
    losses = ("mine", [1 + v for v in VALUES]), ("other", [1.0] * 4)
    for margin in (0.012, 0.014, 0.016):
        found = tost(*losses, margin)
        below = stats.ttest_1samp(VALUES, margin, alternative="less").pvalue < 0.05
        above = stats.ttest_1samp(VALUES, -margin, alternative="greater").pvalue < 0.05
        assert found.equivalent == bool(found) == (below and above)
    assert not tost(*losses, 0.012)
    assert tost(*losses, 0.016)


def test_the_sentence_has_margin_seeds_and_power() -> None:
    text = str(tost(("mine", [1.0, 1.001, 1.0]), ("other", [1.0] * 3), 0.01, sd=0.002))
    assert text == (
        "mine is equivalent to other within 1.00%: gap +0.03%, 90% interval -0.06% to +0.13% "
        "(3 seeds, power 100% for a standard deviation of 0.20%)"
    )


def test_a_run_that_diverged_is_not_equivalent() -> None:
    assert not tost(("mine", [1.0, math.nan]), ("other", [1.0, 1.0]), 0.5)


@pytest.mark.parametrize(
    ("losses", "margin", "message"),
    [([1.0], 0.1, "seeds=1 is too few"), ([1.0, 1.0], 0.0, "margin=0.0 is out of range")],
)
def test_a_test_that_cannot_be_made_is_an_error(
    losses: list[float], margin: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tost(("a", losses), ("b", losses), margin)
