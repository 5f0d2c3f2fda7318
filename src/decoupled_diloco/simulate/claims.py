"""The claims of a virtual shard: a storage that is slow, fails and is out of reach.

The storage shows a claim to everybody once it is made, and makes each number once; that is all that
is asked of a real one. The lease is the shell around the `ShardLeaseMachine` of one process, as
`decoupled_diloco.syncer.shard_lease` is that of a real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from decoupled_diloco.protocol import shard_lease
from decoupled_diloco.protocol.events import Tick
from decoupled_diloco.protocol.shard_lease import (
    LeaseAnswer,
    LeaseEvent,
    LeaseOrder,
    NewestLease,
    ShardLeaseMachine,
)
from decoupled_diloco.simulate.choices import Choices

if TYPE_CHECKING:
    from decoupled_diloco.simulate.shard_process import ShardProcess

Verdict = Literal["ours", "unknown", "over"]

HANG_SECONDS = 0.5
"""How often an order that hangs is tried again."""


@dataclass(frozen=True, slots=True)
class Standbys:
    """Each shard has a second process that can act for it.

    Attributes:
        lease_seconds: how long a claim outlives its last renewal.
        storage_seconds: the longest that the storage of the claims takes, one way.
        storage_fails: probability that an order to it fails, before or after it was carried out.
    """

    lease_seconds: float = 5.0
    storage_seconds: float = 0.01
    storage_fails: float = 0.0


class VirtualClaims:
    """The claims of one shard, as the storage that its processes share has them."""

    def __init__(self, settings: Standbys, choices: Choices) -> None:
        self.settings = settings
        self.choices = choices
        self.nonces: list[str] = []
        self._beside: dict[int, tuple[int, shard_lease.Condition]] = {}

    @property
    def newest(self) -> int:
        """The number of the newest claim; 0: there is none."""
        return len(self.nonces)

    def delay(self) -> float:
        """One way to the storage or back, seconds."""
        return self.choices.uniform(0.0, self.settings.storage_seconds)

    def carry_out(self, order: LeaseOrder, nonce: str) -> LeaseAnswer | None:
        """What the storage does, and says; ``None``: nobody waits for an answer."""
        match order:
            case shard_lease.Look():
                return shard_lease.Looked(self._standing())
            case shard_lease.Acquire(number):
                if number <= self.newest:
                    return shard_lease.NotAcquired(number, "another process was faster")
                self.nonces.append(nonce)
                return shard_lease.Acquired(number)
            case shard_lease.Renew(number, renewals):
                self._beside[number] = (renewals, "held")
                return shard_lease.Renewed(renewals, self.newest)
            case shard_lease.GiveBack(number, finished):
                renewals, _ = self._beside.get(number, (0, "held"))
                self._beside[number] = (renewals, "finished" if finished else "released")
                return None

    def _standing(self) -> NewestLease:
        if not self.nonces:
            return NewestLease(0, "", 0, 0.0, "held")
        renewals, condition = self._beside.get(self.newest, (0, "held"))
        return NewestLease(
            self.newest, self.nonces[-1], renewals, self.settings.lease_seconds, condition
        )


class VirtualTenure:
    """One life's claim to its shard."""

    def __init__(self, process: ShardProcess, claims: VirtualClaims, *, waits: bool) -> None:
        self.process = process
        self.claims = claims
        self.life = process.life
        nonce = f"{process.name}-{process.life}"
        self.machine = ShardLeaseMachine(nonce, claims.settings.lease_seconds, waits=waits)
        self.number = 0
        self._plans = 0

    def begin(self) -> None:
        """Waits for the claim."""
        self._handle(Tick())

    def holds(self) -> bool:
        """Whether this process may act at this instant, by its own clock."""
        return self.machine.holds(self.process.clock)

    def confirm(self) -> Verdict:
        """Whether the claim is still the newest, as far as the storage can be asked."""
        if self.process.storage_gone:
            return "unknown"
        return "ours" if self.claims.newest == self.number and self.holds() else "over"

    def leave(self, *, finished: bool) -> None:
        """Gives the claim back, so that nobody waits for it to run out."""
        self._handle(shard_lease.HolderLeaves(finished))

    def leapt(self) -> None:
        """The process's clock has leapt ahead."""
        self._plan()

    # ---- telling the machine

    def _handle(self, event: LeaseEvent) -> None:
        process, world = self.process, self.process.world
        effects = self.machine.handle(process.clock, event)
        world.events += 1
        for recorder in process.recorders:
            recorder(f"{process.name}.claims", process.clock, event, effects)
        self.machine.check()
        for effect in effects:
            self._do(effect)
        self._plan()

    def _do(self, effect: Any) -> None:
        match effect:
            case (
                shard_lease.Look()
                | shard_lease.Acquire()
                | shard_lease.Renew()
                | shard_lease.GiveBack()
            ):
                fails = self.claims.choices.chance(self.claims.settings.storage_fails)
                clockwork = self.process.world.clockwork
                clockwork.after(self.claims.delay(), self._reach, effect, fails)
            case shard_lease.Activate(number):
                self.number = number
                self.process.act(number)
            case shard_lease.StepDown(why):
                self.process.replaced(why)
            case shard_lease.StandDown():
                self.process.stand_down()

    def _plan(self) -> None:
        deadline = self.machine.deadline()
        self._plans += 1
        if deadline is not None and self._lives:
            process = self.process
            instant = process.instant_of(deadline)
            process.world.clockwork.timer(process, instant, self._wake, self._plans)

    def _wake(self, plan: int) -> None:
        if plan == self._plans:
            self._handle(Tick())

    @property
    def _lives(self) -> bool:
        return self.process.alive and self.process.life == self.life

    # ---- the storage

    def _reach(self, order: LeaseOrder, fails: bool) -> None:
        """An order has come as far as the storage, whatever has become of the process."""
        process, choices = self.process, self.claims.choices
        answer: LeaseAnswer | None
        if process.storage_gone:
            if choices.chance(0.5):  # it hangs, as a storage does that is mounted to wait
                if self._lives:
                    process.world.clockwork.after(HANG_SECONDS, self._reach, order, fails)
                return
            answer = shard_lease.failure_of(order, "the storage is out of reach")
        else:
            carried_out = not fails or choices.chance(0.5)
            answer = self.claims.carry_out(order, self.machine.nonce) if carried_out else None
            answer = shard_lease.failure_of(order, "the storage has failed") if fails else answer
        if answer is not None and self._lives:
            instant = process.world.now + self.claims.delay()
            process.world.clockwork.arrive(process, instant, self._handle, answer)
