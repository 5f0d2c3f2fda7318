"""Boxes: which elements of a tensor a rank holds, and which of them lie in a range.

A rank of a sharded model holds of each tensor one *box*, a range of indices in each dimension; it
keeps it as a tensor of the box's shape. A fragment's piece is a range of the flattened tensor. Such
a range is a few boxes too (`boxes_of_range`), so what both have in common is found, viewed and
copied without an index for each element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """Indices ``start[d] <= i_d < stop[d]`` of a tensor, for each dimension d.

    >>> Box.whole((4, 6)).intersection(Box((2, 0), (9, 3)))
    Box(start=(2, 0), stop=(4, 3))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """What lies in both; ``None`` if nothing does."""
        start = tuple(
            max(ours, theirs) for ours, theirs in zip(self.start, other.start, strict=True)
        )
        stop = tuple(min(ours, theirs) for ours, theirs in zip(self.stop, other.stop, strict=True))
        empty = any(first >= last for first, last in zip(start, stop, strict=True))
        return None if empty else Box(start, stop)

    def view(self, tensor: Tensor, part: Box) -> Tensor:
        """The part of this box in the tensor [*self.shape] that holds this box."""
        for dimension, (own, first, last) in enumerate(
            zip(self.start, part.start, part.stop, strict=True)
        ):
            tensor = tensor.narrow(dimension, first - own, last - first)
        return tensor


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Elements ``start <= i < stop`` of the flattened tensor, as boxes in order.

    Each box is contiguous in the flattened tensor; there are at most 2·dimensions − 1.

    >>> [box.shape for box in boxes_of_range((3, 4), 2, 10)]
    [(1, 2), (1, 4), (1, 2)]
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if first == last or (stop - start < row and stop == last * row):
        yield from _within_row(shape, first, start - first * row, stop - first * row)
        return
    if start > first * row:
        yield from _within_row(shape, first, start - first * row, row)
        first += 1
    if last > first:
        rest = Box.whole(shape[1:])
        yield Box((first, *rest.start), (last, *rest.stop))
    if stop > last * row:
        yield from _within_row(shape, last, 0, stop - last * row)


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((index, *box.start), (index + 1, *box.stop))


def rows_of_range(box: Box, shape: tuple[int, ...], start: int, stop: int) -> Box | None:
    """The rows of a box that have elements of the range; what a snapshot copies.

    >>> rows_of_range(Box((0, 0), (8, 2)), (8, 4), 9, 17)
    Box(start=(2, 0), stop=(5, 2))
    """
    if not shape:
        return box if start < stop else None
    row = math.prod(shape[1:])
    rows = Box((start // row, *((0,) * (len(shape) - 1))), (-(-stop // row), *shape[1:]))
    return box.intersection(rows)


def at(flat: Tensor, shape: tuple[int, ...], first: int, part: Box) -> Tensor:
    """A part of a tensor in a flat vector that holds the flattened tensor from element ``first``.

    Args:
        flat: One dimension; contiguous.
        shape: Of the tensor.
        first: The flattened tensor's element that is ``flat[0]``.
        part: Lies within ``flat``.

    Returns:
        A view of the part's shape.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    offset = sum(s * i for s, i in zip(strides, part.start, strict=True)) - first
    return flat.as_strided(part.shape, strides, flat.storage_offset() + offset)
