"""Moving fragments between ranks' boxes and sync ranks' ranges."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decoupled_diloco.merge import Fragment, gather
from decoupled_diloco.merge.fragments import Piece
from decoupled_diloco.ranks.redistribute import (
    Box,
    HeldRows,
    Redistribution,
    Sharding,
    at,
    boxes_of_range,
    rows_of_range,
)
from decoupled_diloco.runtime import blocking


class Room:
    """An all-to-all between threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._given: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.most = 0

    def of(self, rank: int):  # type: ignore[no-untyped-def]
        async def exchange(out: Tensor, given: Tensor, outs: list[int], gives: list[int]) -> None:
            self.most = max(self.most, out.numel(), given.numel())
            self._given[rank] = list(given.split(gives))
            self._barrier.wait(20)
            received = [theirs[rank] for theirs in self._given]
            assert [part.numel() for part in received] == outs
            if received:
                out.copy_(torch.cat(received))
            self._barrier.wait(20)

        return exchange


SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_a_range_equals_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = Box.whole(shape).numel
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    flat = torch.arange(numel)
    boxes = list(boxes_of_range(shape, start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    found = [Box.whole(shape).view(flat.view(shape), box).reshape(-1) for box in boxes]
    assert torch.cat([*found, flat[:0]]).equal(flat[start:stop])
    for box in boxes:
        assert at(flat[start:], shape, start, box).equal(
            Box.whole(shape).view(flat.view(shape), box)
        )


@given(SHAPES, st.data())
def test_the_rows_contain_all_elements_of_the_range(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    numel = Box.whole(shape).numel
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    box = Box.whole(shape)
    rows = rows_of_range(box, shape, start, stop)
    if start == stop:
        assert rows is None or shape
        return
    assert rows is not None
    flat = torch.arange(numel).view(shape)
    assert set(range(start, stop)) <= set(box.view(flat, rows).reshape(-1).tolist())


@st.composite
def boxes_on_ranks(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> tuple[Box | None, ...]:
    """Draw a tensor's boxes: whole, split along dimensions, replicated, or on some ranks only."""
    boxes = [Box.whole(shape)]
    while len(boxes) < ranks and shape and draw(st.booleans()):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        d = draw(st.integers(0, len(shape) - 1))
        middle = draw(st.integers(box.start[d], box.stop[d]))
        low = Box(box.start, (*box.stop[:d], middle, *box.stop[d + 1 :]))
        high = Box((*box.start[:d], middle, *box.start[d + 1 :]), box.stop)
        boxes += [low, high]
    holders = [
        boxes[n] if n < len(boxes) else draw(st.sampled_from([*boxes, None])) for n in range(ranks)
    ]
    holders = draw(st.permutations(holders))
    return tuple(box if box is not None and box.numel else None for box in holders)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_collecting_and_distributing_gives_the_same_values(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        block = data.draw(st.sampled_from([1, 3, 64, 1 << 16]))
        patch.setattr(sys.modules["decoupled_diloco.merge.codec"], "DIGEST_NUMEL", block)
        collect_and_distribute(data)


def collect_and_distribute(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    shapes = data.draw(st.lists(SHAPES, min_size=1, max_size=3))
    boxes = tuple(data.draw(boxes_on_ranks(shape, ranks)) for shape in shapes)
    sync_ranks = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1).map(sorted))
    sharding = Sharding(tuple(shapes), boxes, tuple(sync_ranks))
    assert sharding.missing() is None
    pieces = []
    for index, shape in enumerate(shapes):
        numel = Box.whole(shape).numel
        start = data.draw(st.integers(0, numel - 1))
        pieces.append(Piece(index, start, data.draw(st.integers(start + 1, numel))))
    fragment = Fragment(0, tuple(pieces))
    tensors = [torch.randn(shape) for shape in shapes]
    expected = gather(fragment, tensors)
    chunk = data.draw(st.sampled_from([3, 128, 1 << 20]))
    room = Room(ranks)

    def work(rank: int) -> tuple[Tensor, bool]:
        moves = Redistribution(sharding, rank, room.of(rank), chunk)
        parts = tuple(
            None
            if rows is None
            else HeldRows(rows, Box.whole(shapes[n]).view(tensors[n], rows).clone())
            for n, rows in enumerate(moves.parts(fragment))
        )
        flat = blocking(moves.collect(fragment, parts))
        back = blocking(moves.distribute(fragment, flat))
        same = True
        for n, (piece, rows, held) in enumerate(
            zip(pieces, moves.parts(fragment), back, strict=True)
        ):
            assert (rows is None) == (held is None)
            for region in boxes_of_range(shapes[n], piece.start, piece.stop):
                part = None if rows is None else region.intersection(rows)
                if part is not None and held is not None:
                    ours = held.box.view(held.values, part)
                    same &= ours.equal(Box.whole(shapes[n]).view(tensors[n], part))
        return flat, same

    with ThreadPoolExecutor(ranks) as pool:
        results = list(pool.map(work, range(ranks)))
    assert torch.cat([results[rank][0] for rank in sync_ranks]).equal(expected)
    assert all(same for _, same in results)
    assert room.most <= chunk * max(len(sync_ranks), ranks)


@pytest.mark.parametrize("numel", [1, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("sync_ranks", [1, 2, 3, 8])
def test_ranges_end_between_blocks_and_have_similar_sizes(
    numel: int, sync_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["decoupled_diloco.merge.codec"], "DIGEST_NUMEL", 128)
    sharding = Sharding(((1,),), (tuple([Box((0,), (1,))] * 8),), tuple(range(sync_ranks)))
    fragment = Fragment(0, (Piece(0, 0, numel),))
    unsplit = replace(sharding, unsplit=(0,)).ranges(fragment)
    assert unsplit == ((0, numel), *[(numel, numel)] * (sync_ranks - 1))
    ranges = sharding.ranges(fragment)
    assert [start for start, _ in ranges[1:]] == [stop for _, stop in ranges[:-1]]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == numel
    assert all(start % 128 == 0 or start == numel for start, _ in ranges)
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 256


def test_elements_that_no_rank_holds_are_found() -> None:
    sharding = Sharding(((4,),), ((Box((0,), (2,)), None),))
    assert sharding.missing() == 0
