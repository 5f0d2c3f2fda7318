"""Base class of virtual runs: time and network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.clockwork import Clockwork
from decoupled_diloco_lab.simulate.virtual_network import Endpoint, Network

Recorder = Callable[[str, float, Any, Sequence[Any]], None]
"""Called as ``recorder(name, now, event, effects)`` for every event that a machine has handled."""


class Stage:
    """The time and the network of a virtual run.

    Args:
        seed: Determines every random choice.

    Attributes:
        events: Number of events that state machines have handled.
        error: The first violated invariant or unexpected error, if any.
    """

    def __init__(self, seed: int | str) -> None:
        self.choices = Choices(seed)
        self.clockwork = Clockwork()
        self.network = Network(self.clockwork, self.choices.fork("network"))
        self.events = 0
        self.error: BaseException | None = None

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self.clockwork.now

    def pause(self, host: Endpoint) -> None:
        """Pause a process, like SIGSTOP."""
        if host.alive and not host.paused:
            host.paused = True
            self.network.paused(host)

    def resume(self, host: Endpoint) -> None:
        """Continue a process, like SIGCONT."""
        host.wake()

    def cut(self, a: Endpoint, b: Endpoint, *, back: bool = True) -> None:
        """Cut the direction from ``a`` to ``b`` and, if ``back``, the other direction, too."""
        self.network.cut(a, b, back=back)

    def heal(self, a: Endpoint, b: Endpoint, *, back: bool = True) -> None:
        """Heal the direction from ``a`` to ``b`` and, if ``back``, the other direction, too."""
        self.network.heal(a, b, back=back)

    def break_connections(self, a: Endpoint, b: Endpoint) -> None:
        """Break all connections between two processes and lose the traffic in flight."""
        self.network.reset(a, b)

    def run(
        self,
        *,
        until: float | None = None,
        events: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> str:
        """Let time pass until one of the limits is reached.

        Args:
            until: Virtual instant, in seconds.
            events: Total number of events that state machines have handled.
            stop: Checked before each callback.

        Returns:
            Why it stopped: ``"until"``, ``"events"``, ``"stop"`` or ``"nothing left"``.

        Raises:
            AssertionError: An invariant is violated.
        """
        clockwork = self.clockwork
        while not stop():
            if events is not None and self.events >= events:
                return "events"
            instant = clockwork.next
            if instant is None:
                return "nothing left"
            if until is not None and instant > until:
                clockwork.now = max(clockwork.now, until)
                return "until"
            clockwork.step()
            if self.error is not None:
                raise self.error
        return "stop"
