"""The leader's parameter store: what is ordered of it becomes a part of the next plan.

The leader's `LearnerTensors` uses it as any store. Nothing is read or written by the call: every
rank, the leader among them, carries the orders out at the boundary that the plan is for. Values are
not here either: carriers have them, and all know them by the number of a `Handle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from concurrent.futures import Future, InvalidStateError

from torch import Tensor

from decoupled_diloco.learner.parameter_store import HostCopy
from decoupled_diloco.merge import Fragment, Layout

HELD = 0
"""In the place of a number: the values that were written last."""


class Handle:
    """A fragment's values that the carriers have, until nobody has the handle any more.

    Attributes:
        number: By which the carriers know them.
        digest: Of a published copy.
    """

    def __init__(self, number: int, numel: int, digest: str = "") -> None:
        self.number = number
        self.digest = digest
        self._numel = numel

    def numel(self) -> int:
        """N, as a tensor tells it."""
        return self._numel

    def values(self) -> Tensor:
        """See `HostCopy.values`: nobody has them whole."""
        raise AssertionError("the values are with the carriers")


class CarriedValues:
    """A carrier's ranges of fragments, fp32, by number; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, Future[Tensor]] = {}
        self._error: BaseException | None = None

    def put(self, number: int, values: Tensor) -> None:
        """They are here."""
        future = self.future(number)
        if not future.done():
            future.set_result(values)

    def future(self, number: int) -> Future[Tensor]:
        """Done when they are here."""
        with self._lock:
            future = self._values.setdefault(number, Future())
            if self._error is not None and not future.done():
                future.set_exception(self._error)
            return future

    def forget(self, number: int) -> None:
        """Nobody needs them any more."""
        with self._lock:
            self._values.pop(number, None)

    def fail(self, error: BaseException) -> None:
        """What is not here will never be: who waits for it, or will, gets this error."""
        with self._lock:
            self._error = error
            for future in self._values.values():
                if not future.done():
                    future.set_exception(error)


class RankedStore:
    """See the module; safe to use from several threads.

    Args:
        layout: The logical tensors of all ranks.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._orders: list[list[object]] = []
        self._handles = 0
        self._spreads: list[Future[None]] = []
        self._held: dict[int, Handle] = {}
        self._error: BaseException | None = None

    @property
    def layout(self) -> Layout:
        """See `ParameterStore.layout`."""
        return self._layout

    @property
    def waits(self) -> bool:
        """Whether there is something that the ranks have not been told."""
        return bool(self._orders)

    def take(self) -> list[list[object]]:
        """The orders since it was asked last, for the next plan."""
        with self._lock:
            orders, self._orders = self._orders, []
            told, self._spreads = self._spreads, []
        for future in told:
            with contextlib.suppress(InvalidStateError):  # Who waited has left.
                future.set_result(None)
        return orders

    def failed(self, error: BaseException) -> None:
        """Nothing that is ordered will come: who waits for it, or will, gets this error."""
        with self._lock:
            self._error = error
            for future in self._spreads:
                if not future.done():
                    future.set_exception(error)
            self._spreads.clear()

    def handle(self, numel: int, digest: str) -> Handle:
        """For values [N] that the carriers are about to have."""
        with self._lock:
            return self._new_handle(numel, digest)

    def _new_handle(self, numel: int, digest: str = "") -> Handle:
        self._handles += 1
        handle = Handle(self._handles, numel, digest)
        weakref.finalize(handle, self._forget, handle.number).atexit = False
        return handle

    def snapshot(self, fragment: Fragment) -> HostCopy:
        """See `ParameterStore.snapshot`."""
        with self._lock:
            copy = self._new_handle(fragment.numel)
            self._orders.append(["copy", fragment.index, copy.number])
        return copy

    def overwrite(self, fragment: Fragment, values: Handle) -> None:
        """See `ParameterStore.overwrite`."""
        self._write(fragment.index, values, None, 0.0)

    def combine(
        self, fragment: Fragment, values: Handle, minus: HostCopy | None, keep: float
    ) -> None:
        """See `ParameterStore.combine`."""
        less = minus.number if isinstance(minus, Handle) else None if minus is None else HELD
        self._write(fragment.index, values, less, keep)

    def prepare(self, values: Tensor) -> Tensor:
        """See `ParameterStore.prepare`."""
        return values

    async def spread(self, fragment: Fragment, values: Handle) -> None:
        """Has every rank fetch its part of what the carriers have; returns when a plan says so.

        A step later each has it: what is written by the next plan waits for nothing.
        """
        with self._lock:
            self._orders.append(["spread", fragment.index, values.number])
            told = Future[None]()
            if self._error is None:
                self._spreads.append(told)
            else:
                told.set_exception(self._error)
        await asyncio.wrap_future(told)

    def adopt(self, fragment: int, values: Handle) -> None:
        """A published copy that a checkpoint has kept: every rank holds its part of it."""
        with self._lock:
            self._orders.append(["spread", fragment, values.number])
            self._orders.append(["hold", fragment, values.number])
            self._held[fragment] = values

    def order(self, *what: object) -> None:
        """Anything else that every rank does at the boundary."""
        with self._lock:
            self._orders.append(list(what))

    def _write(self, fragment: int, values: Handle, minus: int | None, keep: float) -> None:
        with self._lock:
            new = HELD if self._held.get(fragment) is values else values.number
            self._orders.append(["write", fragment, new, minus, keep])
            self._held[fragment] = values

    def _forget(self, number: int) -> None:
        # Without the lock: it may be called within it, as whatever frees memory may.
        self._orders.append(["forget", number])
