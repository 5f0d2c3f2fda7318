"""Handle SIGTERM and Ctrl-C. Handlers must exist before torch is imported, so this imports fast."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from decoupled_diloco.learner.process import let_workers_end
from decoupled_diloco.runtime import now

INTERRUPTED = 130
"""The exit code of a process that was asked to stop."""


SAME_SECONDS = 1.0
"""SIGTERMs within this time count as one."""

TO_ALL = frozenset((signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT))
"""Signals that a process cannot handle, and so cannot forward to its children."""


def send_to_all_of(pid: int, number: int) -> None:
    """Send a signal to a process, or to the group that it leads for a signal in `TO_ALL`.

    If the process is gone, nothing happens.
    """
    # A process that was forked just now may not lead a group yet: then signal it alone.
    send = [os.killpg, os.kill] if number in TO_ALL else [os.kill]
    for each in send:
        with contextlib.suppress(ProcessLookupError):
            each(pid, number)
            return


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Install a handler for these signals for the duration of the block."""
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal as Ctrl-C: raise `KeyboardInterrupt`."""
    raise KeyboardInterrupt


class Termination:
    """Whether this process was asked to stop.

    Attributes:
        asked: Whether it was asked to stop after training has started.
    """

    def __init__(self) -> None:
        self.asked = False
        self._begun = False
        self._stop_waiting: Callable[[], None] = lambda: None

    def at_boundary(self, stop_waiting: Callable[[], None] = lambda: None) -> None:
        """Note that training starts: from now on a stop needs a flush first.

        Args:
            stop_waiting: Ends a wait of the training loop; called when the process is asked to
                stop.
        """
        self._stop_waiting = stop_waiting
        self._begun = True

    def request_stop(self) -> bool:
        """Ask the process to stop; return ``False`` if it has nothing to flush and may end now."""
        if not self._begun:
            return False
        self.asked = True
        self._stop_waiting()
        return True


class SignalledTermination(Termination):
    """Handles SIGTERM and SIGINT of this process from now on.

    Before the first call of `at_boundary` there is nothing to flush: a signal ends the process at
    once with exit code `INTERRUPTED`. Afterwards the first signal asks the process to stop, and a
    second one raises `KeyboardInterrupt`. A SIGTERM shortly after the first signal is ignored:
    Slurm sends one to every process of a job, and parents forward theirs to their children.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asked_at = 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, frame: object) -> None:
        if self.asked:
            if number == signal.SIGTERM and now() - self._asked_at < SAME_SECONDS:
                return
            raise KeyboardInterrupt
        self._asked_at = now()
        if not self.request_stop():
            os._exit(INTERRUPTED)
        let_workers_end()
