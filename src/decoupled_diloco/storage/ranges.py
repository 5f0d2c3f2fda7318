"""Long vectors on the disk, each in ranges that several processes have written.

Files: ``published-<writer>.safetensors`` in one folder, with a tensor ``<vector>.<first element>``
for each range, fp32; of what error feedback has left ``residual-<writer>.safetensors``. Any range
can be read, whoever has written its parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from decoupled_diloco.errors import StorageError
from decoupled_diloco.storage.files import names_in
from decoupled_diloco.storage.weights import opened, save_weights

Ranges = dict[tuple[int, int], Tensor]
"""By the vector's number and the range's first element."""

PUBLISHED = "published"
RESIDUAL = "residual"


def summed(vectors: Sequence[Tensor]) -> Tensor:
    """The sum of at least one, [N] each."""
    return sum(vectors[1:], vectors[0])


def keep_ranges(
    folder: Path, writer: int, ranges: Mapping[tuple[int, int], Tensor], what: str = PUBLISHED
) -> None:
    """Writes a process's ranges, by the vector's number and the range's first element.

    A process without any writes no file.

    Raises:
        StorageError: They cannot be written.
    """
    named = {f"{vector}.{start}": values for (vector, start), values in ranges.items()}
    if named:
        save_weights(folder / f"{what}-{writer}.safetensors", named)


def kept_range(folder: Path, vector: int, start: int, stop: int, what: str = PUBLISHED) -> Tensor:
    """Elements ``start <= i < stop`` of a vector, fp32.

    Raises:
        StorageError: Some are missing, or a file cannot be read.
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
