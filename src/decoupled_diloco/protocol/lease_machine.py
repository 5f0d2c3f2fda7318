"""The state machine of a shard's leadership lease: which of several processes acts for the shard.

Theory of operation. A shared storage is the arbiter. A shard's *claims* are numbered, and each
number can be created once, by one process. The process with the newest claim acts for the shard for
as long as it renews the claim. A renewal writes a count next to the claim, and other processes read
nothing but this count. Each process measures time by its own clock. No two clocks are compared:

- The active process relies on its lease for less than the lease time, counted from the *start* of
  its last renewal. After that it steps down for good, even if an answer arrives later.
- A waiting process makes the next claim when a read that *began* more than a lease after the last
  observed change shows no change.

A renewal that such a read has not seen is younger than the read. It is answered only after the
lease that it should extend is over. Two processes therefore never act at once, as long as no clock
runs a tenth slower than another. A claim's number also serves as a fencing token: see
`protocol.coordinator_machine`. The storage itself is also checked for a newer claim before a
version is announced.

Storage may be slow or unreachable: each order to it is answered eventually, one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decoupled_diloco.protocol.messages import (
    Acquire,
    Activate,
    Done,
    Failed,
    GiveBack,
    HolderLeaves,
    LeaseEffect,
    LeaseEvent,
    Look,
    NewestClaim,
    NewestLease,
    Note,
    Renew,
    StandDown,
    StepDown,
    Tick,
)

Phase = Literal["waiting", "claiming", "active", "over"]

TRANSITIONS: tuple[tuple[str, str, str], ...] = (
    # phase, event, next phase
    ("waiting", "Done(Look) (the newest claim is free, or silent for a lease)", "claiming"),
    ("waiting", "Done(Look) (the run is over)", "over"),
    ("claiming", "Done(Acquire)", "active"),
    ("claiming", "Failed(Acquire)", "waiting"),
    ("active", "Done(Renew) (in time, no newer claim)", "active"),
    ("active", "Done(Renew) (a newer claim)", "over"),
    ("active", "Tick (the lease is over)", "over"),
    ("active", "HolderLeaves", "over"),
)

MARGIN = 0.1
"""Share of a lease by which the active process stops earlier and a waiting one starts later.

It covers the difference between two clocks over a lease. Quartz clocks differ by less than a
thousandth of that.
"""

RENEWALS = 4
"""Renewals per lease: after a failed one, two more follow before the lease is over."""

LOOKS = 8
"""Reads per lease, so that a change is seen at most an eighth of a lease late."""

LOOK_SECONDS_MAX = 1.0
"""Longest pause between two reads, however long the lease.

A released claim is then taken over before a process that was asked to stop has restarted.
"""


@dataclass(slots=True)
class ShardLeaseState:
    """The whole state of the machine. Instants are of the process's own clock, in seconds."""

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
        waits: Another process should be first, and has one lease's time to make its claim. This
            makes no difference for a process that restarts while another one is active.
    """

    def __init__(self, nonce: str, lease_seconds: float, *, waits: bool) -> None:
        assert lease_seconds > 0
        self.nonce = nonce
        self.lease_seconds = lease_seconds
        self.waits = waits
        self.state = ShardLeaseState()

    def holds(self, now: float) -> bool:
        """Return whether this process may act for the shard at this instant."""
        # break: acts-after-lease
        return self.state.phase == "active" and now < self.state.valid_until

    def handle(self, now: float, event: LeaseEvent) -> list[LeaseEffect]:
        """Process one event; see `SyncerMachine.handle`."""
        state = self.state
        if state.phase == "over":
            return []
        match event:
            case Tick():
                return self._due(now)
            case HolderLeaves(finished):
                return self._leave(finished)
        asked_at, state.asked_at = state.asked_at, None
        assert asked_at is not None, "an answer without an order"
        return self._answered(now, asked_at, event)

    def _answered(self, now: float, asked_at: float, event: Done | Failed) -> list[LeaseEffect]:
        """Process the storage's answer to an order that was given at ``asked_at``."""
        state = self.state
        match event:
            case Done(Look(), NewestLease() as found):
                return self._looked(now, asked_at, found)
            case Done(Acquire(number)):
                return self._claimed(now, asked_at, number)
            case Done(Renew(), NewestClaim(newest)):
                return self._renewed(now, asked_at, newest)
            case Failed(Acquire(number), reason):
                state.phase = "waiting"
                state.next_at = now + self._look_seconds
                return [Note(f"could not make claim {number}", reason)]
            case Failed(Look() | Renew(), reason):
                state.next_at = now + self._look_seconds
                return self._log_trouble(reason) + self._due(now)
            case _:
                raise AssertionError(f"unexpected answer from the storage: {event}")

    def deadline(self) -> float | None:
        """Return when the next `Tick` is due at the latest."""
        state = self.state
        if state.phase == "over":
            return None
        ends = [state.valid_until] if state.phase == "active" else []
        return min([*ends, *([state.next_at] if state.asked_at is None else [])], default=None)

    def check(self) -> None:
        """Assert every invariant that is visible in one state."""
        state = self.state
        assert state.phase != "active" or state.number > 0
        assert state.phase != "claiming" or state.asked_at is not None

    def _due(self, now: float) -> list[LeaseEffect]:
        state = self.state
        if state.phase == "active" and now >= state.valid_until:
            return self._over(f"claim {state.number} could not be renewed within its lease")
        if state.asked_at is not None or now < state.next_at:
            return []
        state.asked_at = now
        if state.phase == "active":
            state.renewals += 1
            return [Renew(state.number, state.renewals, "a quarter of the lease is over")]
        return [Look("to check whether the claim is renewed")]

    def _looked(self, now: float, asked_at: float, newest: NewestLease) -> list[LeaseEffect]:
        state = self.state
        if state.seen is not None and newest.number < state.seen.number:
            return self._lost(now, newest.number, state.seen.number)
        self._log_trouble("")
        if newest != state.seen:
            # When the change was seen, which is never too early, so the wait is long enough.
            state.seen, state.changed_at = newest, now
        if newest.condition == "finished":
            state.phase = "over"
            return [StandDown("the run is over")]
        why = self._free(asked_at, newest)
        if why:
            state.phase, state.asked_at = "claiming", now
            return [Acquire(newest.number + 1, why)]
        state.next_at = min(now + self._look_seconds, self._silent_at(newest))
        state.next_at = max(state.next_at, now)
        return self._due(now)

    def _lost(self, now: float, number: int, seen: int) -> list[LeaseEffect]:
        """Log claims that have vanished. Claims are never deleted, so this is different storage.

        A likely cause is an empty mount point.
        """
        self.state.next_at = now + self._look_seconds
        reason = f"its newest claim is {number}, but claim {seen} was seen: check the mount"
        return self._log_trouble(reason)

    @property
    def _look_seconds(self) -> float:
        return min(LOOK_SECONDS_MAX, self.lease_seconds / LOOKS)

    def _silent_at(self, newest: NewestLease) -> float:
        """Return from when on a read without a change shows that no process is active."""
        lease = max(self.lease_seconds, newest.lease_seconds)  # break: longer-lease-ignored
        return self.state.changed_at + lease * (1 + MARGIN)

    def _free(self, asked_at: float, newest: NewestLease) -> str:
        """Return why the next claim may be made; empty: it may not."""
        if newest.condition == "released":
            return f"claim {newest.number} was released"
        if newest.number == 0 and not self.waits:
            return "no process has made a claim"
        # The read must have begun late enough: its answer may describe any instant since.
        if asked_at < self._silent_at(newest):  # break: silent-claim-awaited
            return ""
        if newest.number == 0:
            return "the preferred process has made no claim"
        silent = asked_at - self.state.changed_at
        return f"claim {newest.number} was not renewed for {silent:.1f} s"

    def _claimed(self, now: float, asked_at: float, number: int) -> list[LeaseEffect]:
        state = self.state
        # From the order, not the answer: others see the claim from when the storage wrote it.
        state.valid_until = asked_at + self.lease_seconds * (1 - MARGIN)
        if now >= state.valid_until:
            state.phase, state.next_at = "waiting", now
            note = Note(f"claim {number} expired", "the storage took longer than a lease")
            return [note, *self._due(now)]
        state.phase, state.number = "active", number
        state.next_at = asked_at + self.lease_seconds / RENEWALS
        waited = asked_at - state.changed_at
        return [Activate(number, waited, f"this process has claim {number}"), *self._due(now)]

    def _renewed(self, now: float, asked_at: float, newest: int) -> list[LeaseEffect]:
        state = self.state  # break: late-answer-renews-lease
        if newest > state.number:
            return self._over(f"claim {newest} is newer than this process's claim {state.number}")
        if now >= state.valid_until:
            return self._due(now)  # too late: another process may act by now, so step down
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
        why = "the run is over" if finished else "the process was asked to stop"
        return [GiveBack(state.number, finished, why)]

    def _over(self, why: str) -> list[LeaseEffect]:
        self.state.phase = "over"
        return [StepDown(why)]

    def _log_trouble(self, reason: str) -> list[LeaseEffect]:
        """Log once that the storage is unreachable, until it is back."""
        logged, self.state.troubled = self.state.troubled, bool(reason)
        text = "the storage of the claims failed; retrying"
        return [Note(text, reason)] if reason and not logged else []
