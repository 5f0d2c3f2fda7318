"""A virtual process with its own event loop and runtime.

The real shells run in it unchanged. `VirtualLoop` implements all that asyncio's tasks, timers and
futures require of a loop, and `VirtualRuntime` provides the rest. All loops run in one thread, from
one queue (`clockwork`), so a seed determines everything.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import warnings
from asyncio import events
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Self, TypeVar

from decoupled_diloco.runtime import CURRENT, Runtime
from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.clockwork import Clockwork
from decoupled_diloco_lab.simulate.virtual_network import Endpoint

_T = TypeVar("_T")

EPOCH = 946_684_800.0
"""Start of virtual time in seconds since the Unix epoch: 2000-01-01, 00:00 UTC."""

LEVELS_MAX = 50
"""Largest number of awaits in the ``finally`` blocks of a coroutine that is closed."""

WORK_SECONDS = 0.002
"""Time that a worker takes for a task."""


class VirtualLoop(asyncio.AbstractEventLoop):
    """The event loop of one incarnation of a process.

    Args:
        clockwork: Virtual time.
        process: Its process. The loop is paused and killed with it.
        context: The default context of its callbacks.
    """

    def __init__(self, clockwork: Clockwork, process: VirtualProcess, context: Context) -> None:
        self.clockwork = clockwork
        self.process = process
        self.life = process.life
        self.context = context
        self.tasks: list[asyncio.Task[Any]] = []
        self.problems: list[str] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self._handlers: dict[int, Callable[[], None]] = {}

    def time(self) -> float:
        """Return the time of this process's clock, which may have jumped ahead."""
        return self.clockwork.now + self.process.ahead_seconds

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback soon, at the present instant."""
        handle = asyncio.Handle(callback, args, self, self._context(context))
        self.at(self.clockwork.now, False, self._run, handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback after a delay."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback when this process's clock reaches an instant."""
        handle = asyncio.TimerHandle(when, callback, args, self, self._context(context))
        self._timers.add(handle)
        self._plan(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._timers.discard(handle)

    def replan_timers(self) -> None:
        """Plan all timers again after a jump of the process's clock: they are due earlier."""
        for handle in sorted(self._timers, key=asyncio.TimerHandle.when):
            self._plan(handle)

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        """Run a coroutine in a task."""
        # Keep a reference: a killed process must not run its ``finally`` blocks, but garbage
        # collection of a pending task would close its coroutine.
        task = asyncio.Task(coro, loop=self, name=name, context=self._context(context))
        self.tasks.append(task)
        if len(self.tasks) > 2000:
            self.tasks = [each for each in self.tasks if not each.done()]
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Run a function in a virtual worker."""
        worker = executor or VirtualWorker(self)
        assert isinstance(worker, VirtualWorker)
        return worker.run(func, *args)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep an error for the checkers; raise one that must end the program."""
        error = context.get("exception")
        if error is not None and not isinstance(error, Exception):
            raise error
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def add_signal_handler(  # type: ignore[override]
        self, sig: int, callback: Callable[..., None], *args: Any
    ) -> None:
        """Set the handler of a signal."""
        self._handlers[sig] = lambda: callback(*args)

    def signalled(self, sig: int) -> bool:
        """Handle a signal; return False if it has no handler."""
        handler = self._handlers.get(sig)
        if handler is not None:
            self.call_soon(handler)
        return handler is not None

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Return True: the loop runs as long as its process."""
        return True

    def is_closed(self) -> bool:
        """Return False: callbacks of an earlier incarnation are dropped instead."""
        return False

    def at(self, instant: float, timer: bool, function: Callable[..., None], *args: Any) -> None:
        """Plan a callback for this loop's incarnation, even if the process has restarted since."""
        self.clockwork.at(instant, self.process.run, self.life, timer, function, args)

    def _context(self, context: Context | None) -> Context:
        if context is not None:
            return context
        return copy_context() if events._get_running_loop() is self else self.context.copy()

    def _plan(self, handle: asyncio.TimerHandle) -> None:
        ahead = self.process.ahead_seconds
        instant = handle.when() - ahead
        # Rounding must not make the timer early: its callback would set it again, forever.
        while instant + ahead < handle.when():
            instant = math.nextafter(instant, math.inf)
        self.at(instant, True, self._due, handle)

    def _due(self, handle: asyncio.TimerHandle) -> None:
        if handle in self._timers:
            self._timers.remove(handle)
            self._run(handle)

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            handle._run()
        finally:
            events._set_running_loop(outer)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function now, in this process's context."""
        outer = events._get_running_loop()
        events._set_running_loop(self)
        try:
            return self.context.copy().run(function, *args)
        finally:
            events._set_running_loop(outer)

    def discard_tasks(self) -> None:
        """Close the tasks of dead processes at the end of a simulation, to release resources."""
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)  # a dead process must not log
        for task in self.tasks:
            if not task.done():
                self.run(_close, task.get_coro())
        self.tasks.clear()
        logging.disable(level)


def _close(coroutine: Any) -> None:
    """Close a coroutine. Awaits in its ``finally`` blocks raise instead of waiting."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(LEVELS_MAX):
            try:
                coroutine.close()
            except BaseException:  # it awaited something, or its cleanup failed
                continue
            return


class VirtualWorker(Executor):
    """A thread of a virtual process. Tasks run one after the other and take virtual time."""

    def __init__(self, loop: VirtualLoop, seconds: float = WORK_SECONDS) -> None:
        self._loop = loop
        self._seconds = seconds
        self._free_at = 0.0
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor`."""
        future: Future[Any] = Future()
        self._later(future, partial(copy_context().run, fn, *args, **kwargs))
        return future

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Like `submit`, but return a future that can be awaited in this loop."""
        future = self._loop.create_future()
        self._later(future, partial(copy_context().run, function, *args))
        return future

    def _later(self, future: Future[Any] | asyncio.Future[Any], task: Callable[[], Any]) -> None:
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        clockwork = self._loop.clockwork
        self._free_at = max(clockwork.now, self._free_at) + self._seconds
        self._loop.at(self._free_at, False, self._do, future, task)

    @staticmethod
    def _do(future: Future[Any] | asyncio.Future[Any], task: Callable[[], Any]) -> None:
        if future.cancelled():
            return
        try:
            result = task()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `Executor`: tasks that were submitted before still run."""
        self._closed = True


class VirtualStrand:
    """See `Strand`: each coroutine takes a worker's time plus the time of its awaits."""

    def __init__(self, loop: VirtualLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._last: asyncio.Task[None] | None = None
        self._closed = False

    def submit(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> Future[_T]:
        """See `Strand`."""
        future: Future[_T] = Future()
        self._last = self._loop.create_task(self._do(self._last, work, future))
        return future

    async def _do(
        self,
        before: asyncio.Task[None] | None,
        work: Callable[[], Coroutine[Any, Any, _T]],
        future: Future[_T],
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(self._seconds)
        if self._closed:
            future.cancel()
            return
        try:
            result = await work()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def close(self) -> None:
        """See `Strand`."""
        self._closed = True


class VirtualMonitor:
    """See `Monitor`: no lock is needed, because trainer and background share one loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._changed = loop.create_future()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def notify(self) -> None:
        """See `Monitor`."""
        if not self._changed.done():
            self._changed.set_result(None)

    async def wait(self, seconds: float) -> None:
        """See `Monitor`."""
        if self._changed.done():
            self._changed = self._loop.create_future()
        await asyncio.wait([self._changed], timeout=seconds)


class _Beside:
    def join(self, seconds: float) -> None:
        """Do nothing: it runs in the caller's loop, which cannot wait for it here."""


class VirtualRuntime(Runtime):
    """The `Runtime` of one incarnation of a process."""

    def __init__(self, loop: VirtualLoop, choices: Choices, disk: Disk | None) -> None:
        super().__init__(disk)
        self._loop = loop
        self._choices = choices
        self._random = random.Random(choices.fork("runtime").integer(0, 2**60))

    def now(self) -> float:
        """See `Runtime`."""
        return self._loop.time()

    def wall(self) -> float:
        """See `Runtime`."""
        return EPOCH + self._loop.clockwork.now

    def process_id(self) -> int:
        """See `Runtime`."""
        return self._loop.process.pid

    def unique_id(self) -> str:
        """See `Runtime`."""
        return f"{self._random.getrandbits(128):032x}"

    secret = unique_id

    def random_bytes(self, count: int) -> bytes:
        """See `Runtime`; another incarnation gets other bytes."""
        return self._random.randbytes(count)

    def rng(self) -> random.Random:
        """See `Runtime`."""
        return random.Random(self._random.getrandbits(64))

    def worker(self, name: str) -> Executor:
        """See `Runtime`."""
        return VirtualWorker(self._loop, self._loop.process.seconds_of(name))

    def works_in_place(self, numel: int) -> bool:
        """See `Runtime`: never, because work in a virtual worker takes virtual time."""
        return False

    def strand(self, name: str) -> VirtualStrand:
        """See `Runtime`."""
        return VirtualStrand(self._loop, self._loop.process.seconds_of(name))

    async def outcome(self, future: Future[_T]) -> _T:
        """See `Runtime`."""
        return await asyncio.wrap_future(future)

    def monitor(self) -> VirtualMonitor:
        """See `Runtime`."""
        return VirtualMonitor(self._loop)

    def beside(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> _Beside:
        """See `Runtime`."""
        self._loop.create_task(main())
        return _Beside()

    async def program_ended(self) -> None:
        """See `Runtime`: never."""
        await self._loop.create_future()


class VirtualProcess(Endpoint):
    """A process in which real shells run. Each incarnation has its own event loop.

    Attributes:
        pid: Process id of its present or last incarnation.
        ahead_seconds: How far its clock has jumped ahead of virtual time.
        graves: The loops of all its incarnations.
    """

    def __init__(self, name: str, clockwork: Clockwork, choices: Choices) -> None:
        super().__init__(name)
        self.clockwork = clockwork
        self.choices = choices
        self.disk: Disk | None = None
        self.ahead_seconds = 0.0
        self.loop: VirtualLoop | None = None
        self.graves: list[VirtualLoop] = []
        self.pid = 0

    def new_loop(self) -> VirtualLoop:
        """Create an event loop for its present incarnation."""
        return VirtualLoop(self.clockwork, self, Context())  # type: ignore[abstract]

    def boot(self, main: Callable[[], Coroutine[Any, Any, None]], disk: Disk) -> None:
        """Start a new incarnation with this main task."""
        self.start()
        self.disk = disk
        self.clockwork.processes += 1
        self.pid = self.clockwork.processes
        loop = self.loop = self.new_loop()
        self.graves.append(loop)
        runtime = VirtualRuntime(loop, self.choices.fork(f"life-{self.life}"), disk)
        loop.context.run(CURRENT.set, runtime)
        loop.call_soon(lambda: loop.create_task(main()))

    def seconds_of(self, worker: str) -> float:
        """Return the time that a worker of this name takes for a task."""
        return WORK_SECONDS

    def leap(self, seconds: float) -> None:
        """Let its clock jump ahead, as after a sleep of its machine."""
        self.ahead_seconds += seconds
        if self.loop is not None:
            self.loop.replan_timers()
