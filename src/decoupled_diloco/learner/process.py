"""The process of learners: its signals, its forks, its end, and a second learner in it.

This module lists the learners of this process that are not closed. Four things use it:

- *A second learner with the same name*, as in a notebook's cell that runs again, takes over from
  the first (`take_over`).
- *SIGTERM*. While there are learners, and if the program has no handler of its own, SIGTERM is a
  request to stop: the next `Learner.step` returns ``False``. A signal to the process group also
  ends DataLoader workers. PyTorch's handler for SIGCHLD then raises `RuntimeError` in the main
  thread, wherever that is, so `let_workers_end` removes this handler first.
- *A fork*. The child inherits locks that the background thread may hold, so its copies of the
  learners refuse to be used. (`runtime` drops the inherited sockets.)
- *The end of the program without `close`* (`Resident._program_ends`).

Learners on virtual machines are not listed: they share one real process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Protocol

from decoupled_diloco.runtime import Runtime, now, runtime

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code, as shells report it, of a program that trains on after SIGTERM."""

SAME_SECONDS = 1.0
"""SIGTERMs closer together count as one: launchers signal the group, and then each process."""


LOADER = "torch.utils.data.dataloader"


class Resident(Protocol):
    """An open learner."""

    @property
    def name(self) -> str:
        """Its name in the run."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The syncer's addresses that it was given."""

    def request_stop(self) -> None:
        """The process is asked to stop; called by the signal's handler."""

    def _replaced(self) -> None:
        """Another learner with the same name takes over."""

    def _forked(self) -> None:
        """This is the copy in a forked child."""

    def _program_ends(self) -> None:
        """The main thread has ended."""


class _Process:
    def __init__(self) -> None:
        self.open: list[Resident] = []
        self.hooked = False
        self.asked_at: float | None = None


_this = _Process()


def enter(resident: Resident) -> None:
    """A learner is open."""
    if type(runtime()) is not Runtime:
        return
    if not _this.open:
        _this.asked_at = None
    _this.open.append(resident)
    if not _this.hooked:
        _this.hooked = True
        os.register_at_fork(after_in_child=_forked)
        # Before executors and threads end, since a last flush needs them; `atexit` comes later.
        getattr(threading, "_register_atexit", atexit.register)(_program_ends)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _signalled)


def leave(resident: Resident) -> None:
    """It is closed."""
    if resident in _this.open:
        _this.open.remove(resident)
    in_main = threading.current_thread() is threading.main_thread()
    if not _this.open and in_main and signal.getsignal(signal.SIGTERM) is _signalled:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def take_over(name: str, addresses: tuple[str, ...]) -> None:
    """Closes an open learner with this name and one of these addresses, if there is one."""
    if type(runtime()) is not Runtime:
        return
    for each in tuple(_this.open):
        if each.name == name and not set(addresses).isdisjoint(each.addresses):
            each._replaced()


this_thread = threading.get_ident
"""The identifier of the calling thread."""


def is_main(thread: int | None) -> bool:
    """Whether an identifier from `this_thread` belongs to the program's main thread."""
    return thread == threading.main_thread().ident


def asked_to_stop() -> bool:
    """Whether SIGTERM has come since the first of the open learners joined."""
    return _this.asked_at is not None


def let_workers_end() -> None:
    """DataLoader workers may end from now on without an exception in the main thread."""
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextlib.contextmanager
def workers_may_end() -> Iterator[None]:
    """Within the block, DataLoader workers may end without an exception in the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if in_main else None
    let_workers_end()
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGCHLD, before)


def is_death_of_worker(error: BaseException) -> bool:
    """Whether an error is what PyTorch raises when a DataLoader's worker has ended.

    That is a `RuntimeError`, or an error of the connection by which the worker passes tensors.
    """
    if not isinstance(error, RuntimeError | OSError | EOFError):
        return False
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    inside = any(frame.f_globals.get("__name__") == LOADER for frame in frames)
    return inside or "DataLoader worker" in str(error)


def _signalled(number: int, frame: FrameType | None) -> None:
    if not _this.open:  # the last learner was closed by another thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        return
    if _this.asked_at is not None:
        if now() - _this.asked_at < SAME_SECONDS:
            return
        raise KeyboardInterrupt
    _this.asked_at = now()
    let_workers_end()
    for each in tuple(_this.open):
        each.request_stop()


def _forked() -> None:
    for each in _this.open:
        each._forked()
    _this.open.clear()
    if signal.getsignal(signal.SIGTERM) is _signalled:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _program_ends() -> None:
    for each in tuple(_this.open):
        each._program_ends()
