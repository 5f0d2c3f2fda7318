"""What the three virtual processes have in common: a machine, its effects, its timer, a tape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol.events import Tick
from decoupled_diloco.simulate.network import Connection, Endpoint

if TYPE_CHECKING:
    from decoupled_diloco.simulate.world import World

REDIAL_SECONDS = (0.3, 1.5)
"""Backoff before a process dials again."""


class Shell(Endpoint):
    """Drives one machine: facts in, orders carried out, woken at its deadline."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(name)
        self.world = world
        self.choices = world.choices.fork(name)
        self.recorders = world.recorders
        self.machine: Any = None
        self.coordinator_link: Connection | None = None
        self.ahead_seconds = 0.0
        self._tick_at: float | None = None

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return self.world.clockwork.now

    @property
    def clock(self) -> float:
        """What this process's own clock shows, seconds: it may have leapt ahead."""
        return self.world.clockwork.now + self.ahead_seconds

    def instant_of(self, deadline: float) -> float:
        """When this process's own clock has reached a deadline, in virtual time."""
        instant = deadline - self.ahead_seconds
        rounded_off = instant + self.ahead_seconds < deadline
        return instant + math.ulp(deadline) if rounded_off else instant

    def leap(self, seconds: float) -> None:
        """The process's clock leaps ahead, as after a sleep of its machine."""
        self.ahead_seconds += seconds
        if self.machine is not None:
            self._tick_at = None
            self._plan_tick(False)

    def begin(self) -> None:
        """A new life: an empty process."""
        self.start()
        self.machine = None
        self.coordinator_link = None
        self._tick_at = None
        self.data_sent = self.data_received = 0
        self.world.began(self)

    def end(self, *, silent: bool = False, killed: bool = False) -> None:
        """The process is gone, and what it had in memory."""
        if self.alive:
            self.world.ended(self, killed=killed)
            self.crash()
            self.world.network.crashed(self, silent=silent)

    def _record(self, event: Any, effects: Sequence[Any]) -> None:
        for recorder in self.recorders:
            recorder(self.name, self.clock, event, effects)

    def later(self, seconds: float, function: Any, *arguments: Any) -> None:
        """A timer of this life."""
        self.world.clockwork.timer(self, self.now + seconds, function, *arguments)

    def tell(self, event: Any) -> None:
        """One fact for the machine, and everything that follows."""
        if self.machine is None:
            return
        if self.world.swaps:
            self.machine = self.reborn()
        world, life, machine = self.world, self.life, self.machine
        effects = machine.handle(self.clock, event)
        world.events += 1
        if self.recorders:
            self._record(event, effects)
        if world.checks:
            machine.check()
        for effect in effects:
            if self.alive and self.life == life and self.machine is machine:
                self.carry_out(effect)
        if self.alive and self.life == life and self.machine is machine:
            self.after(event)
            self._plan_tick(isinstance(event, Tick))

    def reborn(self) -> Any:
        """Another machine with the same state; only where that is the whole of it."""
        return self.machine

    def carry_out(self, effect: Any) -> None:
        """Carries one order out."""
        raise NotImplementedError

    def after(self, event: Any) -> None:
        """Whatever the shell does of itself after an event."""

    # ---- waking

    def _plan_tick(self, ticked: bool) -> None:
        deadline = self.machine.deadline()
        if deadline is not None:
            deadline = self.instant_of(deadline)
            assert not ticked or deadline > self.now, "a tick does not move the deadline on"
            if self._tick_at is None or deadline < self._tick_at:
                self._tick_at = deadline
                late = self.choices.uniform(0.0, 0.01) if self.choices.chance(0.3) else 0.0
                self.world.clockwork.timer(self, deadline + late, self._wake, deadline)
        if self.world.spurious_ticks and self.choices.chance(self.world.spurious_ticks):
            self.later(self.choices.exponential(0.2), self._spurious)

    def _wake(self, planned: float) -> None:
        if self._tick_at != planned or self.machine is None:
            return
        self._tick_at = None
        deadline = self.machine.deadline()
        if deadline is not None and deadline > self.clock:
            self._plan_tick(False)
        else:
            self.tell(Tick())

    def _spurious(self) -> None:
        self.tell(Tick())

    # ---- the coordinator

    def dial_coordinator(self) -> None:
        """Connects to the coordinator, and again when that fails or breaks."""
        self.world.network.dial(
            self, self.world.coordinator, self._coordinator_open, self._coordinator_failed
        )

    def _coordinator_failed(self) -> None:
        self.later(self.choices.uniform(*REDIAL_SECONDS), self.dial_coordinator)

    def _coordinator_open(self, connection: Connection) -> None:
        if not connection.open[self.name]:
            self._coordinator_failed()
            return
        self.coordinator_link = connection
        self.coordinator_reached(connection)

    def coordinator_reached(self, connection: Connection) -> None:
        """The first message on a new connection to the coordinator."""

    def coordinator_lost(self) -> None:
        """The connection to the coordinator is gone: dial again."""
        self.coordinator_link = None
        self._coordinator_failed()
