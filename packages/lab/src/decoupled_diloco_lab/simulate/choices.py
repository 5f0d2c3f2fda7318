"""The only source of randomness in a simulation. A seed determines every draw.

Components never share a stream. Each one forks its own stream by name, so one more draw in the
network does not change when a fault happens.
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
        """Return an independent stream that depends only on this one's seed and the name."""
        return Choices(f"{self.seed}/{name}")

    def uniform(self, low: float, high: float) -> float:
        """Draw a number between ``low`` and ``high``."""
        return low + (high - low) * self._random.random()

    def log_uniform(self, low: float, high: float) -> float:
        """Draw a positive number whose logarithm is uniformly distributed."""
        return float(low * (high / low) ** self._random.random())

    def exponential(self, mean: float) -> float:
        """Draw a waiting time of a Poisson process."""
        return self._random.expovariate(1.0 / mean)

    def exponentiated_weibull(self, alpha: float, k: float, scale: float) -> float:
        """Draw a heavy-tailed time to repair, by inverting F(x) = (1 − exp(−(x/λ)^k))^α.

        Args:
            alpha: the outer shape α, greater than 0; 1 gives a Weibull distribution.
            k: the inner shape, greater than 0; below 1 the tail is heavy.
            scale: λ, greater than 0, in the unit of the result.

        Source: Mudholkar and Srivastava, 1993; times to repair in Decoupled DiLoCo, arXiv
        2604.21428.
        """
        power = (1.0 - self._random.random()) ** (1.0 / alpha)  # 0 < power ≤ 1
        power = min(power, _BELOW_ONE)  # a power of 1 would give log1p(-1) = -inf
        return float(scale * (-math.log1p(-power)) ** (1.0 / k))

    def integer(self, low: int, high: int) -> int:
        """Draw an integer between ``low`` and ``high``, both included."""
        return self._random.randint(low, high)

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return probability > 0 and self._random.random() < probability

    def pick(self, items: Sequence[_T]) -> _T:
        """Draw one of the items."""
        return items[int(self._random.random() * len(items))]
