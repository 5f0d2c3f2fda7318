"""Reductions over long vectors, block by block, so that a second read comes from a CPU cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 2**17
"""Number of elements per block: 512 KiB of fp32, which stays in a core's own cache."""

ROW = 2**12
"""Number of elements whose squares are summed in fp32."""


def blocks_of(vector: Tensor) -> Iterator[Tensor]:
    """Yield views of a flat vector [n], `BLOCK` elements at a time."""
    for start in range(0, vector.numel(), BLOCK):
        yield vector[start : start + BLOCK]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return whether two vectors, fp32, have the same bits; a NaN can equal a NaN."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


def is_finite(vector: Tensor) -> bool:
    """Return whether no element is NaN or infinite; usually reads the vector only once."""
    flat = vector.detach().reshape(-1)
    # A NaN or an infinity always makes the sum not finite. Finite elements can overflow the sum,
    # so only then is each element checked.
    if math.isfinite(float(flat.sum())):
        return True
    return all(bool(torch.isfinite(block).all()) for block in blocks_of(flat))


def squares_of(vector: Tensor) -> float:
    """Return the sum of the squared elements; it is finite exactly if every element is.

    Each row of `ROW` elements is summed in fp32, and the rows are summed in fp64: the relative
    error is below 1e-6. No row is shared between threads, so the bits do not depend on the number
    of threads. If the squares would leave fp32's range, they are computed in fp64.

    Args:
        vector: [n], fp32.
    """
    squares = _sum_of_rows(vector)
    if 1e-30 < squares < 1e30 or math.isnan(squares):
        return squares
    return math.fsum(_sum_of_rows(block.double()) for block in blocks_of(vector))


def _sum_of_rows(vector: Tensor) -> float:
    """Return the sum of the squared norms of the rows of a flat vector."""
    whole = vector.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(vector[whole:])
    return math.fsum([*rows.double().square().tolist(), float(rest) ** 2])


def norm_of(vector: Tensor) -> float:
    """Return the Euclidean norm of an fp32 vector [n]; see `squares_of`."""
    return math.sqrt(squares_of(vector))


def replace_known(target: Tensor, values: Tensor) -> None:
    """Write the values of moments to `target`, except those that are absent (NaN)."""
    torch.where(values.isnan(), target, values, out=target)
