"""The one source of randomness of a virtual world: everything follows from a seed.

A world never draws from one shared stream: each thing that chooses forks a stream of its own by
name, so that one more draw in the network does not change when a fault strikes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

_T = TypeVar("_T")

_BELOW_ONE = math.nextafter(1.0, 0.0)


class Choices:
    """A seeded stream of choices.

    >>> Choices(1).fork("network").uniform(0, 1) == Choices(1).fork("network").uniform(0, 1)
    True
    >>> Choices(1).fork("network").uniform(0, 1) == Choices(1).fork("faults").uniform(0, 1)
    False
    """

    def __init__(self, seed: int | str) -> None:
        self.seed = str(seed)
        number = int.from_bytes(blake2b(self.seed.encode(), digest_size=8).digest(), "big")
        self._random = random.Random(number)
        self.normal: Callable[[float, float], float] = self._random.gauss
        """``normal(mean, deviation)``: a normally distributed number."""

    def fork(self, name: str) -> Choices:
        """An independent stream that depends on this one's seed and the name, on no draw."""
        return Choices(f"{self.seed}/{name}")

    def uniform(self, low: float, high: float) -> float:
        """A number between the two."""
        return low + (high - low) * self._random.random()

    def log_uniform(self, low: float, high: float) -> float:
        """A positive number whose logarithm is uniform."""
        return float(low * (high / low) ** self._random.random())

    def exponential(self, mean: float) -> float:
        """A waiting time of a Poisson process."""
        return self._random.expovariate(1.0 / mean)

    def exponentiated_weibull(self, alpha: float, k: float, scale: float) -> float:
        """A heavy-tailed time to repair, by the inverse of F(x) = (1 − exp(−(x/λ)^k))^α.

        Args:
            alpha: the outer shape α, greater than 0; 1 gives a Weibull distribution.
            k: the inner shape, greater than 0; below 1 the tail is heavy.
            scale: λ, greater than 0, in the unit of the result.

        Source: Mudholkar and Srivastava, 1993; times to repair in Decoupled DiLoCo, arXiv
        2604.21428.
        """
        power = (1.0 - self._random.random()) ** (1.0 / alpha)  # 0 < power ≤ 1
        power = min(power, _BELOW_ONE)
        return float(scale * (-math.log1p(-power)) ** (1.0 / k))

    def integer(self, low: int, high: int) -> int:
        """An integer between the two, both included."""
        return self._random.randint(low, high)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return probability > 0 and self._random.random() < probability

    def pick(self, items: Sequence[_T]) -> _T:
        """One of the items."""
        return items[int(self._random.random() * len(items))]
