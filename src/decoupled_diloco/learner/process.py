"""The process of learners: its signals, its forks, its end, and a second learner in it.

This module has a list of the open learners in this process. Four events use it:

- *A second learner with the same name*, for example from a notebook cell that runs again, takes
  over from the first (`take_over`).
- *SIGTERM*. While there are learners, and if the program has not set a handler, SIGTERM is a
  request to stop: the next `Learner.step` returns ``False``. A signal to the process group also
  ends DataLoader workers. PyTorch's handler for SIGCHLD then raises `RuntimeError` at an arbitrary
  place in the main thread, so `let_workers_end` removes this handler first.
- *A fork*. The child inherits locks that the background thread may hold, so its copies of the
  learners cannot be used. (`runtime` drops the inherited sockets.)
- *The end of the program without `close`* (`Resident._program_ends`).

Learners on virtual machines are not listed, because they share one real process.
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
"""Exit code, as shells report it, of a program that continues to train after SIGTERM."""

SAME_SECONDS = 1.0
"""SIGTERMs within this time count as one: launchers signal the group, and then each process."""


LOADER = "torch.utils.data.dataloader"
"""Name of PyTorch's module that waits for workers; its frames identify the death of a worker."""


class Resident(Protocol):
    """An open learner."""

    @property
    def name(self) -> str:
        """The learner's name in the run."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The syncer's addresses that were passed to the learner."""

    def request_stop(self) -> None:
        """Stop after the next step; called by the signal's handler."""

    def _replaced(self) -> None:
        """Leave the run: another learner with the same name takes over."""

    def _forked(self) -> None:
        """Become unusable: this is the copy in a forked child."""

    def _program_ends(self) -> None:
        """Leave the run: the main thread has ended."""


class _Process:
    def __init__(self) -> None:
        self.open: list[Resident] = []
        self.hooked = False
        self.stop_requested_at: float | None = None


_this = _Process()


def enter(resident: Resident) -> None:
    """Add an open learner to the list, and set the handlers that are needed."""
    if type(runtime()) is not Runtime:
        return
    if not _this.open:
        _this.stop_requested_at = None
    _this.open.append(resident)
    if not _this.hooked:
        _this.hooked = True
        os.register_at_fork(after_in_child=_forked)
        # Must run before executors and threads end, as a last flush needs them. `atexit` is later.
        getattr(threading, "_register_atexit", atexit.register)(_program_ends)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _signalled)


def leave(resident: Resident) -> None:
    """Remove a closed learner from the list."""
    if resident in _this.open:
        _this.open.remove(resident)
    in_main = threading.current_thread() is threading.main_thread()
    if not _this.open and in_main and signal.getsignal(signal.SIGTERM) is _signalled:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def take_over(name: str, addresses: tuple[str, ...]) -> None:
    """Close an open learner with this name and one of these addresses, if there is one."""
    if type(runtime()) is not Runtime:
        return
    for each in tuple(_this.open):
        if each.name == name and not set(addresses).isdisjoint(each.addresses):
            each._replaced()


this_thread = threading.get_ident
"""The identifier of the calling thread."""


def is_main(thread: int | None) -> bool:
    """Return whether an identifier from `this_thread` belongs to the program's main thread."""
    return thread == threading.main_thread().ident


def asked_to_stop() -> bool:
    """Return whether SIGTERM has arrived since the first of the open learners joined."""
    return _this.stop_requested_at is not None


def let_workers_end() -> None:
    """Let DataLoader workers end from now on without an exception in the main thread."""
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and threading.current_thread() is threading.main_thread():
        # Not SIG_DFL: Python reports a signal that arrived before the change as an error.
        signal.signal(signal.SIGCHLD, lambda *_: None)


@contextlib.contextmanager
def workers_may_end() -> Iterator[None]:
    """Let DataLoader workers end in the block without an exception in the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGCHLD) if in_main else None
    let_workers_end()
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGCHLD, before)


def is_death_of_worker(error: BaseException) -> bool:
    """Return whether PyTorch raised an error because a DataLoader's worker has ended.

    Such an error is a `RuntimeError`, or an error of the connection by which the worker passes
    tensors.
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
    if _this.stop_requested_at is not None:
        if now() - _this.stop_requested_at < SAME_SECONDS:
            return
        raise KeyboardInterrupt
    _this.stop_requested_at = now()
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
