"""When a round's window closes: a decision together with its reason in words."""

from __future__ import annotations

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
