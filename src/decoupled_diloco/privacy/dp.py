"""Clipping and noise of differential privacy at the level of learners (rule 25).

*Neighboring runs* differ in the content of one learner's contributions: in one of them, every
contribution of that learner is replaced by zeros. Which learners take part in which merge, with
which weights, is public and the same in both. It follows from the links and the speeds of the
learners and not from their data. One contribution that is refused because it is not finite is
treated as public, too.

*Sensitivity.* A merge is a weighted mean, Σ w·v / Σ w, with public weights w ≤ `WEIGHT_MAX`: 1, or
less for a late contribution. A learner is in a merge once. Its v has at most the norm C·√(N_p/N),
for a fragment with N_p of the N elements. So the sum changes by at most that between neighboring
runs, and all fragments together by at most C. The denominator Σ w is a function of public values
only, so that the division needs no noise.

*Noise.* The sum gets Gaussian noise with standard deviation z·C·w_max per element, in every
fragment. `accountant` has the consequences.

*Noise in shares.* With secure sums, each learner adds discrete Gaussian noise to its integers, and
then masks them. A cohort opens its sum with at least m contributions, so each share has the
variance of the whole noise, divided by m: the opened sum has at least the noise above. Rounding
toward zero lengthens no contribution. Sums of discrete Gaussians are not quite discrete
Gaussians, but with shares of `SHARE_MIN` units or more, the difference is less than 1e-60 (Kairouz
et al. 2021, arXiv 2102.06387, theorem 1).

*An adaptive clip* (Andrew et al. 2021, arXiv 1905.03871). Each merge of a fragment also publishes,
with noise, how many contributions were within the clip in force. The next merge's clip follows from
that number: it is smaller if more than a given share was within. A contribution counts 1 or -1, and
0 in the neighboring run, in which it is removed. The count is a second Gaussian mechanism. So
`COUNT_SHARE` of the account is for counts, and the noise of the sum is that of the rest:
1/z² = 1/z_sum² + 1/z_count², for each fragment and so for a period.

*Randomness.* The noise comes from the operating system's random bytes, by the Box-Muller transform
in fp64. No seed exists, so neither a restarted process nor an attacker with all files can draw it
again. Noise of the shard is added in fp32: an attack on the low bits of floating point numbers
(Mironov 2012) is outside of what is protected. Noise in shares consists of integers, and each of
their probabilities is correct to 2^-53.

Shapes: N elements of a fragment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, exp, log2, pi, sqrt

import numpy as np
import torch
from torch import Tensor

from decoupled_diloco.merge.blocks import norm_of

WEIGHT_MAX = 1.0
"""w_max: the largest weight of a contribution, with uniform weights."""

NOISE_BLOCK = 1 << 20
"""Elements whose noise is drawn at a time: 16 MiB of random bits and intermediate values."""

SHARE_MIN = 4.0
"""The least standard deviation of a learner's share of the noise, in units of its integers."""

COUNT_SHARE = 0.1
"""Share of the account for the counts of an adaptive clip: the sums then have 5 % more noise."""

COUNT_UNIT = 1 << 20
"""The integer that stands for a count of 1 in a secure sum."""

ADAPTED_MAX = 2.0**40
"""The largest factor by which a clip may grow or shrink in a run."""

SURVIVORS_FACTOR = 2.0
"""All members of a cohort are less than twice as many as are needed to open its sum."""


@dataclass(frozen=True)
class AdaptiveClip:
    """How the clip of a fragment follows its contributions.

    Attributes:
        quantile: The share of contributions that should be within the clip, between 0 and 1.
        rate: By how much the logarithm of the clip changes in a merge, per share.
        noise_multiplier: z_count, the noise of a count.
    """

    quantile: float
    rate: float
    noise_multiplier: float

    def next(self, clip: float, signs: float, count: int) -> float:
        """Return the clip after a merge.

        Args:
            clip: The clip in force, as a multiple of the first one.
            signs: The number of contributions within the clip, less that of all others, with noise.
            count: The number of contributions, at least 1.

        >>> AdaptiveClip(quantile=0.5, rate=0.2, noise_multiplier=1.0).next(1.0, 0.0, 8)
        1.0
        """
        within = (signs / count + 1) / 2
        adapted = clip * exp(max(-1.0, min(1.0, self.rate * (self.quantile - within))))
        return max(1 / ADAPTED_MAX, min(ADAPTED_MAX, adapted))


@dataclass(frozen=True)
class Mechanism:
    """How contributions are clipped and merges get noise.

    Attributes:
        clip: C, the largest norm of all fragments of a contribution together.
        noise_multiplier: z, the noise in multiples of C.
        numel: N, the number of elements of all fragments.
        adaptive: How the clip changes; ``None``: it does not.
    """

    clip: float
    noise_multiplier: float
    numel: int
    adaptive: AdaptiveClip | None = None

    @classmethod
    def with_quantile(
        cls, clip: float, noise_multiplier: float, numel: int, quantile: float, rate: float
    ) -> Mechanism:
        """Return a mechanism with an adaptive clip.

        Args:
            clip: The first clip.
            noise_multiplier: z of sums and counts together.
            numel: See above.
            quantile: See `AdaptiveClip`.
            rate: See `AdaptiveClip`.
        """
        counts = AdaptiveClip(quantile, rate, noise_multiplier / sqrt(COUNT_SHARE))
        return cls(clip, noise_multiplier / sqrt(1 - COUNT_SHARE), numel, counts)

    def at(self, factor: float) -> Mechanism:
        """Return the mechanism with a multiple of the clip."""
        return replace(self, clip=factor * self.clip)

    def clip_of(self, numel: int) -> float:
        """Return the largest norm of a contribution to a fragment with this number of elements.

        >>> Mechanism(clip=2.0, noise_multiplier=1.0, numel=100).clip_of(25)
        1.0
        """
        return self.clip * sqrt(numel / self.numel)

    def noise_of_sum(self, numel: int) -> float:
        """Return the largest deviation of the noise of a secure sum, in clips of its fragment.

        >>> Mechanism(clip=2.0, noise_multiplier=1.0, numel=100).noise_of_sum(50)
        2.0
        """
        return self.noise_multiplier * sqrt(SURVIVORS_FACTOR * self.numel / numel)

    def scale_of(self, norm: float, numel: int) -> float:
        """Return the factor that clips a contribution with this norm, at most 1."""
        limit = self.clip_of(numel)
        return 1.0 if norm <= limit else limit / norm  # break: contribution-not-clipped

    def clip_(self, values: Tensor) -> Tensor:
        """Clip a contribution, fp32 [N], in place; values that are not finite stay as they are."""
        norm = norm_of(values)
        if norm > self.clip_of(values.numel()):
            values.mul_(self.scale_of(norm, values.numel()))
        return values

    def add_noise_(self, mean: Tensor, weight: float, random: Callable[[int], bytes]) -> None:
        """Add the noise of one merge to its weighted mean, in place.

        Args:
            mean: Σ w·v / Σ w, fp32 [N].
            weight: Σ w > 0.
            random: Returns a number of fresh random bytes.
        """
        deviation = self.noise_multiplier * self.clip * WEIGHT_MAX / weight
        for start in range(0, mean.numel(), NOISE_BLOCK):
            block = mean[start : start + NOISE_BLOCK]
            noise = gaussian(block.numel(), random) * deviation
            block.add_(torch.from_numpy(noise.astype(np.float32)))

    def add_share_(
        self, integers: Tensor, one: int, needed: int, random: Callable[[int], bytes]
    ) -> None:
        """Add a learner's share of the noise of a secure sum to its integers, in place.

        Args:
            integers: The learner's contribution in units of clip_of(N) / one, int32 [N].
            one: The integer that stands for the fragment's clip.
            needed: The least number of contributions in the sum.
            random: Returns a number of fresh random bytes.
        """
        unit = self.clip_of(integers.numel()) / one
        deviation = self.noise_multiplier * self.clip * WEIGHT_MAX / unit / sqrt(needed)
        assert deviation >= SHARE_MIN, f"{deviation} units are too few"  # refused with the settings
        for start in range(0, integers.numel(), NOISE_BLOCK):
            block = integers[start : start + NOISE_BLOCK]
            noise = discrete_gaussian(block.numel(), deviation, random)
            block.add_(torch.from_numpy(noise.astype(np.int32)))  # break: share-without-noise

    def count_of(self, signs: int, numel: int, random: Callable[[int], bytes]) -> float:
        """Return the count of a merge with its noise; for the arguments see `AdaptiveClip.next`."""
        return signs + self._count_deviation(numel) * float(gaussian(1, random)[0])

    def count_share(
        self, within: bool, numel: int, needed: int, random: Callable[[int], bytes]
    ) -> int:
        """Return what a learner adds to the count of a secure sum, in units of 1 / `COUNT_UNIT`.

        Args:
            within: Whether its contribution is within the clip in force.
            numel: The elements of the fragment.
            needed: The least number of contributions in the sum.
            random: Returns a number of fresh random bytes.
        """
        deviation = self._count_deviation(numel) / sqrt(needed) * COUNT_UNIT
        (noise,) = discrete_gaussian(1, deviation, random).tolist()
        return (COUNT_UNIT if within else -COUNT_UNIT) + int(noise)

    def _count_deviation(self, numel: int) -> float:
        assert self.adaptive is not None
        # break: count-without-noise
        return self.adaptive.noise_multiplier * sqrt(self.numel / numel)


def bits_needed(noise_multiplier: float, learners: int) -> int:
    """Return the least bits of an integer with which a share of the noise is fine enough.

    >>> bits_needed(0.1, 16)
    9
    """
    return ceil(log2(SHARE_MIN * sqrt(learners) / noise_multiplier + 1)) + 1


def discrete_gaussian(
    numel: int, deviation: float, random: Callable[[int], bytes]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return independent integers x with probabilities proportional to exp(-x²/2σ²), int64 [N].

    Canonne, Kamath and Steinke 2020 (arXiv 2004.00010): proposals are discrete Laplace, and are
    accepted with a probability that makes them Gaussian.

    Args:
        numel: N.
        deviation: σ, greater than 0 and below 2^47.
        random: Returns a number of fresh random bytes.
    """
    scale = int(deviation) + 1  # t
    whole = np.uint64(2**64 - 2**64 % scale - 1)  # the remainder of greater numbers is not uniform
    parts = [np.empty(0, dtype=np.int64)]
    missing = numel
    while missing > 0:
        count = int(2.5 * missing) + 64  # 42 % to 48 % are accepted
        bits = np.frombuffer(random(24 * count), dtype="<u8").reshape(3, count)
        low = (bits[0] % np.uint64(scale)).astype(np.float64)
        # Together, these have the geometric distribution of ⌊t·E⌋ for an exponential E.
        high = np.floor(-np.log(_uniform(bits[1])))
        size = low + scale * high
        is_negative = (bits[1] & np.uint64(1)).astype(bool)  # a bit that `_uniform` leaves out
        chance = np.exp(-low / scale - (size - deviation**2 / scale) ** 2 / (2 * deviation**2))
        taken = (_uniform(bits[2]) < chance) & (bits[0] <= whole) & ~(is_negative & (size == 0))
        found = np.where(is_negative, -size, size)[taken].astype(np.int64)[:missing]
        parts.append(found)
        missing -= len(found)
    return np.concatenate(parts)


def _uniform(
    bits: np.ndarray[tuple[int], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return uniform values in (0, 1), from the highest 53 bits of each number."""
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def gaussian(
    numel: int, random: Callable[[int], bytes]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return independent standard normal values, fp64 [N], from fresh random bytes."""
    pairs = (numel + 1) // 2
    uniform = _uniform(np.frombuffer(random(16 * pairs), dtype="<u8"))
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * pi * uniform[pairs:]
    values = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
    return values[:numel]
