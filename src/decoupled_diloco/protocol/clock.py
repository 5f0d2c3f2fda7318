"""Timing at a shard: its clock, the end of a round's window, and the grace window.

*Clock* (rule 1). A shard's global step is the K-th largest run step of its live learners. The
paper's "K new reports since the last round" would tick M times per step with K = 1. Here one tick
is one unit of t, whichever learner makes the step, and the clock never goes back.

*Grace* (Eq. 3). A round may wait for stragglers at no cost for ``ξ_grace = max(0, γ·ξ_slack)``,
where ``ξ_slack = τ·ξ_step − (ξ_quorum + ξ_sync)``. The ξ are exponential moving averages. ξ_sync is
measured in two parts: from the window's closing to the merged copy (pull and merge), and from there
until a learner holds it (broadcast).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest, nsmallest


def kth_largest(values: Iterable[int], k: int) -> int | None:
    """Return the k-th largest of the values, or ``None`` if there are fewer than k.

    >>> kth_largest([5, 9, 7], 2), kth_largest([5], 2)
    (7, None)
    """
    largest = nlargest(k, values)
    return largest[-1] if len(largest) == k else None


def advanced(clock: int, run_steps: Iterable[int], quorum: int) -> int:
    """Return the new clock max(t, K-th largest s_m). It stops while fewer than K are live.

    >>> advanced(4, [6, 5, 3], 2), advanced(4, [6], 2)
    (5, 4)
    """
    reached = kth_largest(run_steps, quorum)
    return clock if reached is None else max(clock, reached)


def shift_after_leave(clock: int, run_steps: Iterable[int], quorum: int) -> int:
    """Return by how much the remaining learners move up, so that the clock does not stall.

    Without the shift, the clock would stop until the slower learners had caught up with the one
    that left.

    >>> shift_after_leave(10, [7, 4], 1), shift_after_leave(10, [7], 2)
    (3, 0)
    """
    reached = kth_largest(run_steps, quorum)
    return 0 if reached is None else max(0, clock - reached)


def reached_at(instants: Iterable[float], quorum: int) -> float | None:
    """Return when the clock reaches a step that the learners reach at these instants.

    The K-th largest run step is at least t from the K-th earliest of these instants on. ``None``:
    it never is.

    >>> reached_at([3.0, 1.0, 2.0], 2), reached_at([3.0], 2)
    (2.0, None)
    """
    earliest = nsmallest(quorum, instants)
    return earliest[-1] if len(earliest) == quorum else None


def stands(live: int, quorum: int) -> bool:
    """Return whether the clock is stopped with this number of live learners.

    >>> stands(1, 2), stands(2, 2)
    (True, False)
    """
    return kth_largest(range(live), quorum) is None


# When a round's window closes


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the window closes now, and otherwise when to decide again.

    ``wake`` = ``None``: on the next event.
    """

    close: bool
    wake: float | None
    reason: str


def window_decision(
    now: float,
    *,
    closes_at: float,
    quorum: int,
    qualified: int,
    possible: int,
) -> Decision:
    """Close after the grace window, or when every learner that can take part does (rule 3).

    Args:
        now: The present instant, seconds.
        closes_at: The end of the grace window, seconds.
        quorum: K.
        qualified: Learners that received a request and have not dropped out.
        possible: Learners that are live and stepping, including those with a request.

    Returns:
        The decision and its reason.
    """
    if qualified < quorum:
        return Decision(False, None, f"{qualified} of the quorum of {quorum} qualify")
    if qualified >= possible:
        return Decision(True, None, f"all {qualified} live learners qualify")
    if now >= closes_at:
        return Decision(True, None, f"the grace window is over: {qualified} of {possible} qualify")
    return Decision(False, closes_at, f"the window is open: {qualified} of {possible} qualify")


def window_over(
    opened_at: float, reports: Sequence[float], *, quorum: int, grace_seconds: float
) -> tuple[float, int]:
    """Predict a round's window, if its learners report at these instants and nothing else happens.

    Args:
        opened_at: The tick, seconds.
        reports: When each live learner qualifies, seconds. Those before the tick count.
        quorum: K, at most the number of learners.
        grace_seconds: The grace window, seconds.

    Returns:
        When the window closes, seconds, and with how many learners.

    >>> window_over(1.0, [1.0, 1.5, 9.0], quorum=1, grace_seconds=2.0)
    (3.0, 2)
    """
    assert 1 <= quorum <= len(reports), f"{quorum=} must be 1 to {len(reports)}, the reports"
    ordered, now = sorted(reports), opened_at
    while True:
        qualified = sum(report <= now for report in ordered)
        decision = window_decision(
            now,
            closes_at=opened_at + grace_seconds,
            quorum=quorum,
            qualified=qualified,
            possible=len(ordered),
        )
        if decision.close:
            return now, qualified
        upcoming = ordered[qualified] if qualified < len(ordered) else now
        now = upcoming if decision.wake is None else min(upcoming, decision.wake)


# The grace window (Eq. 3)


SMOOTHING = 0.1
"""Weight of the newest sample: the average covers about the last ten rounds."""


@dataclass(slots=True)
class MovingAverage:
    """An exponential moving average that starts at its first sample."""

    value: float | None = None

    def update(self, sample: float, smoothing: float = SMOOTHING) -> None:
        """Add one sample."""
        if self.value is None:
            self.value = sample
        else:
            self.value += smoothing * (sample - self.value)

    def __float__(self) -> float:
        return self.value or 0.0


@dataclass(frozen=True, slots=True)
class Grace:
    """One round's window, in seconds, and the values from which it was computed.

    ``quorum``, ``merge`` and ``broadcast`` are the moving averages when the round opened, or 0
    before the first measurement.
    """

    seconds: float
    slack: float
    step: float
    quorum: float = 0.0
    merge: float = 0.0
    broadcast: float = 0.0


@dataclass(slots=True)
class Timing:
    """The moving averages of one shard, in seconds."""

    quorum: MovingAverage = field(default_factory=MovingAverage)
    merge: MovingAverage = field(default_factory=MovingAverage)
    broadcast: MovingAverage = field(default_factory=MovingAverage)

    def window(self, overlap: int, margin: float, step_seconds: float) -> Grace:
        """Return the window of a round that opens now.

        Args:
            overlap: τ in steps.
            margin: γ in [0, 1); 0 gives a window of length zero.
            step_seconds: ξ_step of the fastest live learner; 0 while unknown.

        Returns:
            The window; zero when the slack is negative.
        """
        quorum, merge, broadcast = map(float, (self.quorum, self.merge, self.broadcast))
        slack = overlap * step_seconds - (quorum + merge + broadcast)
        return Grace(
            seconds=max(0.0, margin * slack),
            slack=slack,
            step=step_seconds,
            quorum=quorum,
            merge=merge,
            broadcast=broadcast,
        )
