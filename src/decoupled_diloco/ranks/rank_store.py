"""The leader's parameter store, whose calls become orders in the next plan.

The leader's `LearnerTensors` uses it like any `ParameterStore`. A call reads and writes nothing:
every rank, including the leader, executes the orders at the boundary of the plan. Values are not
here either. The sync ranks hold them, and all ranks refer to them by the number of a `Handle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from concurrent.futures import Future, InvalidStateError

from torch import Tensor

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.parameter_store import HostCopy
from decoupled_diloco.merge import Fragment, Layout

HELD = 0
"""Used instead of a handle's number: the values that were written last."""


class Handle:
    """Refers to a fragment's values, which the sync ranks keep until the handle is collected.

    Attributes:
        number: The number of the values on the sync ranks, from 1.
        digest: The digest of a published copy; empty for other values.
    """

    def __init__(self, number: int, numel: int, digest: str = "") -> None:
        self.number = number
        self.digest = digest
        self._numel = numel

    def numel(self) -> int:
        """Return the number of elements N, like `Tensor.numel`."""
        return self._numel

    def values(self) -> Tensor:
        """See `HostCopy.values`; it cannot be called, because no rank has all values."""
        raise AssertionError("only the sync ranks have the values")


class SyncRankValues:
    """A sync rank's ranges of fragments, fp32, by handle number; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, Future[Tensor]] = {}
        self._error: BaseException | None = None

    def put(self, number: int, values: Tensor) -> None:
        """Provide values; futures of this number complete."""
        future = self.future(number)
        if not future.done():
            future.set_result(values)

    def future(self, number: int) -> Future[Tensor]:
        """Return a future that completes when the values have arrived."""
        with self._lock:
            future = self._values.setdefault(number, Future())
            if self._error is not None and not future.done():
                future.set_exception(self._error)
            return future

    def forget(self, number: int) -> None:
        """Delete values that are no longer needed."""
        with self._lock:
            self._values.pop(number, None)

    def fail(self, error: BaseException) -> None:
        """Fail all present and future waits for values that have not arrived."""
        with self._lock:
            self._error = error
            for future in self._values.values():
                if not future.done():
                    future.set_exception(error)


class RankedStore:
    """See the module; thread-safe.

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

    def admit(self, layout: Layout) -> None:
        """See `ParameterStore.admit`."""
        if layout.of_model is not layout:
            raise ConfigError(
                "[sync.moments] of the run cannot be combined with a learner of several ranks: "
                "train this learner with one rank, or take [sync.moments] out"
            )

    @property
    def waits(self) -> bool:
        """Whether there are orders for the next plan."""
        return bool(self._orders)

    def take(self) -> list[list[object]]:
        """Return the orders since the last call, for the next plan."""
        with self._lock:
            orders, self._orders = self._orders, []
            planned, self._spreads = self._spreads, []
        for future in planned:
            with contextlib.suppress(InvalidStateError):  # the waiting task was cancelled
                future.set_result(None)
        return orders

    def failed(self, error: BaseException) -> None:
        """Fail all present and future waits for orders: no plan will be made."""
        with self._lock:
            self._error = error
            for future in self._spreads:
                if not future.done():
                    future.set_exception(error)
            self._spreads.clear()

    def handle(self, numel: int, digest: str) -> Handle:
        """Return a new handle for values [N] that the sync ranks are about to receive."""
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
        """Order every rank to fetch its part of values; return when a plan has the order.

        The parts arrive while a step is trained, so a write in the plan after it waits for nothing.

        Raises:
            DilocoError: The learner has failed or ended; see `failed`.
        """
        with self._lock:
            self._orders.append(["spread", fragment.index, values.number])
            planned = Future[None]()
            if self._error is None:
                self._spreads.append(planned)
            else:
                planned.set_exception(self._error)
        await asyncio.wrap_future(planned)

    def adopt(self, fragment: int, values: Handle) -> None:
        """Order every rank to hold its part of a published copy that a checkpoint kept."""
        with self._lock:
            self._orders.append(["spread", fragment, values.number])
            self._orders.append(["hold", fragment, values.number])
            self._held[fragment] = values

    def order(self, *what: object) -> None:
        """Add any other order for all ranks; see `tensors.Orders`."""
        with self._lock:
            self._orders.append(list(what))

    def _write(self, fragment: int, values: Handle, minus: int | None, keep: float) -> None:
        with self._lock:
            new = HELD if self._held.get(fragment) is values else values.number
            self._orders.append(["write", fragment, new, minus, keep])
            self._held[fragment] = values

    def _forget(self, number: int) -> None:
        # Without the lock: the garbage collector may call this while this thread holds it.
        self._orders.append(["forget", number])
