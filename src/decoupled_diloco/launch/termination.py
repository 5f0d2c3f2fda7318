"""What SIGTERM and Ctrl-C do; light to import, since handlers must be there before torch is."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from decoupled_diloco.learner.process import let_workers_end
from decoupled_diloco.runtime import now

INTERRUPTED = 130
"""The exit code of a process that was told to go."""


SAME_SECONDS = 1.0
"""SIGTERMs that are no further apart are one."""

TO_ALL = frozenset((signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT))
"""What no process can pass on to those that it has started."""


def send_to_all_of(pid: int, number: int) -> None:
    """Sends a signal to a process, and one of `TO_ALL` to its group, which it leads.

    Nothing happens if it is gone; one that was forked just now may lead no group yet.
    """
    send = [os.killpg, os.kill] if number in TO_ALL else [os.kill]
    for each in send:
        with contextlib.suppress(ProcessLookupError):
            each(pid, number)
            return


@contextlib.contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Has a handler for these signals as long as the block lasts."""
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in before:
            signal.signal(number, earlier)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler by which a signal ends a command as Ctrl-C does."""
    raise KeyboardInterrupt


class Termination:
    """Whether a process was told to go."""

    def __init__(self) -> None:
        self.asked = False
        self._begun = False
        self._stop_waiting: Callable[[], None] = lambda: None

    def at_boundary(self, stop_waiting: Callable[[], None] = lambda: None) -> None:
        """Training begins: from here on there may be something to hand in.

        ``stop_waiting`` ends a wait of the training loop; called by who tells it to go.
        """
        self._stop_waiting = stop_waiting
        self._begun = True

    def told(self) -> bool:
        """It is told to go; ``False``: there is nothing to hand in yet, and it ends at once."""
        if not self._begun:
            return False
        self.asked = True
        self._stop_waiting()
        return True


class SignalledTermination(Termination):
    """SIGTERM and SIGINT of this process, from now on.

    Until `at_boundary` is called for the first time there is nothing to hand in, and the process
    ends at once, by its exit code. Then the first signal only asks; the second interrupts whatever
    goes on, unless it is a SIGTERM that comes with the first: Slurm sends one to every process of a
    job, and those among them that have children pass it on.
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
        if not self.told():
            os._exit(INTERRUPTED)
        let_workers_end()
