"""The distributions of failures and repairs."""

from __future__ import annotations

import math

import pytest

from decoupled_diloco_lab.simulate.choices import Choices

DRAWS = 20_000


@pytest.mark.parametrize(("alpha", "k"), [(1.0, 1.0), (2.0, 0.5), (0.5, 1.5), (3.0, 3.0)])
def test_exponentiated_weibull_follows_its_distribution(alpha: float, k: float) -> None:
    """The empirical distribution deviates from F no more than chance explains."""
    choices, scale = Choices(5), 7.0
    drawn = sorted(choices.exponentiated_weibull(alpha, k, scale) for _ in range(DRAWS))
    worst = max(
        abs((number + 0.5) / DRAWS - (1 - math.exp(-((x / scale) ** k))) ** alpha)
        for number, x in enumerate(drawn)
    )
    assert worst < 1.95 / math.sqrt(DRAWS), "Kolmogorov-Smirnov, one in a thousand"


def test_exponentiated_weibull_extremes_are_finite() -> None:
    choices = Choices(1)
    drawn = [choices.exponentiated_weibull(50.0, 0.2, 1.0) for _ in range(DRAWS)]
    assert all(math.isfinite(x) and x > 0 for x in drawn)
