"""What virtual processes and bare machines have in common: their time and their network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.clockwork import Clockwork
from decoupled_diloco.simulate.network import Endpoint, Network

Recorder = Callable[[str, float, Any, Sequence[Any]], None]
"""Called as ``recorder(who, now, event, effects)`` for every event that a machine has handled."""


class Stage:
    """Where a virtual run takes place.

    Args:
        seed: Every random choice follows from it.

    Attributes:
        events: How many events machines have handled.
        error: What does not hold, once something does not.
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
        """SIGSTOP."""
        if host.alive and not host.paused:
            host.paused = True
            self.network.paused(host)

    def resume(self, host: Endpoint) -> None:
        """SIGCONT."""
        host.wake()

    def cut(self, a: Endpoint, b: Endpoint, *, back: bool = True) -> None:
        """Nothing passes from one process to another, nor, if ``back``, the other way."""
        self.network.cut(a, b, back=back)

    def heal(self, a: Endpoint, b: Endpoint, *, back: bool = True) -> None:
        """The one process hears the other again, and, if ``back``, the other the one."""
        self.network.heal(a, b, back=back)

    def break_connections(self, a: Endpoint, b: Endpoint) -> None:
        """Connections between the two are lost with what is under way."""
        self.network.reset(a, b)

    def run(
        self,
        *,
        until: float | None = None,
        events: int | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> str:
        """Lets time pass until one of the limits is reached.

        Args:
            until: Virtual instant, seconds.
            events: Number of events that machines have handled, all in all.
            stop: Looked at before everything that happens.

        Returns:
            Why it stopped: ``"until"``, ``"events"``, ``"stop"`` or ``"nothing left"``.

        Raises:
            AssertionError: Something does not hold.
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
