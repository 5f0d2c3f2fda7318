"""What SIGTERM and Ctrl-C do; light to import, since handlers must be there before torch is."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130
"""The exit code of a process that was told to go."""


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
    """SIGTERM and SIGINT of a learner process: it goes, once it trains at a step boundary.

    Until `at_boundary` is called for the first time there is nothing to hand in, and the process
    ends at once, by its exit code. Then the first signal only asks; the second interrupts whatever
    goes on.
    """

    def __init__(self) -> None:
        self.asked = False
        self._begun = False
        self._stop_waiting: Callable[[], None] = lambda: None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told)

    def at_boundary(self, stop_waiting: Callable[[], None] = lambda: None) -> None:
        """Training begins: from here on there may be something to hand in.

        Args:
            stop_waiting: Ends a wait of the training loop; called by the handler.
        """
        self._stop_waiting = stop_waiting
        self._begun = True

    def _told(self, number: int, frame: object) -> None:
        if not self._begun:
            os._exit(INTERRUPTED)
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._stop_waiting()
