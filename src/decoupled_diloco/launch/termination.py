"""A learner process that is told to go: at once while it begins, at a step boundary once it trains.

Light to import: the handler must be there before torch is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

INTERRUPTED = 130
"""The exit code of a process that was told to go."""


class Termination:
    """SIGTERM and SIGINT of this process, from now on.

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
