"""Intervals and equivalence tests of paired runs: the same seeds with two methods.

A *gap* is a relative difference of two losses with the same seed: 0.01 is 1 % more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.integrate import quad
from scipy.stats import chi2, norm, t

from decoupled_diloco.errors import ConfigError

CONFIDENCE = 0.95
"""Confidence of an interval."""

ALPHA = 0.05
"""Largest probability that an equivalence test calls methods equivalent that are not."""


def gaps(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return by which share each loss exceeds the other method's with the same seed.

    >>> gaps([1.5, 3.0], [1.0, 4.0])
    [0.5, -0.25]
    """
    return [one / other - 1 for one, other in zip(losses, others, strict=True)]


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Return the mean and the limits of its interval (Student's t).

    With a single value, the limits are infinite. A value that is not finite makes all three NaN.

    Args:
        values: At least 1, independent.
        confidence: Probability that the interval contains the true mean, between 0 and 1.

    >>> [round(each, 3) for each in interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan, math.nan
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    quantile = float(t.ppf((1 + confidence) / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def power(margin: float, sd: float, seeds: int, *, gap: float = 0.0, alpha: float = ALPHA) -> float:
    """Return the probability that two one-sided t tests find methods equivalent.

    The tests find this if the ``1 - 2 * alpha`` interval of the gap is inside the margin. The
    result is exact for normal gaps: it integrates over the measured standard deviation.

    Args:
        margin: Largest gap that counts as equivalent, greater than 0.
        sd: Standard deviation of the gap from seed to seed, at least 0.
        seeds: Number of pairs, at least 2.
        gap: The true gap.
        alpha: See `ALPHA`.

    >>> round(power(0.005, 0.002, 3), 2), round(power(0.005, 0.002, 6), 2)
    (0.75, 1.0)
    """
    if sd == 0:
        return float(abs(gap) < margin)
    degrees, error = seeds - 1, sd / math.sqrt(seeds)
    quantile = float(t.ppf(1 - alpha, degrees))

    def share(square: float) -> float:
        """Density of the measured variance, times the probability of a small enough mean."""
        reach = margin - quantile * error * math.sqrt(square / degrees)
        inside = norm.cdf((reach - gap) / error) - norm.cdf((-reach - gap) / error)
        return float(inside * chi2.pdf(square, degrees))

    # Beyond this variance the interval is wider than the margins, whatever the mean is. The lower
    # limit avoids the pole of the density with one degree of freedom.
    most = degrees * (margin / (quantile * error)) ** 2
    most = min(most, float(chi2.isf(1e-12, degrees)))
    return float(quad(lambda root: share(root * root) * 2 * root, 0, math.sqrt(most))[0])


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The result of an equivalence test: two one-sided t tests of the paired gap.

    Attributes:
        one: The method that is tested.
        other: The method that it is compared with.
        margin: Largest gap that counts as equivalent.
        seeds: Number of pairs.
        mean: Mean gap.
        low: Lower limit of the ``1 - 2 * alpha`` interval.
        high: Upper limit.
        sd: The standard deviation that `power` uses.
        power: Probability that the test finds methods with equal expected loss equivalent.
        alpha: See `ALPHA`.
    """

    one: str
    other: str
    margin: float
    seeds: int
    mean: float
    low: float
    high: float
    sd: float
    power: float
    alpha: float = ALPHA

    @property
    def equivalent(self) -> bool:
        """Whether the interval is inside the margin. False does not show a difference."""
        return -self.margin < self.low and self.high < self.margin

    def __bool__(self) -> bool:
        """See `equivalent`."""
        return self.equivalent

    def __str__(self) -> str:
        verb = "is equivalent to" if self.equivalent else "is not shown to be equivalent to"
        return (
            f"{self.one} {verb} {self.other} within {self.margin:.2%}: gap {self.mean:+.2%}, "
            f"{1 - 2 * self.alpha:.0%} interval {self.low:+.2%} to {self.high:+.2%} "
            f"({self.seeds} seeds, power {self.power:.0%} for a standard deviation of "
            f"{self.sd:.2%})"
        )


def tost(
    one: tuple[str, Sequence[float]],
    other: tuple[str, Sequence[float]],
    margin: float,
    *,
    sd: float | None = None,
    alpha: float = ALPHA,
) -> Equivalence:
    """Test whether two methods have equivalent losses.

    Args:
        one: A method's name and its losses, one per seed.
        other: The same of the method that it is compared with, with the same seeds.
        margin: Largest gap that counts as equivalent, greater than 0.
        sd: Standard deviation for the power; default: that of these gaps.
        alpha: See `ALPHA`.

    Raises:
        ConfigError: The margin is not positive, or there are fewer than 2 seeds.
    """
    if not margin > 0:
        raise ConfigError(f"margin={margin} is out of range: it must be greater than 0")
    found = gaps(one[1], other[1])
    if len(found) < 2:
        raise ConfigError(
            f"seeds={len(found)} is too few for an equivalence test: use at least 2 seeds"
        )
    mean, low, high = interval(found, 1 - 2 * alpha)
    if not math.isfinite(mean):  # a run diverged
        spread = chance = math.nan
    else:
        spread = statistics.stdev(found) if sd is None else sd
        chance = power(margin, spread, len(found), alpha=alpha)
    names = one[0], other[0]
    return Equivalence(*names, margin, len(found), mean, low, high, spread, chance, alpha)
