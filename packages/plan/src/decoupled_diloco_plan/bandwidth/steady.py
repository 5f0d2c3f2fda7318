"""What the rounds of a case come to, once they go on as ever."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a place's link carries in one direction.

    Attributes:
        place: a site's name, or "hub".
        direction: "up": away from the place.
        mean: bytes a second over the measured periods.
        peak: the largest mean over one inner step's time, bytes a second.
        capacity: bytes a second that bodies may fill.
    """

    place: str
    direction: str
    mean: float
    peak: float
    capacity: float


@dataclass(frozen=True, slots=True)
class Rounds:
    """The steady state.

    Attributes:
        compute: share of the time in which learners step; what `Learner.step` costs is taken off.
        merged: share of the due rounds that took place.
        kept: that, times the share of their contributions that come: who still sends a fragment's
            last one, or has nothing new of it to contribute from, has no other.
        delay_steps: steps from a snapshot to the boundary at which its merge is applied, mean.
        delay_steps_max: the same, largest.
        merge_seconds: from a round's opening to its merged fragment, mean.
        broadcast_seconds: from there until the last learner holds it, mean.
        quorum_seconds: from a round's first report to its opening, mean.
        shard_busy: largest share of the time in which a shard's core folds and merges.
        traffic: of each place and direction.
        step_seconds: mean wall-clock of a step of the run's clock, which τ and H count.
        pace_seconds: wall-clock of a step of all learners together: of unequal ones, the harmonic
            mean.
        participation: of each site, share of the rounds that its learners are in.
    """

    compute: float
    merged: float
    kept: float
    delay_steps: float
    delay_steps_max: float
    merge_seconds: float
    broadcast_seconds: float
    quorum_seconds: float
    shard_busy: float
    traffic: tuple[Traffic, ...]
    step_seconds: float
    pace_seconds: float
    participation: tuple[float, ...]

    @property
    def utilization(self) -> float:
        """Steps that are taken, times rounds that take place: what the setting promises is 1."""
        return self.compute * self.kept
