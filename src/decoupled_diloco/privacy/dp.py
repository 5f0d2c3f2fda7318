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

*Randomness.* The noise comes from the operating system's random bytes, by the Box-Muller transform
in fp64. No seed exists, so neither a restarted process nor an attacker with all files can draw it
again. The sums are in fp32: an attack on the low bits of floating point numbers (Mironov 2012) is
outside of what is protected.

Shapes: N elements of a fragment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt

import numpy as np
import torch
from torch import Tensor

from decoupled_diloco.merge.blocks import norm_of

WEIGHT_MAX = 1.0
"""w_max: the largest weight of a contribution, with uniform weights."""

NOISE_BLOCK = 1 << 20
"""Elements whose noise is drawn at a time: 16 MiB of random bits and intermediate values."""


@dataclass(frozen=True)
class Mechanism:
    """How contributions are clipped and merges get noise.

    Attributes:
        clip: C, the largest norm of all fragments of a contribution together.
        noise_multiplier: z, the noise in multiples of C.
        numel: N, the number of elements of all fragments.
    """

    clip: float
    noise_multiplier: float
    numel: int

    def clip_of(self, numel: int) -> float:
        """Return the largest norm of a contribution to a fragment with this number of elements.

        >>> Mechanism(clip=2.0, noise_multiplier=1.0, numel=100).clip_of(25)
        1.0
        """
        return self.clip * sqrt(numel / self.numel)

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


def gaussian(
    numel: int, random: Callable[[int], bytes]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return independent standard normal values, fp64 [N], from fresh random bytes."""
    pairs = (numel + 1) // 2
    bits = np.frombuffer(random(16 * pairs), dtype="<u8")
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:pairs])), 2.0 * pi * uniform[pairs:]
    values = np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))
    return values[:numel]
