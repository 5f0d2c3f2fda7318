"""What is drawn: failures of one learner's chips, repairs, spells of slowness.

A learner of n chips fails n times as often as one chip, so its failures are one Poisson process;
which chip it was, and so which slice, is drawn for each. Nothing is kept for each chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from decoupled_diloco_plan.goodput.settings import SECOND

BLOCK = 4096
"""Failures that are drawn at once."""

FAR = 2.0**62
"""No failure is later, microseconds: 146,000 years."""

Integers = NDArray[np.int64]
Failures = Iterator[tuple[list[int], list[int], list[int]]]
"""Blocks of failures in order of time: instants, slices and lengths of the repairs."""


@dataclass(frozen=True, slots=True)
class Repair:
    """The exponentiated Weibull distribution: F(x) = (1 − exp(−(x/σ)^k))^a.

    Args:
        mean_seconds: its mean, from which σ follows.
        power: a; at 1 it is Weibull's.
        tail: k; below 1 the tail is heavier than an exponential one.

    Source: Mudholkar and Srivastava, 1993.
    """

    mean_seconds: float
    power: float
    tail: float

    def draw(self, rng: np.random.Generator, count: int) -> Integers:
        """Lengths of so many repairs, microseconds."""
        return self.at(rng.random(count))

    def at(self, share: NDArray[np.float64]) -> Integers:
        """The lengths that these shares of all repairs stay below, microseconds."""
        scale = self.mean_seconds / _mean(self.power, self.tail)
        seconds = scale * _quantile(share, self.power, self.tail)
        return np.rint(seconds * SECOND).astype(np.int64)


def _quantile(share: NDArray[np.float64], power: float, tail: float) -> NDArray[np.float64]:
    """The inverse of F for σ = 1."""
    below = np.clip(share, 1e-300, 1 - 1e-16) ** (1 / power)
    return np.asarray((-np.log1p(-np.minimum(below, 1 - 1e-16))) ** (1 / tail))


@lru_cache
def _mean(power: float, tail: float) -> float:
    """The mean for σ = 1, by the midpoint rule over z = −log(1 − F), in which it is smooth."""
    z = (np.arange(400_000) + 0.5) * 1e-4
    survival = -np.expm1(power * np.log1p(-np.exp(-z)))
    edges = np.arange(400_001) * 1e-4
    return float(np.sum(survival * np.diff(edges ** (1 / tail))))


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of one learner: as even as can be, the first ones a chip larger.

    >>> Slices(10, 3).sizes()
    [4, 3, 3]
    """

    chips: int
    count: int

    def size(self, which: int) -> int:
        """Chips of one slice."""
        return self.chips // self.count + (which < self.chips % self.count)

    def sizes(self) -> list[int]:
        """Chips of each slice."""
        return [self.size(which) for which in range(self.count)]

    def holding(self, chips: Integers) -> Integers:
        """The slices that hold these chips, 0 to chips − 1."""
        size, larger = divmod(self.chips, self.count)
        first = larger * (size + 1)
        later = larger + (chips - first) // max(1, size)
        return np.where(chips < first, chips // (size + 1), later)


def failures(
    slices: Slices, mtbi_seconds: float, repair: Repair, rng: np.random.Generator
) -> Failures:
    """The failures of one learner's chips, for ever."""
    mean, now = mtbi_seconds * SECOND / slices.chips, 0.0
    while True:
        at = now + np.cumsum(rng.exponential(mean, BLOCK))
        now = float(at[-1])
        which = slices.holding(rng.integers(0, slices.chips, BLOCK))
        lengths = repair.draw(rng, BLOCK)
        yield np.minimum(at, FAR).astype(np.int64).tolist(), which.tolist(), lengths.tolist()
