"""Long vectors on disk, stored as ranges that several processes write.

One folder contains ``published-<writer>.safetensors`` for published copies and
``residual-<writer>.safetensors`` for the residuals of error feedback. Each file has a tensor
``<vector>.<first element>``, fp32, for each range. A reader can read any range, regardless of which
processes wrote its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from decoupled_diloco.errors import StorageError
from decoupled_diloco.storage.files import names_in
from decoupled_diloco.storage.weight_files import opened, save_weights

Ranges = dict[tuple[int, int], Tensor]
"""Ranges by the index of the vector and the range's first element."""

PUBLISHED = "published"
RESIDUAL = "residual"


def summed(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or more vectors, [N] each."""
    return sum(vectors[1:], vectors[0])


def keep_ranges(
    folder: Path, writer: int, ranges: Mapping[tuple[int, int], Tensor], what: str = PUBLISHED
) -> None:
    """Write the ranges of a process; without ranges, no file is written.

    Raises:
        StorageError: The file cannot be written.
    """
    named = {f"{vector}.{start}": values for (vector, start), values in ranges.items()}
    if named:
        save_weights(folder / f"{what}-{writer}.safetensors", named)


def kept_range(folder: Path, vector: int, start: int, stop: int, what: str = PUBLISHED) -> Tensor:
    """Read elements ``start <= i < stop`` of a vector, fp32.

    Raises:
        StorageError: Elements are missing, or a file cannot be read.
    """
    values = torch.empty(stop - start, dtype=torch.float32, device="cpu")
    found = 0
    for path in sorted(names_in(folder)):
        if not path.match(f"{what}-*.safetensors"):
            continue
        with opened(path) as file:
            for name in file.keys():  # noqa: SIM118
                owner, first = map(int, name.split("."))
                if owner != vector:
                    continue
                kept = file.get_slice(name)
                low, high = max(first, start), min(first + kept.get_shape()[0], stop)
                if low < high:
                    values[low - start : high - start] = kept[low - first : high - first]
                    found += high - low
    if found != stop - start:
        raise StorageError(
            f"{folder} has {found} of {stop - start} elements of vector {vector} ({what})"
        )
    return values
