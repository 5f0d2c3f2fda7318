"""One rank's parameters: copied and written at boundaries, moved between ranks in the background.

A plan's orders are the same on every rank, in the same order. Local work is done at the boundary:
it copies a fragment's rows on their device, or writes new values into them. Work that needs the
host or the other ranks is queued for one thread. So all ranks run their collectives in the order
of the plans.

Host memory of a rank, besides fragments in flight: its part of each published copy, in the
parameters' dtype. If the model is fully sharded and fp32, this is 4·N/R bytes per fragment.

Shapes: R ranks, N elements of a fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoupled_diloco.learner.parameter_store import SideStream
from decoupled_diloco.merge import Fragment, local_of
from decoupled_diloco.ranks.rank_context import RankState
from decoupled_diloco.ranks.rank_model import RankModel
from decoupled_diloco.ranks.rank_store import HELD, SyncRankValues
from decoupled_diloco.ranks.redistribute import (
    AllToAll,
    Box,
    HeldRows,
    Parts,
    Redistribution,
    boxes_of_range,
)
from decoupled_diloco.runtime import now, runtime

Orders = Sequence[Sequence[object]]
"""``("copy", fragment, handle)``, ``("spread", fragment, handle)``,
``("write", fragment, new, minus, keep)``, ``("hold", fragment, handle)``, ``("forget", handle)``,
``("save", folder)``, ``("restore", folder, ranks)``."""


@dataclass(frozen=True)
class _Row:
    """The elements of a fragment's piece in this rank's tensor.

    Attributes:
        tensor: The rank's parameter or buffer.
        box: The box of the logical tensor that the rank holds.
        parts: Boxes with exactly the elements of the piece that the rank holds.
        buffer: Whether the tensor is a buffer.
    """

    tensor: Tensor
    box: Box
    parts: tuple[Box, ...]
    buffer: bool


@dataclass
class _Copied:
    """A copy of rows: on the parameters' device, until the background has moved it to the host."""

    parts: Parts


@dataclass(frozen=True)
class _Received:
    """A fragment's values that have arrived and can be written at a boundary.

    Attributes:
        values: fp32.
        rounded: In the parameters' dtypes; held after the write.
    """

    values: Parts
    rounded: Parts


def _pinned(rows: HeldRows | None) -> HeldRows | None:
    """Return rows in pinned memory, so that a step need not wait for their copy to the device."""
    if rows is None or rows.values.is_pinned():
        return rows
    return replace(rows, values=rows.values.pin_memory())


def _with_values(parts: Parts, values: Sequence[Tensor]) -> Parts:
    """Return the same rows with other values, given in order without the missing rows."""
    rest = iter(values)
    return tuple(None if rows is None else replace(rows, values=next(rest)) for rows in parts)


def _values_of(parts: Parts) -> list[Tensor]:
    return [rows.values for rows in parts if rows is not None]


class RankTensors:
    """Executes plans on this rank's parameters; only the training thread may use it.

    Args:
        model: The rank's part of the model.
        fragments: The run's partition of the model.
        rank: This rank.
        exchange: See `redistribute.AllToAll`; called by one strand.
        sync_rank_values: The ranges of fragments that this rank has as a sync rank.
        before_write: Called before parameters are written: FSDP2's root may be unsharded.
        failed: Receives an error of the strand, in its thread.
        state: Saves and restores this rank's part of checkpoints.

    Attributes:
        saving: Called when this rank has started to write its part of a checkpoint. Arguments: the
            folder, the future of the write, and the seconds of the copy.
    """

    def __init__(
        self,
        model: RankModel,
        fragments: Sequence[Fragment],
        rank: int,
        exchange: AllToAll,
        sync_rank_values: SyncRankValues,
        *,
        before_write: Callable[[], None] = lambda: None,
        failed: Callable[[BaseException], None] = lambda error: None,
        state: RankState | None = None,
    ) -> None:
        self._model = model
        self._state = state
        self._fragments = fragments
        self._moves = Redistribution(model.sharding, rank, exchange)
        self._rank = rank
        self._before_write = before_write
        self._failed = failed
        self._rows = [self._rows_of(fragment) for fragment in fragments]
        devices = [local_of(each).device for each in model.tensors if each is not None]
        cuda = next((device for device in devices if device.type == "cuda"), None)
        self._side = None if cuda is None else SideStream(cuda)
        self._held: list[Parts | None] = [None] * len(fragments)
        self._copies: dict[int, _Copied] = {}
        self._spread: dict[int, _Received] = {}
        self._receiving: dict[int, Future[None]] = {}
        self._sync_rank_values = sync_rank_values
        self._strand = runtime().strand("ddiloco-ranks")
        self._last: Future[None] | None = None
        self.saving: Callable[[str, Future[object], float], None] = lambda *arguments: None

    def _rows_of(self, fragment: Fragment) -> list[_Row | None]:
        rows: list[_Row | None] = []
        for piece, part in zip(fragment.pieces, self._moves.parts(fragment), strict=True):
            tensor = self._model.tensors[piece.tensor]
            box = self._model.sharding.boxes[piece.tensor][self._rank]
            if part is None or box is None or tensor is None:
                rows.append(None)
                continue
            spec = self._model.layout.tensors[piece.tensor]
            regions = boxes_of_range(spec.shape, piece.start, piece.stop)
            inside = tuple(found for each in regions if (found := each.intersection(part)))
            rows.append(_Row(tensor, box, inside, spec.is_buffer))
        return rows

    async def carry_out(self, orders: Orders) -> None:
        """Execute the orders of a plan at this boundary.

        Raises:
            DilocoError: An awaited background order has failed.
        """
        for order in orders:
            match order:
                case ["copy", int(fragment), int(handle)]:
                    self._copy(fragment, handle)
                case ["spread", int(fragment), int(handle)]:
                    self._receiving[handle] = self._in_background(
                        partial(self._receive, handle, fragment)
                    )
                case ["write", int(fragment), int(new), minus, float(keep)]:
                    if new != HELD:  # usually it has arrived while a step was trained
                        # break: rank-writes-before-arrival
                        await runtime().outcome(self._receiving.pop(new))
                    self._write(fragment, new, minus, keep)
                case ["hold", int(fragment), int(handle)]:
                    await runtime().outcome(self._receiving.pop(handle))
                    self._held[fragment] = self._spread.pop(handle).rounded
                case ["save", str(folder)]:
                    self._save(folder)
                case ["restore", str(folder), int(ranks)]:
                    assert self._state is not None
                    self._state.load(Path(folder), ranks)
                case ["forget", int(handle)]:
                    self._copies.pop(handle, None)
                    self._strand.submit(partial(self._forget, handle))
                case _:
                    raise AssertionError(f"unknown order: {order}")

    async def _forget(self, handle: int) -> None:
        """Delete values; runs in the strand, because an earlier order may still produce them."""
        self._spread.pop(handle, None)
        self._receiving.pop(handle, None)
        self._sync_rank_values.forget(handle)

    async def idle(self) -> None:
        """Wait until all queued orders are done."""
        if self._last is not None:
            await runtime().outcome(self._last)

    def close(self) -> None:
        """Close the strand: no more orders are executed."""
        self._strand.close()

    def _in_background(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Future[None]:
        """Queue work for the strand, which runs one after the other; report its error."""

        async def done() -> None:
            try:
                await work()
            except BaseException as error:
                self._failed(error)
                raise

        self._last = self._strand.submit(done)
        return self._last

    @torch.no_grad()
    def _copy(self, fragment: int, handle: int) -> None:
        """Copy this rank's rows now, and move them to the sync ranks in the background."""
        boxes = self._moves.parts(self._fragments[fragment])
        parts = tuple(
            None
            if row is None or box is None
            else HeldRows(box, row.box.view(local_of(row.tensor), box).detach().clone())
            for row, box in zip(self._rows[fragment], boxes, strict=True)
        )
        copied = self._copies[handle] = _Copied(parts)
        side = self._side
        ready = None if side is None else side.mark()

        async def collect() -> None:
            if side is not None and ready is not None:
                on_host, done = side.download(_values_of(parts), ready)
                done.synchronize()
                copied.parts = _with_values(parts, on_host)
            values = await self._moves.collect(self._fragments[fragment], copied.parts)
            if values.numel():
                self._sync_rank_values.put(handle, values)

        self._in_background(collect)

    async def _receive(self, handle: int, fragment: int) -> None:
        start, stop = self._moves.own_range(self._fragments[fragment])
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        # No wait: the leader orders a spread only after all sync ranks have the values.
        values = self._sync_rank_values.future(handle).result(0) if start < stop else nothing
        parts = await self._moves.distribute(self._fragments[fragment], values)
        if self._side is not None:
            parts = tuple(map(_pinned, parts))
        rounded = self._rounded(fragment, parts)
        if self._side is not None:
            rounded = tuple(map(_pinned, rounded))
        self._spread[handle] = _Received(parts, rounded)

    def _save(self, folder: str) -> None:
        assert self._state is not None
        started = now()
        self._before_write()
        writing = self._state.save(Path(folder))
        self.saving(folder, writing, now() - started)

    def _rounded(self, fragment: int, values: Parts) -> Parts:
        """Return parts in the parameters' dtypes, in which they are held."""
        return tuple(
            None
            if row is None or ours is None
            else replace(ours, values=ours.values.to(local_of(row.tensor).dtype))
            for row, ours in zip(self._rows[fragment], values, strict=True)
        )

    @torch.no_grad()
    def _write(self, fragment: int, new: int, minus: object, keep: float) -> None:
        held = self._held[fragment]
        if new != HELD:
            received = self._spread.pop(new)
            values, rounded = received.values, received.rounded
        else:
            assert held is not None, f"fragment {fragment} has no held values"
            values = rounded = held
        before: Parts | None = None
        if minus is not None:
            assert isinstance(minus, int)
            before = held if minus == HELD else self._copies[minus].parts
            assert before is not None, f"fragment {fragment} has no held values"
            before = self._on_device(before)
        values = self._on_device(values)
        self._before_write()
        for index, row in enumerate(self._rows[fragment]):
            ours = values[index]
            if row is None or ours is None:
                continue
            local = local_of(row.tensor)
            less = None if before is None else before[index]
            for part in row.parts:
                target = row.box.view(local, part)
                source = ours.box.view(ours.values, part)
                if not row.buffer and (less is not None or keep != 0.0):
                    theta = target.float()
                    if less is not None:
                        theta.sub_(less.box.view(less.values, part).float())
                        theta.add_(source)
                    else:
                        theta.mul_(keep).add_(source, alpha=1 - keep)
                    source = theta
                target.copy_(source)
        self._held[fragment] = rounded

    def _on_device(self, parts: Parts) -> Parts:
        """Return parts on the device of the parameters."""
        if self._side is None:
            return parts
        return _with_values(parts, self._side.upload(_values_of(parts)))
