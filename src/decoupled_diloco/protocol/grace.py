"""The grace window: how long a round may wait for stragglers at no cost (Eq. 3).

``ξ_slack = τ·ξ_step − (ξ_quorum + ξ_sync)`` and ``ξ_grace = max(0, γ·ξ_slack)``. The ξ are
exponential moving averages. ξ_sync is measured in two parts: from the window's closing to the
merged copy (pull and merge), and from there until a learner holds it (broadcast).
"""

from __future__ import annotations

from dataclasses import dataclass, field

SMOOTHING = 0.1
"""Weight of the newest sample: about the last ten rounds count."""


@dataclass(slots=True)
class MovingAverage:
    """An exponential moving average that starts at its first sample."""

    value: float | None = None

    def update(self, sample: float, smoothing: float = SMOOTHING) -> None:
        """Takes one sample in."""
        if self.value is None:
            self.value = sample
        else:
            self.value += smoothing * (sample - self.value)

    def __float__(self) -> float:
        return self.value or 0.0


@dataclass(frozen=True, slots=True)
class Grace:
    """One round's window, in seconds, and what it was derived from.

    ``quorum``, ``merge`` and ``broadcast`` are the moving averages as they were when the round
    opened; 0 while nothing was measured.
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
        """The window of a round that opens now.

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
