"""Short sketches of contributions, to detect learners that train on the same data.

Two learners that train on the same batches make nearly parallel contributions. Contributions from
different data are far from parallel after the first steps. A sketch is a random projection of
evenly spaced rows of the vector. Its cost does not grow with the model: it reads at most a million
elements and stores 16 KiB.

Shapes: N elements of a contribution; W = `WIDTH`; R rows of W elements.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

WIDTH = 4096
"""W: the numbers in a sketch. The cosine of unrelated vectors is estimated as 0 ± 1/√W = 0.016."""

ROWS_MAX = 256

NEARLY_PARALLEL = 0.99
"""Contributions with at least this cosine count as nearly parallel."""

ROUNDING = 1e-4
"""A bound on the effect of rounding, codecs included, on the cosine of two equal vectors."""


def sketch(vector: Tensor) -> Tensor:
    """Return a short vector; the cosine of two sketches estimates that of the original vectors.

    ``sketch[j] = Σ_r sign_r · v[r · W + j]`` over at most `ROWS_MAX` evenly spaced rows r, with
    fixed random signs. The difference of two sketches is the sketch of the difference, so
    1 − cosine has a small *relative* error: nearly parallel vectors are never missed.

    Args:
        vector: [N], fp32, on the CPU, finite.

    Returns:
        [min(N, W)], fp32; a short vector is its own sketch.
    """
    rows = vector.numel() // WIDTH
    if rows < 2:
        return vector[:WIDTH].clone()
    table = vector[: rows * WIDTH].view(rows, WIDTH)
    if rows > ROWS_MAX:
        table = table[torch.arange(ROWS_MAX, dtype=torch.int64, device="cpu") * rows // ROWS_MAX]
    return _signs()[: len(table)] @ table


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of the angle between two vectors of equal size; 0 if one is zero."""
    norms = float(one.norm()) * float(other.norm())
    return float(one @ other) / norms if norms > 0.0 else 0.0


def are_alike(own: Tensor, other: Tensor, before: Tensor) -> bool:
    """Return whether two learners' contributions are nearly parallel because of equal data.

    In the first steps of training, or with a very simple model, contributions from different data
    are nearly parallel, too. Then a learner's contribution is also nearly parallel to its own
    earlier one, which is how this function recognizes that case.

    Args:
        own: Sketch of a learner's contribution.
        other: Sketch of another learner's contribution.
        before: Sketch of the first learner's contribution to an earlier round.
    """
    turned, usual = 1.0 - cosine(own, other), 1.0 - abs(cosine(own, before))
    return turned <= 1.0 - NEARLY_PARALLEL and 2 * turned + ROUNDING < usual


@lru_cache(maxsize=1)
def _signs() -> Tensor:
    rng = torch.Generator("cpu").manual_seed(4096)
    bits = torch.randint(2, (ROWS_MAX,), generator=rng, device="cpu")
    return bits.to(torch.float32) * 2 - 1
