"""One rank's own parameters: copied and written at boundaries, moved between ranks behind them.

A plan's orders are the same on every rank, in the same order. What is local (copying a fragment's
rows on its device, writing new values into them) is done at the boundary; what needs the host or
the other ranks is queued for one thread, so that the collectives of all ranks are in the order of
the plans.

Host memory of a rank: 4·N/R bytes for what it holds of the published copies, in the parameters'
dtype, and what is in flight.

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
from decoupled_diloco.ranks.rank_store import HELD, CarriedValues
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
    """Where a part of a fragment's piece lies: in the rank's tensor, and in its rows."""

    tensor: Tensor
    box: Box
    parts: tuple[Box, ...]
    buffer: bool


@dataclass
class _Copied:
    """A copy: on the parameters' device until it has been brought to the host, behind."""

    parts: Parts


@dataclass(frozen=True)
class _Received:
    """A fragment's values that are here for the next boundary."""

    values: Parts  # fp32
    rounded: Parts  # in the parameters' dtypes, as they are held afterwards


def _pinned(rows: HeldRows | None) -> HeldRows | None:
    """In memory from which the step that writes them need not wait for the device."""
    if rows is None or rows.values.is_pinned():
        return rows
    return replace(rows, values=rows.values.pin_memory())


def _with_values(parts: Parts, values: Sequence[Tensor]) -> Parts:
    """The same rows, with other tensors in the order of those that are there."""
    rest = iter(values)
    return tuple(None if rows is None else replace(rows, values=next(rest)) for rows in parts)


def _values_of(parts: Parts) -> list[Tensor]:
    return [rows.values for rows in parts if rows is not None]


class RankTensors:
    """What this rank does with its parameters.

    Args:
        model: The rank's part of the model.
        fragments: The run's cut.
        rank: This rank.
        exchange: See `redistribute.AllToAll`; called by one strand.
        carried: What this rank has as a carrier.
        before_write: Called before parameters are written: FSDP2's root may be unsharded.
        failed: Told, in another thread, of what went wrong there.
        state: What checkpoints are made of.

    Attributes:
        saving: Told of a checkpoint that this rank writes.
    """

    def __init__(
        self,
        model: RankModel,
        fragments: Sequence[Fragment],
        rank: int,
        exchange: AllToAll,
        carried: CarriedValues,
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
        self._carried = carried
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
        """Does what a plan orders at this boundary."""
        for order in orders:
            match order:
                case ["copy", int(fragment), int(handle)]:
                    self._copy(fragment, handle)
                case ["spread", int(fragment), int(handle)]:
                    self._receiving[handle] = self._behind(partial(self._receive, handle, fragment))
                case ["write", int(fragment), int(new), minus, float(keep)]:
                    if new != HELD:  # it came while a step was trained, or is about to
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
                    raise AssertionError(f"no order of this version: {order}")

    async def _forget(self, handle: int) -> None:
        """After what was ordered before, which may just bring it here."""
        self._spread.pop(handle, None)
        self._receiving.pop(handle, None)
        self._carried.forget(handle)

    async def idle(self) -> None:
        """Waits until what was ordered is done."""
        if self._last is not None:
            await runtime().outcome(self._last)

    def close(self) -> None:
        """Nothing more is moved."""
        self._strand.close()

    def _behind(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Future[None]:
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
        """Copies this rank's rows now, and collects them at the carriers behind."""
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
                self._carried.put(handle, values)

        self._behind(collect)

    async def _receive(self, handle: int, fragment: int) -> None:
        start, stop = self._moves.own_range(self._fragments[fragment])
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        values = self._carried.future(handle).result(0) if start < stop else nothing
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
        """In the parameters' dtypes, as they are held."""
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
            assert held is not None, f"nothing is held of fragment {fragment}"
            values = rounded = held
        before: Parts | None = None
        if minus is not None:
            assert isinstance(minus, int)
            before = held if minus == HELD else self._copies[minus].parts
            assert before is not None, f"nothing is held of fragment {fragment}"
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
        """Where the parameters are."""
        if self._side is None:
            return parts
        return _with_values(parts, self._side.upload(_values_of(parts)))
