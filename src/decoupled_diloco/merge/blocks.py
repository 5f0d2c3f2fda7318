"""Reductions over long vectors, block by block, so that what is read twice is read from a cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 2**17
"""Elements worked on at a time: 512 KiB of fp32, which stays in a core's own cache."""

ROW = 2**12
"""Elements whose squares are summed in fp32."""


def blocks_of(vector: Tensor) -> Iterator[Tensor]:
    """Give views of a flat vector [n], `BLOCK` elements at a time."""
    for start in range(0, vector.numel(), BLOCK):
        yield vector[start : start + BLOCK]


def is_finite(vector: Tensor) -> bool:
    """Tell whether no element is NaN or infinite, reading the vector once.

    A sum with a NaN or an infinity in it is never finite; only if the sum is not, which may be an
    overflow, are the elements looked at one by one.
    """
    flat = vector.detach().reshape(-1)
    if math.isfinite(float(flat.sum())):
        return True
    return all(bool(torch.isfinite(block).all()) for block in blocks_of(flat))


def squares_of(vector: Tensor) -> float:
    """Sum the squared elements; the sum is finite exactly if every element is.

    Rows of `ROW` elements are summed in fp32 and the rows in fp64: relative error below 1e-6. Rows
    are never shared between threads, so the bits do not depend on how many there are. Where the
    squares would leave fp32's range they are computed in fp64.

    Args:
        vector: [n], fp32.
    """
    squares = _sum_of_rows(vector)
    if 1e-30 < squares < 1e30 or math.isnan(squares):
        return squares
    return math.fsum(_sum_of_rows(block.double()) for block in blocks_of(vector))


def _sum_of_rows(vector: Tensor) -> float:
    """Sum the squared norms of the rows of a flat vector."""
    whole = vector.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(vector[:whole].view(-1, ROW), dim=1)
    rest = torch.linalg.vector_norm(vector[whole:])
    return math.fsum([*rows.double().square().tolist(), float(rest) ** 2])


def norm_of(vector: Tensor) -> float:
    """Give the Euclidean length of an fp32 vector [n]; see `squares_of`."""
    return math.sqrt(squares_of(vector))
