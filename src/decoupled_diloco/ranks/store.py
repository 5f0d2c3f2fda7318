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

from decoupled_diloco.learner.store import HostCopy
from decoupled_diloco.merge import Fragment, Layout
from decoupled_diloco.ranks.tensors import HELD


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
        self._handles = 0
        self._spreads: dict[int, Future[None]] = {}
        self._held: dict[int, Handle] = {}
        self._error: BaseException | None = None

    @property
    def layout(self) -> Layout:
        """See `ParameterStore.layout`."""
        return self._layout

    @property
    def waits(self) -> bool:
        """Whether there is something that the ranks have not been told, or have not done."""
        return bool(self._orders) or self._acknowledged < self._issued

    def take(self) -> list[list[object]]:
        """The orders since it was asked last, for the next plan."""
        with self._lock:
            orders, self._orders = self._orders, []
        return orders

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
            for future in self._spreads.values():
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
            self._order("copy", fragment.index, copy.number)
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
        """Returns when every rank holds its part of what the carriers have."""
        with self._lock:
            number = self._order("spread", fragment.index, values.number)
            done = Future[None]()
            if self._error is None:
                self._spreads[number] = done
            else:
                done.set_exception(self._error)
        await asyncio.wrap_future(done)

    def adopt(self, fragment: int, values: Handle) -> None:
        """A published copy that a checkpoint has kept: every rank holds its part of it."""
        with self._lock:
            self._order("spread", fragment, values.number)
            self._orders.append(["hold", fragment, values.number])
            self._held[fragment] = values

    def order(self, *what: object) -> None:
        """Anything else that every rank does at the boundary."""
        with self._lock:
            self._orders.append(list(what))

    def _order(self, what: str, fragment: int, handle: int) -> int:
        self._issued += 1
        self._orders.append([what, self._issued, fragment, handle])
        return self._issued

    def _write(self, fragment: int, values: Handle, minus: int | None, keep: float) -> None:
        with self._lock:
            new = HELD if self._held.get(fragment) is values else values.number
            self._orders.append(["write", fragment, new, minus, keep])
            self._held[fragment] = values

    def _forget(self, number: int) -> None:
        # Without the lock: it may be called within it, as whatever frees memory may.
        self._orders.append(["forget", number])
