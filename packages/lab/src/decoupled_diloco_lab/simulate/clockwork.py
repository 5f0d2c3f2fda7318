"""Virtual time: one queue of callbacks, and processes that can crash, restart and pause."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Process:
    """A virtual process. Callbacks of an earlier incarnation never run in a later one.

    While it is paused (SIGSTOP), arrivals and due timers wait. When it wakes, arrivals run first,
    in order, as a real event loop drains its sockets. Then the timers run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = 0
        self.alive = False
        self.paused = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timers: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def start(self) -> None:
        """Start a new incarnation."""
        assert not self.alive
        self.life += 1
        self.alive, self.paused = True, False

    def crash(self) -> None:
        """End this incarnation and drop all pending callbacks."""
        self.alive = self.paused = False
        self._waiting.clear()
        self._timers.clear()

    def wake(self) -> None:
        """Run everything that has waited: arrivals first, then timers."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        waiting, self._waiting = self._waiting + self._timers, []
        self._timers = []
        life = self.life
        for function, arguments in waiting:
            # An earlier callback may have crashed or even restarted this process.
            if self.alive and self.life == life:
                function(*arguments)

    def run(
        self, life: int, timer: bool, function: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        """Run a callback now, keep it while paused, or drop it if its incarnation has ended."""
        if not self.alive or life != self.life:
            return
        if self.paused:
            (self._timers if timer else self._waiting).append((function, arguments))
            return
        function(*arguments)


class Clockwork:
    """The queue of callbacks. Those of the same instant run in the order of planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self.processes = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def at(self, instant: float, function: Callable[..., None], *arguments: Any) -> None:
        """Plan a callback that belongs to no process."""
        self._planned += 1
        if instant < self.now:
            instant = self.now
        # The counter makes entries unique, so that heapq never compares functions.
        heapq.heappush(self._queue, (instant, self._planned, function, arguments))

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Plan a callback that belongs to no process, some seconds from now."""
        self.at(self.now + seconds, function, *arguments)

    def arrive(
        self, process: Process, instant: float, function: Callable[..., None], *arguments: Any
    ) -> None:
        """Plan an arrival at a process, for its present incarnation."""
        self.at(instant, process.run, process.life, False, function, arguments)

    def timer(
        self, process: Process, instant: float, function: Callable[..., None], *arguments: Any
    ) -> None:
        """Plan a timer of a process, for its present incarnation."""
        self._planned += 1
        callback = (process.life, True, function, arguments)
        instant = instant if instant > self.now else self.now
        heapq.heappush(self._queue, (instant, self._planned, process.run, callback))

    @property
    def next(self) -> float | None:
        """The instant of the next callback, or ``None`` if none is planned."""
        return self._queue[0][0] if self._queue else None

    def step(self) -> None:
        """Advance time to the next callback and run it."""
        self.now, _, function, arguments = heapq.heappop(self._queue)
        function(*arguments)
