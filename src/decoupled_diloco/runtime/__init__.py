"""The runtime: a process's access to time, ids, randomness, threads and the disk.

All shells use this module, and asyncio's event loop for tasks. So the same code runs on the real
`Runtime` and on a virtual one, where a whole run with all its failures repeats exactly from a seed.
The runtime is a context variable, similar to the running event loop: the tasks of a virtual process
get their own runtime, and all other code gets the real one.
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
"""Interval at which the runtime checks whether the program has ended."""


IN_PLACE_NUMEL = 1 << 16
"""Number of elements up to which the event loop processes a tensor itself. Encoding or decoding so
many takes 0.02 to 0.7 ms, depending on the codec. A worker thread would need two thread switches.
Each costs 0.07 ms of CPU time and waits for the interpreter lock, which the training thread also
needs."""


class Monitor(Protocol):
    """A reentrant lock with notifications of changes to the state that it guards."""

    def __enter__(self) -> object:
        """Acquire the lock; the thread that holds it may acquire it again."""
        ...

    def __exit__(self, *error: object) -> None:
        """Release the lock."""
        ...

    def notify(self) -> None:
        """Notify waiters of a change; the caller must hold the lock."""
        ...

    async def wait(self, seconds: float) -> None:
        """Wait for a change, at most ``seconds``; the lock is released during the wait."""
        ...


class Beside(Protocol):
    """An event loop that runs in the background of the caller."""

    def join(self, seconds: float) -> None:
        """Wait until it has ended, at most ``seconds``."""
        ...


class Strand(Protocol):
    """A background thread that runs coroutines one after the other."""

    def submit(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> Future[_T]:
        """Run a coroutine to its end, after those submitted before."""
        ...

    def close(self) -> None:
        """Cancel the coroutines that have not started."""
        ...


class Runtime:
    """The runtime of the real machine; virtual runtimes override its methods.

    Attributes:
        disk: The operations on files.
    """

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = disk or Disk()

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""
        return time.monotonic()

    def wall(self) -> float:
        """Return the seconds since the Unix epoch."""
        return time.time()

    def process_id(self) -> int:
        return os.getpid()

    def unique_id(self) -> str:
        """Return a globally unique id of 32 hexadecimal digits."""
        return uuid.uuid4().hex

    def secret(self) -> str:
        """Return an unpredictable secret of 32 hexadecimal digits."""
        return secrets.token_hex(16)

    def random_bytes(self, count: int) -> bytes:
        """Return unpredictable random bytes; no two calls return the same ones."""
        return os.urandom(count)

    def rng(self) -> random.Random:
        """Return a new random number generator, for jitter."""
        return random.Random()

    def worker(self, name: str) -> Executor:
        """Return an executor with one thread, which runs tasks in order."""
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def works_in_place(self, numel: int) -> bool:
        """Return whether the event loop processes tensors of this size itself."""
        return numel <= IN_PLACE_NUMEL

    def strand(self, name: str) -> Strand:
        """Return a thread that runs coroutines in order, as `blocking` does."""
        return _ThreadStrand(name)

    async def outcome(self, future: Future[_T]) -> _T:
        """Return the result of a worker's task; blocks the calling thread."""
        return future.result()

    def monitor(self) -> Monitor:
        """Return a monitor for the training thread and its background event loop."""
        return _ThreadMonitor()

    def beside(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> Beside:
        """Run an event loop in the background until ``main`` returns."""
        return _LoopThread(main, name)

    async def program_ended(self) -> None:
        """Wait until the program's main thread has ended."""
        while threading.main_thread().is_alive():  # noqa: ASYNC110  # it sets no event
            await asyncio.sleep(PROGRAM_ENDED_SECONDS)


REAL = Runtime()
"""The runtime of this machine."""

_RuntimeT = TypeVar("_RuntimeT", bound=Runtime)

CURRENT: ContextVar[Runtime] = ContextVar("runtime", default=REAL)


@contextmanager
def within(active: _RuntimeT) -> Iterator[_RuntimeT]:
    """Use a runtime for the code that runs in a ``with`` block."""
    token = CURRENT.set(active)
    try:
        yield active
    finally:
        CURRENT.reset(token)


def runtime() -> Runtime:
    """Return the runtime of the process whose code is running."""
    return CURRENT.get()


def now() -> float:
    """Return the seconds of this process's monotonic clock."""
    return CURRENT.get().now()


def blocking(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end in this thread, without an event loop.

    Each wait in the coroutine must block the thread itself, as `_ThreadMonitor.wait` does.

    Raises:
        AssertionError: The coroutine waits for an event loop.
    """
    try:
        work.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    work.close()
    raise AssertionError("the coroutine waits for an event loop, but this thread has none")


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
    # Not a daemon thread: the interpreter would kill one at shutdown in the middle of tensor code,
    # which aborts the process.
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
        """In a forked child, replace the sockets of the parent's event loop by `/dev/null`.

        Otherwise the peers would not notice the parent's death while the child lives. The file
        descriptors stay in use, so that a socket object that the child collects closes no other
        file. The selector is unchanged, because its kernel object is shared with the parent.
        """
        if self._loop is None or self._loop.is_closed():
            return  # other files may have reused its descriptors
        inner: Any = self._loop  # asyncio has no public list of a loop's sockets
        open_ones = dict(getattr(inner, "_transports", ()))  # includes those that do not read now
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
    """Prevent this thread and those that it starts from preempting others when they wake up.

    Otherwise, on a busy machine, each message interrupts the training thread.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
