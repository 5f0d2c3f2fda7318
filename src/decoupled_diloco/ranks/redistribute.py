"""Moves fragments between the ranks' boxes and the sync ranks' ranges.

A rank of a sharded model holds one *box* of each tensor: a range of indices in each dimension, kept
as a tensor of the box's shape. A fragment's piece is a range of the flattened tensor. Such a range
consists of a few boxes as well (`boxes_of_range`). So their intersection is found, viewed and
copied without an index per element.

The *sync ranks*, which communicate with the syncer, hold contiguous ranges of each fragment's flat
vector. In both directions, the elements travel in bounded chunks, with one all-to-all in host
memory per chunk. Elements that stay on their rank are copied directly. If several ranks hold the
same elements, one of them sends.

Shapes: R ranks, W sync ranks, N elements of a fragment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from decoupled_diloco.merge import Fragment, block_ranges


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
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersection(self, other: Box) -> Box | None:
        """Return the box that both have in common; ``None`` if there is none."""
        start = tuple(
            max(ours, theirs) for ours, theirs in zip(self.start, other.start, strict=True)
        )
        stop = tuple(min(ours, theirs) for ours, theirs in zip(self.stop, other.stop, strict=True))
        empty = any(first >= last for first, last in zip(start, stop, strict=True))
        return None if empty else Box(start, stop)

    def view(self, tensor: Tensor, part: Box) -> Tensor:
        """Return a view of ``part``, which lies in this box, in this box's tensor [*self.shape]."""
        for dimension, (own, first, last) in enumerate(
            zip(self.start, part.start, part.stop, strict=True)
        ):
            tensor = tensor.narrow(dimension, first - own, last - first)
        return tensor


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield elements ``start <= i < stop`` of the flattened tensor as boxes, in order.

    Each box is contiguous in the flattened tensor. There are at most 2·dimensions − 1 boxes.

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
    """Return the rows of a box that have elements of the range, which a snapshot copies.

    >>> rows_of_range(Box((0, 0), (8, 2)), (8, 4), 9, 17)
    Box(start=(2, 0), stop=(5, 2))
    """
    if not shape:
        return box if start < stop else None
    row = math.prod(shape[1:])
    rows = Box((start // row, *((0,) * (len(shape) - 1))), (-(-stop // row), *shape[1:]))
    return box.intersection(rows)


def at(flat: Tensor, shape: tuple[int, ...], first: int, part: Box) -> Tensor:
    """View a box of a tensor in a flat vector that holds a range of the flattened tensor.

    Args:
        flat: One dimension; contiguous.
        shape: The tensor's shape.
        first: The index in the flattened tensor of ``flat[0]``.
        part: The box; all of its elements are in ``flat``.

    Returns:
        A view of ``flat`` with the box's shape.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    offset = sum(s * i for s, i in zip(strides, part.start, strict=True)) - first
    return flat.as_strided(part.shape, strides, flat.storage_offset() + offset)


CHUNK_NUMEL = 1 << 20
"""Elements of a range that travel at once, per sync rank."""


class AllToAll(Protocol):
    """A collective in which every rank sends a part of its vector ``given`` to each other rank."""

    async def __call__(
        self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int], /
    ) -> None: ...


@dataclass(frozen=True)
class HeldRows:
    """A rank's part of a fragment's piece: whole rows of its box.

    Attributes:
        box: The rows' box in the tensor.
        values: [*box.shape]
    """

    box: Box
    values: Tensor


Parts = tuple[HeldRows | None, ...]
"""A rank's part of each piece of a fragment; ``None``: no element of the piece."""


@dataclass(frozen=True)
class Sharding:
    """Which rank holds which part of each tensor, and which ranks are sync ranks.

    Args:
        shapes: The logical tensors' shapes, in the layout's order.
        boxes: For each tensor, the box of each of the R ranks; ``None``: no element.
        sync_ranks: The ranks that communicate with the syncer, ascending.
        unsplit: Fragments whose payloads cannot be split: the first sync rank holds all of them.
    """

    shapes: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[Box | None, ...], ...]
    sync_ranks: tuple[int, ...] = (0,)
    unsplit: tuple[int, ...] = ()

    @cached_property
    def ranks(self) -> int:
        return len(self.boxes[0])

    def ranges(self, fragment: Fragment) -> tuple[tuple[int, int], ...]:
        """Return each sync rank's range of a flat fragment; the last ranges may be empty.

        Ranges start and end between blocks of the payload's digest.
        """
        if fragment.index in self.unsplit:
            return ((0, fragment.numel), *[(fragment.numel,) * 2] * (len(self.sync_ranks) - 1))
        return block_ranges(fragment.numel, len(self.sync_ranks))

    def missing(self) -> int | None:
        """Return the index of a tensor with elements that no rank holds; ``None`` if there is none.

        The boxes of a tensor must be equal or disjoint.
        """
        for index, (shape, boxes) in enumerate(zip(self.shapes, self.boxes, strict=True)):
            if sum(box.numel for box in set(boxes) if box) != Box.whole(shape).numel:
                return index
        return None

    def holders(self, tensor: int) -> dict[Box, tuple[int, ...]]:
        """Return the different boxes of a tensor, each with the ranks that hold it."""
        found: dict[Box, tuple[int, ...]] = {}
        for rank, box in enumerate(self.boxes[tensor]):
            if box is not None:
                found[box] = (*found.get(box, ()), rank)
        return found


@dataclass(frozen=True)
class _Run:
    """Elements that one rank holds in one box, within one chunk of one sync rank."""

    piece: int
    tensor: int
    first: int  # index in the flattened tensor of the first element of the piece in the chunk
    position: int  # index in the chunk of this element
    part: Box
    holders: tuple[int, ...]


class Redistribution:
    """Moves one fragment at a time; every rank makes the same calls in the same order.

    Args:
        sharding: Which rank holds which part.
        rank: This rank.
        exchange: `torch.distributed.all_to_all_single` over the ranks, on host memory.
        chunk_numel: See `CHUNK_NUMEL`.
    """

    def __init__(
        self, sharding: Sharding, rank: int, exchange: AllToAll, chunk_numel: int = CHUNK_NUMEL
    ) -> None:
        self._sharding = sharding
        self._rank = rank
        self._exchange = exchange
        self._chunk_numel = chunk_numel

    def parts(self, fragment: Fragment) -> tuple[Box | None, ...]:
        """Return, for each piece, the rows of this rank's box that have elements of it."""
        found: list[Box | None] = []
        for piece in fragment.pieces:
            box = self._sharding.boxes[piece.tensor][self._rank]
            shape = self._sharding.shapes[piece.tensor]
            found.append(box and rows_of_range(box, shape, piece.start, piece.stop))
        return tuple(found)

    def own_range(self, fragment: Fragment) -> tuple[int, int]:
        """Return this rank's range of a flat fragment; empty if it is not a sync rank."""
        if self._rank not in self._sharding.sync_ranks:
            return 0, 0
        own = self._sharding.sync_ranks.index(self._rank)
        return self._sharding.ranges(fragment)[own]

    async def collect(self, fragment: Fragment, parts: Parts) -> Tensor:
        """Move the ranks' parts to the sync ranks' ranges.

        Args:
            parts: This rank's parts; any dtype.

        Returns:
            This rank's range of the fragment, fp32; empty if it is not a sync rank.
        """
        start, stop = self.own_range(fragment)
        flat = torch.empty(stop - start, dtype=torch.float32, device="cpu")
        for chunks in self._chunks(fragment):
            sizes = self._sizes(chunks, to_sync_ranks=True)
            given = torch.empty(sum(sizes[0]), dtype=torch.float32, device="cpu")
            out = torch.empty(sum(sizes[1]), dtype=torch.float32, device="cpu")
            filled = 0
            for (first, runs), sync_rank in zip(chunks, self._sharding.sync_ranks, strict=True):
                for run in runs:
                    if self._sender(run, sync_rank) != self._rank:
                        continue
                    held = parts[run.piece]
                    assert held is not None
                    if sync_rank == self._rank:
                        target = self._in_chunk(flat[first - start :], run)
                    else:
                        target = given[filled : filled + run.part.numel].view(run.part.shape)
                        filled += run.part.numel
                    target.copy_(held.box.view(held.values, run.part))
            await self._exchange(out, given, sizes[1], sizes[0])
            self._unpack(out, chunks, flat, start)
        return flat

    def _unpack(self, out: Tensor, chunks: _Chunks, flat: Tensor, start: int) -> None:
        if self._rank not in self._sharding.sync_ranks:
            return
        first, runs = chunks[self._sharding.sync_ranks.index(self._rank)]
        chunk, read = flat[first - start :], 0
        for sender in self._others():
            for run in runs:
                if self._sender(run, self._rank) == sender:
                    part = out[read : read + run.part.numel].view(run.part.shape)
                    self._in_chunk(chunk, run).copy_(part)
                    read += run.part.numel

    def _others(self) -> list[int]:
        return [rank for rank in range(self._sharding.ranks) if rank != self._rank]

    async def distribute(self, fragment: Fragment, flat: Tensor) -> Parts:
        """Move the sync ranks' ranges to the ranks' parts.

        Args:
            flat: This rank's range of the fragment, fp32; empty if it is not a sync rank.

        Returns:
            This rank's parts, fp32. Elements of the rows that are not in the fragment are
            undefined.
        """
        start, _ = self.own_range(fragment)
        rows = self.parts(fragment)
        parts = tuple(
            None
            if box is None
            else HeldRows(box, torch.empty(box.shape, dtype=torch.float32, device="cpu"))
            for box in rows
        )
        for chunks in self._chunks(fragment):
            sizes = self._sizes(chunks, to_sync_ranks=False)
            given = self._pack(chunks, flat, start, sum(sizes[0]))
            out = torch.empty(sum(sizes[1]), dtype=torch.float32, device="cpu")
            await self._exchange(out, given, sizes[1], sizes[0])
            read = 0
            for (first, runs), sync_rank in zip(chunks, self._sharding.sync_ranks, strict=True):
                for run in runs:
                    if self._rank not in run.holders:
                        continue
                    held = parts[run.piece]
                    assert held is not None
                    if sync_rank == self._rank:
                        source = self._in_chunk(flat[first - start :], run)
                    else:
                        source = out[read : read + run.part.numel].view(run.part.shape)
                        read += run.part.numel
                    held.box.view(held.values, run.part).copy_(source)
        return parts

    def _pack(self, chunks: _Chunks, flat: Tensor, start: int, numel: int) -> Tensor:
        given = torch.empty(numel, dtype=torch.float32, device="cpu")
        if self._rank not in self._sharding.sync_ranks:
            return given
        first, runs = chunks[self._sharding.sync_ranks.index(self._rank)]
        chunk, filled = flat[first - start :], 0
        for receiver in self._others():
            for run in runs:
                if receiver in run.holders:
                    target = given[filled : filled + run.part.numel].view(run.part.shape)
                    target.copy_(self._in_chunk(chunk, run))
                    filled += run.part.numel
        return given

    def _in_chunk(self, chunk: Tensor, run: _Run) -> Tensor:
        shape = self._sharding.shapes[run.tensor]
        return at(chunk[run.position :], shape, run.first, run.part)

    def _sender(self, run: _Run, sync_rank: int) -> int:
        """Return the rank that sends a run to a sync rank: this sync rank itself if it holds it."""
        return sync_rank if sync_rank in run.holders else run.holders[sync_rank % len(run.holders)]

    def _sizes(self, chunks: _Chunks, *, to_sync_ranks: bool) -> tuple[list[int], list[int]]:
        """Return how many elements this rank sends to and receives from each other rank."""
        sends, receives = [0] * self._sharding.ranks, [0] * self._sharding.ranks
        for (_, runs), sync_rank in zip(chunks, self._sharding.sync_ranks, strict=True):
            for run in runs:
                holders = (self._sender(run, sync_rank),) if to_sync_ranks else run.holders
                peers = [rank for rank in holders if rank != sync_rank]
                at_ranks, at_sync_rank = (sends, receives) if to_sync_ranks else (receives, sends)
                if self._rank in peers:
                    at_ranks[sync_rank] += run.part.numel
                if self._rank == sync_rank:
                    for peer in peers:
                        at_sync_rank[peer] += run.part.numel
        return sends, receives

    def _chunks(self, fragment: Fragment) -> Iterator[_Chunks]:
        """Yield the chunks that travel at once, one per sync rank, until all have traveled."""
        ranges = self._sharding.ranges(fragment)
        longest = max(stop - start for start, stop in ranges)
        for offset in range(0, longest, self._chunk_numel):
            chunks = []
            for start, stop in ranges:
                first = min(start + offset, stop)
                last = min(first + self._chunk_numel, stop)
                chunks.append((first, tuple(self._runs(fragment, first, last))))
            yield chunks

    def _runs(self, fragment: Fragment, first: int, last: int) -> Iterator[_Run]:
        """Yield the runs of elements ``first <= i < last`` of the flat fragment, box by box."""
        begins = 0
        for index, piece in enumerate(fragment.pieces):
            start, stop = max(first, begins), min(last, begins + piece.numel)
            if start < stop:
                shape = self._sharding.shapes[piece.tensor]
                element = piece.start + start - begins
                holders = self._sharding.holders(piece.tensor)
                for region in boxes_of_range(shape, element, element + stop - start):
                    for box, ranks in holders.items():
                        part = region.intersection(box)
                        if part is not None:
                            yield _Run(index, piece.tensor, element, start - first, part, ranks)
            begins += piece.numel


_Chunks = Sequence[tuple[int, tuple[_Run, ...]]]
"""For each sync rank: the index in the flat fragment of the chunk's first element, and its runs."""
