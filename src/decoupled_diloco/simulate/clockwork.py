"""Virtual time: one queue of callbacks, and processes that can crash, restart and be paused."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Process:
    """A process of the virtual world: callbacks of an earlier life never run in a later one.

    While paused (SIGSTOP) whatever arrives waits; on waking it is drained in order, as a real
    event loop drains its sockets, before timers that fell due meanwhile.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = 0
        self.alive = False
        self.paused = False
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._timers: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def start(self) -> None:
        """A new life begins."""
        assert not self.alive
        self.life += 1
        self.alive, self.paused = True, False

    def crash(self) -> None:
        """Everything in memory is gone."""
        self.alive = self.paused = False
        self._waiting.clear()
        self._timers.clear()

    def wake(self) -> None:
        """Runs what has waited: arrivals first, then timers."""
        if not self.alive or not self.paused:
            return
        self.paused = False
        waiting, self._waiting = self._waiting + self._timers, []
        self._timers = []
        life = self.life
        for function, arguments in waiting:
            if self.alive and self.life == life:
                function(*arguments)

    def run(
        self, life: int, timer: bool, function: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        """Runs a callback now, keeps it while paused, drops it if its life is over."""
        if not self.alive or life != self.life:
            return
        if self.paused:
            (self._timers if timer else self._waiting).append((function, arguments))
            return
        function(*arguments)


class Clockwork:
    """The queue. Callbacks of the same instant run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self.processes = 0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def at(self, instant: float, function: Callable[..., None], *arguments: Any) -> None:
        """Plans a callback of the world itself."""
        self._planned += 1
        if instant < self.now:
            instant = self.now
        heapq.heappush(self._queue, (instant, self._planned, function, arguments))

    def after(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Plans a callback of the world itself, some seconds from now."""
        self.at(self.now + seconds, function, *arguments)

    def arrive(
        self, process: Process, instant: float, function: Callable[..., None], *arguments: Any
    ) -> None:
        """Plans a callback in this life of a process: something reaches it."""
        self.at(instant, process.run, process.life, False, function, arguments)

    def timer(
        self, process: Process, instant: float, function: Callable[..., None], *arguments: Any
    ) -> None:
        """Plans a callback in this life of a process that its own clock brings about."""
        self._planned += 1
        callback = (process.life, True, function, arguments)
        instant = instant if instant > self.now else self.now
        heapq.heappush(self._queue, (instant, self._planned, process.run, callback))

    @property
    def next(self) -> float | None:
        """When something happens next; ``None``: never."""
        return self._queue[0][0] if self._queue else None

    def step(self) -> None:
        """Lets the next thing happen."""
        self.now, _, function, arguments = heapq.heappop(self._queue)
        function(*arguments)
