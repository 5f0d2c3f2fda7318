"""When a round's window closes: a decision together with its reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether the window closes now; if not, when to look again (``None``: on the next event)."""

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
    """Rule 3: close after the grace window, or when everyone who can take part does.

    Args:
        now: the present instant, seconds.
        closes_at: the end of the grace window, seconds.
        quorum: K.
        qualified: learners that were asked and have not fallen out.
        possible: learners that are live and stepping, those asked included.

    Returns:
        The decision and its reason.
    """
    if qualified < quorum:
        return Decision(False, None, f"{qualified} of the quorum of {quorum} qualify")
    if qualified >= possible:
        return Decision(True, None, f"all {qualified} live learners qualify")
    if now >= closes_at:
        return Decision(True, None, f"the grace window is over with {qualified} of {possible}")
    return Decision(False, closes_at, f"{qualified} of {possible} qualify, the window is open")


def window_over(
    opened_at: float, reports: Sequence[float], *, quorum: int, grace_seconds: float
) -> tuple[float, int]:
    """How a round's window goes if its learners report at these instants, and nothing else happens.

    Args:
        opened_at: the tick, seconds.
        reports: for each live learner when it qualifies, seconds; those before the tick count.
        quorum: K, at most the number of learners.
        grace_seconds: the grace window, seconds.

    Returns:
        When the window closes, seconds, and with how many learners.

    >>> window_over(1.0, [1.0, 1.5, 9.0], quorum=1, grace_seconds=2.0)
    (3.0, 2)
    """
    assert 1 <= quorum <= len(reports), "a quorum of those that report"
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
        coming = ordered[qualified] if qualified < len(ordered) else now
        now = coming if decision.wake is None else min(coming, decision.wake)
