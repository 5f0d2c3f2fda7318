"""The leader's parameter store: what is ordered of it becomes a part of the next plan.

The leader's `LearnerTensors` uses it as any store. Nothing is read or written by the call: every
rank, the leader among them, carries the orders out at the boundary that the plan is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from typing import Any

from torch import Tensor

from decoupled_diloco.learner.store import HostCopy
from decoupled_diloco.merge import Fragment, Layout
from decoupled_diloco.ranks.tensors import HELD, RankTensors


class Ordered:
    """A copy that is ordered: a fragment's values, once every rank has come to its boundary."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.future: Future[Tensor] = Future()

    def values(self) -> Tensor:
        """See `HostCopy.values`."""
        return self.future.result()


class RankedStore:
    """See the module; safe to use from several threads.

    Args:
        layout: The logical tensors of all ranks.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._orders: list[list[object]] = []
        self._issued = 0
        self._acknowledged = 0
        self._copies: weakref.WeakValueDictionary[int, Ordered] = weakref.WeakValueDictionary()
        self._spreads: dict[int, Future[None]] = {}
        self._numbers: dict[int, tuple[int, Tensor]] = {}  # by the tensor's identity
        self._held: dict[int, Tensor] = {}
        self._given: dict[int, Tensor] = {}
        self._error: BaseException | None = None

    @property
    def layout(self) -> Layout:
        """See `ParameterStore.layout`."""
        return self._layout

    @property
    def waits(self) -> bool:
        """Whether there is something that the ranks have not been told, or have not done."""
        return bool(self._orders) or self._acknowledged < self._issued

    def take(self, tensors: RankTensors) -> list[list[object]]:
        """The orders since it was asked last, for the next plan."""
        with self._lock:
            orders, self._orders = self._orders, []
            tensors.given.update(self._given)
            self._given.clear()
        return orders

    def collected(self, number: int, values: Tensor) -> None:
        """A copy is here."""
        ordered = self._copies.get(number)
        with self._lock:
            if ordered is not None and not ordered.future.done():
                ordered.future.set_result(values)

    def acknowledged(self, number: int) -> None:
        """All ranks have done what has this number, and everything before."""
        with self._lock:
            self._acknowledged = number
            ready = [n for n in self._spreads if n <= number]
            futures = [self._spreads.pop(n) for n in ready]
        for future in futures:
            with contextlib.suppress(InvalidStateError):  # Who waited has left.
                future.set_result(None)

    def failed(self, error: BaseException) -> None:
        """Nothing that is ordered will come: who waits for it, or will, gets this error."""
        with self._lock:
            self._error = error
            futures: list[Future[Any]] = list(self._spreads.values())
            futures += [each.future for each in self._copies.values()]
            self._spreads.clear()
            for future in futures:
                if not future.done():
                    future.set_exception(error)

    def snapshot(self, fragment: Fragment) -> HostCopy:
        """See `ParameterStore.snapshot`."""
        with self._lock:
            ordered = Ordered(self._order("copy", fragment.index))
            self._copies[ordered.number] = ordered
            if self._error is not None:
                ordered.future.set_exception(self._error)
        weakref.finalize(ordered, self._forget, ordered.number)
        return ordered

    def overwrite(self, fragment: Fragment, values: Tensor) -> None:
        """See `ParameterStore.overwrite`."""
        self._write(fragment.index, values, None, 0.0)

    def combine(
        self, fragment: Fragment, values: Tensor, minus: HostCopy | None, keep: float
    ) -> None:
        """See `ParameterStore.combine`."""
        less = minus.number if isinstance(minus, Ordered) else None if minus is None else HELD
        self._write(fragment.index, values, less, keep)

    def prepare(self, values: Tensor) -> Tensor:
        """See `ParameterStore.prepare`."""
        return values

    async def spread(self, fragment: Fragment, values: Tensor) -> None:
        """See `ParameterStore.spread`: returns when every rank holds its part of the values."""
        with self._lock:
            number = self._order("spread", fragment.index)
            done = Future[None]()
            if self._error is None:
                self._spreads[number] = done
            else:
                done.set_exception(self._error)
            self._given[number] = values
            self._numbers[id(values)] = number, values
        await asyncio.wrap_future(done)

    def adopt(self, fragment: int, values: Tensor) -> None:
        """A published copy that a checkpoint has kept: every rank holds its part of it."""
        with self._lock:
            number = self._order("spread", fragment)
            self._given[number] = values
            self._orders.append(["hold", number, fragment])
            self._held[fragment] = values

    def order(self, *what: object) -> None:
        """Anything else that every rank does at the boundary."""
        with self._lock:
            self._orders.append(list(what))

    def _order(self, what: str, fragment: int) -> int:
        self._issued += 1
        self._orders.append([what, self._issued, fragment])
        return self._issued

    def _write(self, fragment: int, values: Tensor, minus: int | None, keep: float) -> None:
        with self._lock:
            number, _ = self._numbers.pop(id(values), (HELD, values))
            assert number != HELD or self._held.get(fragment) is values, "it has not been spread"
            self._orders.append(["write", fragment, number, minus, keep])
            self._held[fragment] = values

    def _forget(self, number: int) -> None:
        # Without the lock: it may be called within it, as whatever frees memory may.
        self._orders.append(["forget", number])
