"""The state machine of a shard's lease: which of several processes may act for the shard.

Theory of operation. A shared storage is the arbiter. *Claims* of a shard are numbered, and each
number can be created once, by one process. Whoever made the newest claim acts for the shard for as
long as it renews it: it counts up beside its claim, and what it counts to is all that the others
look at. Each measures by its own clock, and no two clocks are ever compared:

- who acts is sure of it for less than a lease, counted from the *start* of its last renewal, and
  steps down for good when that time is over, whatever an answer that comes later may say;
- who waits makes the next claim when a look that *began* more than a lease after it last saw a
  change shows none.

A renewal that a look has not seen is younger than it, and answered only after the lease that it
should extend is over. So two never act at once, as long as no clock runs a tenth slower than
another. A claim's number is a fencing token besides: see `protocol.coordinator`, and
the storage itself, which is asked for a newer claim before a version is told of.

Storage is slow, or gone: every order to it is answered in its time, one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never

from decoupled_diloco.protocol.effects import Note
from decoupled_diloco.protocol.events import Tick

Phase = Literal["waiting", "claiming", "active", "over"]
Condition = Literal["held", "released", "finished"]

TRANSITIONS: tuple[tuple[str, str, str], ...] = (
    # phase, event, next phase
    ("waiting", "Looked (the newest claim is free, or silent for a lease)", "claiming"),
    ("waiting", "Looked (the run is over)", "over"),
    ("claiming", "Acquired", "active"),
    ("claiming", "NotAcquired", "waiting"),
    ("active", "Renewed (in time, no newer claim)", "active"),
    ("active", "Renewed (a newer claim)", "over"),
    ("active", "Tick (the lease is over)", "over"),
    ("active", "HolderLeaves", "over"),
)

MARGIN = 0.1
"""Share of a lease by which who acts stops sooner, and who waits begins later: what two clocks may
differ in a lease. Quartz differs by less than a thousandth of that."""

RENEWALS = 4
"""Renewals in a lease: one that fails is followed by two more before it is over."""

LOOKS = 8
"""Looks in a lease, so that a change is seen an eighth of it late."""

LOOK_SECONDS_MAX = 1.0
"""However long the lease: a claim that was given back is taken up before a process that was told to
end has been started again."""


@dataclass(frozen=True, slots=True)
class NewestLease:
    """What the storage says of a shard's newest claim; number 0: nobody has made one."""

    number: int
    nonce: str
    renewals: int
    lease_seconds: float
    condition: Condition


@dataclass(frozen=True, slots=True)
class Looked:
    """The storage was looked at."""

    standing: NewestLease


@dataclass(frozen=True, slots=True)
class LookFailed:
    """The storage cannot be read."""

    reason: str


@dataclass(frozen=True, slots=True)
class Acquired:
    """This claim is ours."""

    number: int


@dataclass(frozen=True, slots=True)
class NotAcquired:
    """This claim is somebody else's, or cannot be written."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """The renewal is in the storage, and then this was the newest claim."""

    renewals: int
    newest: int


@dataclass(frozen=True, slots=True)
class RenewFailed:
    """The renewal could not be written."""

    renewals: int
    reason: str


@dataclass(frozen=True, slots=True)
class HolderLeaves:
    """This process ends of itself; ``finished``: because the run is over."""

    finished: bool


LeaseAnswer = Looked | LookFailed | Acquired | NotAcquired | Renewed | RenewFailed
LeaseEvent = Tick | LeaseAnswer | HolderLeaves


@dataclass(frozen=True, slots=True)
class Look:
    """Read what the newest claim is."""

    why: str


@dataclass(frozen=True, slots=True)
class Acquire:
    """Create this claim, unless it exists."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Write so many renewals beside our claim; then look whether there is a newer one."""

    number: int
    renewals: int
    why: str


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Write beside our claim that nobody need wait for it to run out."""

    number: int
    finished: bool
    why: str


@dataclass(frozen=True, slots=True)
class Activate:
    """Act for the shard; ``waited_seconds``: since the claim before was last seen to change."""

    number: int
    waited_seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class StepDown:
    """Do nothing more for the shard."""

    why: str


@dataclass(frozen=True, slots=True)
class StandDown:
    """The run is over: there is nothing left to wait for."""

    why: str


LeaseOrder = Look | Acquire | Renew | GiveBack
"""What the storage is asked for."""

LeaseEffect = LeaseOrder | Activate | StepDown | StandDown | Note


def failure_of(order: LeaseOrder, reason: str) -> LeaseAnswer | None:
    """The answer to an order that the storage has not carried out; `None`: it needs none."""
    match order:
        case Look():
            return LookFailed(reason)
        case Acquire(number):
            return NotAcquired(number, reason)
        case Renew(_, renewals):
            return RenewFailed(renewals, reason)
        case GiveBack():
            return None
        case _:
            assert_never(order)


@dataclass(slots=True)
class ShardLeaseState:
    """All that is known. Instants are of the process's own clock, seconds."""

    phase: Phase = "waiting"
    number: int = 0
    renewals: int = 0
    valid_until: float = 0.0
    seen: NewestLease | None = None
    changed_at: float = 0.0
    asked_at: float | None = None
    next_at: float = 0.0
    troubled: bool = False


class ShardLeaseMachine:
    """One process that acts for a shard, or waits to.

    Args:
        nonce: Of this process.
        lease_seconds: How long a claim outlives its last renewal.
        waits: Another process is meant to be first: it gets a lease's time to make its claim. For
            a process that starts again while another one acts it makes no difference.
    """

    def __init__(self, nonce: str, lease_seconds: float, *, waits: bool) -> None:
        assert lease_seconds > 0
        self.nonce = nonce
        self.lease_seconds = lease_seconds
        self.waits = waits
        self.state = ShardLeaseState()

    def holds(self, now: float) -> bool:
        """Whether this process may act for the shard at this instant."""
        # break: acts-after-lease
        return self.state.phase == "active" and now < self.state.valid_until

    def handle(self, now: float, event: LeaseEvent) -> list[LeaseEffect]:
        """Takes one fact in; see `SyncerMachine.handle`."""
        state = self.state
        if state.phase == "over":
            return []
        match event:
            case Tick():
                return self._due(now)
            case HolderLeaves(finished):
                return self._leave(finished)
        asked_at, state.asked_at = state.asked_at, None
        assert asked_at is not None, "only what was ordered is answered"
        return self._answered(now, asked_at, event)

    def _answered(self, now: float, asked_at: float, event: LeaseAnswer) -> list[LeaseEffect]:
        """The storage has answered what it was asked at an instant."""
        state = self.state
        match event:
            case Looked(standing):
                return self._looked(now, asked_at, standing)
            case Acquired(number):
                return self._claimed(now, asked_at, number)
            case Renewed(_, newest):
                return self._renewed(now, asked_at, newest)
            case NotAcquired(number, reason):
                state.phase = "waiting"
                state.next_at = now + self._look_seconds
                return [Note(f"claim {number} is not ours", reason)]
            case LookFailed(reason) | RenewFailed(_, reason):
                state.next_at = now + self._look_seconds
                return self._told_of_trouble(reason) + self._due(now)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """When to be told `Tick` at the latest."""
        state = self.state
        if state.phase == "over":
            return None
        ends = [state.valid_until] if state.phase == "active" else []
        return min([*ends, *([state.next_at] if state.asked_at is None else [])], default=None)

    def check(self) -> None:
        """Asserts every invariant that can be seen in one state."""
        state = self.state
        assert state.phase != "active" or state.number > 0
        assert state.phase != "claiming" or state.asked_at is not None

    def _due(self, now: float) -> list[LeaseEffect]:
        state = self.state
        if state.phase == "active" and now >= state.valid_until:
            return self._over(f"claim {state.number} could not be renewed for a lease")
        if state.asked_at is not None or now < state.next_at:
            return []
        state.asked_at = now
        if state.phase == "active":
            state.renewals += 1
            return [Renew(state.number, state.renewals, "a quarter of the lease is over")]
        return [Look("is the claim renewed?")]

    def _looked(self, now: float, asked_at: float, standing: NewestLease) -> list[LeaseEffect]:
        state = self.state
        if state.seen is not None and standing.number < state.seen.number:
            return self._lost(now, standing.number, state.seen.number)
        self._told_of_trouble("")
        if standing != state.seen:
            state.seen, state.changed_at = standing, now
        if standing.condition == "finished":
            state.phase = "over"
            return [StandDown("the run is over")]
        why = self._free(asked_at, standing)
        if why:
            state.phase, state.asked_at = "claiming", now
            return [Acquire(standing.number + 1, why)]
        state.next_at = min(now + self._look_seconds, self._silent_at(standing))
        state.next_at = max(state.next_at, now)
        return self._due(now)

    def _lost(self, now: float, number: int, seen: int) -> list[LeaseEffect]:
        """Claims are never taken back: this is another storage, or an empty mount point."""
        self.state.next_at = now + self._look_seconds
        reason = f"claim {number} is said to be the newest, but {seen} was: is it mounted?"
        return self._told_of_trouble(reason)

    @property
    def _look_seconds(self) -> float:
        return min(LOOK_SECONDS_MAX, self.lease_seconds / LOOKS)

    def _silent_at(self, standing: NewestLease) -> float:
        """From when on a look that shows nothing new shows that nobody acts."""
        lease = max(self.lease_seconds, standing.lease_seconds)  # break: longer-lease-ignored
        return self.state.changed_at + lease * (1 + MARGIN)

    def _free(self, asked_at: float, standing: NewestLease) -> str:
        """Why the next claim may be made; empty: it may not."""
        if standing.condition == "released":
            return f"claim {standing.number} was given back"
        if standing.number == 0 and not self.waits:
            return "nobody has made a claim"
        if asked_at < self._silent_at(standing):  # break: silent-claim-awaited
            return ""
        if standing.number == 0:
            return "who should be first has made no claim"
        silent = asked_at - self.state.changed_at
        return f"claim {standing.number} was not renewed for {silent:.1f} s"

    def _claimed(self, now: float, asked_at: float, number: int) -> list[LeaseEffect]:
        state = self.state
        state.valid_until = asked_at + self.lease_seconds * (1 - MARGIN)
        if now >= state.valid_until:
            state.phase, state.next_at = "waiting", now
            note = Note(f"claim {number} is ours, and over", "the storage took a lease for it")
            return [note, *self._due(now)]
        state.phase, state.number = "active", number
        state.next_at = asked_at + self.lease_seconds / RENEWALS
        waited = asked_at - state.changed_at
        return [Activate(number, waited, f"claim {number} is ours"), *self._due(now)]

    def _renewed(self, now: float, asked_at: float, newest: int) -> list[LeaseEffect]:
        state = self.state  # break: late-answer-renews-lease
        if newest > state.number:
            return self._over(f"claim {newest} is newer than ours, {state.number}")
        if now >= state.valid_until:
            return self._due(now)
        state.troubled = False
        # break: renewal-counted-from-answer
        state.valid_until = asked_at + self.lease_seconds * (1 - MARGIN)
        state.next_at = asked_at + self.lease_seconds / RENEWALS
        return self._due(now)

    def _leave(self, finished: bool) -> list[LeaseEffect]:
        state = self.state
        active, state.phase = state.phase == "active", "over"
        if not active:
            return []
        return [GiveBack(state.number, finished, "the run is over" if finished else "told to end")]

    def _over(self, why: str) -> list[LeaseEffect]:
        self.state.phase = "over"
        return [StepDown(why)]

    def _told_of_trouble(self, reason: str) -> list[LeaseEffect]:
        """A storage that is out of reach is told of once, until it is back."""
        told, self.state.troubled = self.state.troubled, bool(reason)
        return [Note("the storage of the claims", reason)] if reason and not told else []
