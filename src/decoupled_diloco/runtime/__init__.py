"""What a process asks of its surroundings: the time, ids, chance, threads and the disk.

Every shell goes through here, and tasks through asyncio's event loop, so that the same code runs on
the machine's own `Runtime` and on a virtual one, where a whole run with all its failures repeats
exactly from a seed. The runtime belongs to the context, as a running event loop does: a virtual
process's tasks find their own, everybody else finds the real one.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Protocol, Self, TypeVar
from weakref import WeakSet

from decoupled_diloco.runtime.disk import Disk

_T = TypeVar("_T")

PROGRAM_ENDED_SECONDS = 0.2
"""How often it is looked whether the program has ended."""


IN_PLACE_NUMEL = 1 << 16
"""Elements that are encoded or decoded in 0.02 to 0.7 ms, depending on the codec. To hand them to
another thread and back takes two thread switches. Each costs 0.07 ms of CPU time, and a switch
waits for the interpreter lock, which the training thread needs as well."""


class Monitor(Protocol):
    """A lock, and word of changes to what it guards."""

    def __enter__(self) -> object:
        """Takes the lock; whoever has it may take it again."""
        ...

    def __exit__(self, *error: object) -> None:
        """Gives it back."""
        ...

    def notify(self) -> None:
        """Something has changed; called with the lock held."""
        ...

    async def wait(self, seconds: float) -> None:
        """Waits for a change, at most so long; the lock is free meanwhile."""
        ...


class Beside(Protocol):
    """An event loop that runs beside the caller."""

    def join(self, seconds: float) -> None:
        """Waits until it has ended, at most so long."""
        ...


class Strand(Protocol):
    """Coroutines, one after the other, beside the caller."""

    def submit(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> Future[_T]:
        """Runs a coroutine to its end, after those that were given before."""
        ...

    def close(self) -> None:
        """What has not begun never will."""
        ...


class Runtime:
    """The machine's own surroundings; virtual ones override what they replace.

    Attributes:
        disk: How files are changed.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk or Disk()

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the Unix epoch."""
        return time.time()

    def process_id(self) -> int:
        """The number of this process."""
        return os.getpid()

    def unique_id(self) -> str:
        """32 hexadecimal digits that nobody else has."""
        return uuid.uuid4().hex

    def secret(self) -> str:
        """32 hexadecimal digits that nobody can guess."""
        return secrets.token_hex(16)

    def rng(self) -> random.Random:
        """A new source of chance, for jitter."""
        return random.Random()

    def worker(self, name: str) -> Executor:
        """One thread that does what it is given, in order."""
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def works_in_place(self, numel: int) -> bool:
        """Whether tensors of this size are processed in the event loop, not in a worker."""
        return numel <= IN_PLACE_NUMEL

    def strand(self, name: str) -> Strand:
        """One thread that runs coroutines as `blocking` does, in order."""
        return _ThreadStrand(name)

    async def outcome(self, future: Future[_T]) -> _T:
        """What a worker's task comes to; the thread that asks waits for it."""
        return future.result()

    def monitor(self) -> Monitor:
        """A lock for the thread that trains and an event loop beside it."""
        return _ThreadMonitor()

    def beside(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> Beside:
        """Runs an event loop beside the caller, until ``main`` returns."""
        return _LoopThread(main, name)

    async def program_ended(self) -> None:
        """Waits until the program's main thread is gone."""
        while threading.main_thread().is_alive():  # noqa: ASYNC110  # it sets no event
            await asyncio.sleep(PROGRAM_ENDED_SECONDS)


REAL = Runtime()
"""This machine's."""

_RuntimeT = TypeVar("_RuntimeT", bound=Runtime)

CURRENT: ContextVar[Runtime] = ContextVar("runtime", default=REAL)


@contextmanager
def within(surroundings: _RuntimeT) -> Iterator[_RuntimeT]:
    """What runs in this block has these surroundings."""
    token = CURRENT.set(surroundings)
    try:
        yield surroundings
    finally:
        CURRENT.reset(token)


def runtime() -> Runtime:
    """The surroundings of the process whose code is running."""
    return CURRENT.get()


def now() -> float:
    """Seconds of this process's clock, which never goes back."""
    return CURRENT.get().now()


def blocking(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to its end in this thread; what it waits for blocks the thread."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    work.close()
    raise AssertionError("it waits for an event loop, and this thread has none")


class _ThreadStrand:
    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> Future[_T]:
        return self._executor.submit(lambda: blocking(work()))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class _ThreadMonitor:
    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())

    def __enter__(self) -> Self:
        self._condition.acquire()
        return self

    def __exit__(self, *error: object) -> None:
        self._condition.release()

    def notify(self) -> None:
        self._condition.notify_all()

    async def wait(self, seconds: float) -> None:
        self._condition.wait(seconds)  # blocks this thread: see `blocking`


class _LoopThread:
    # No daemon: one that is still at work while the interpreter is taken down would be torn out of
    # the middle of tensor code, which aborts the process.
    def __init__(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        _loop_threads.add(self)
        self._thread = threading.Thread(target=self._run, args=(main,), name=name)
        self._thread.start()

    def _run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            await main()

        _let_others_finish()
        asyncio.run(run())

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def drop_sockets(self) -> None:
        """In a forked child: replaces the sockets of the parent's event loop by `/dev/null`.

        Otherwise the other ends would not notice that the parent died while the child lives. The
        numbers stay in use, so that a socket object that the child collects closes nothing else.
        The selector is not changed, because its kernel object is shared with the parent.
        """
        if self._loop is None or self._loop.is_closed():
            return  # its numbers may be those of other files by now
        inner: Any = self._loop  # asyncio has no public list of a loop's sockets
        open_ones = dict(getattr(inner, "_transports", ()))  # also those that do not read just now
        numbers = {number for number, each in open_ones.items() if each._sock is not None}
        numbers |= set(inner._selector.get_map() or ()) if hasattr(inner, "_selector") else set()
        null = os.open(os.devnull, os.O_RDWR)
        for number in numbers:
            with suppress(OSError):
                os.dup2(null, number, inheritable=False)
        os.close(null)


_loop_threads: WeakSet[_LoopThread] = WeakSet()


def _drop_sockets() -> None:
    for each in tuple(_loop_threads):
        each.drop_sockets()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_sockets)


def _let_others_finish() -> None:
    """This thread and those that it starts take no core from others when they wake up.

    Else, on a busy machine, each message that comes or goes stops the thread that trains.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a sandbox may refuse
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
