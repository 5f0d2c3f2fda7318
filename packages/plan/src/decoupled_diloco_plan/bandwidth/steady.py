"""What the rounds of a case come to, once they go on as ever."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a place's link carries in one direction."""

    place: str  # a site's name, or "hub"
    direction: str  # "up": away from the place
    mean: float  # bytes a second over the measured periods
    peak: float  # the largest mean over one inner step's time, bytes a second
    capacity: float  # bytes a second that bodies may fill


@dataclass(frozen=True, slots=True)
class Rounds:
    """The steady state."""

    # share of the time in which learners step; what `Learner.step` costs is taken off
    compute: float
    merged: float  # share of the due rounds that took place
    # that, times the share of their contributions that come: who still sends a fragment's last one,
    # or has nothing new of it to contribute from, has no other
    kept: float
    delay_steps: float  # steps from a snapshot to the boundary at which its merge is applied, mean
    delay_steps_max: float  # the same, largest
    merge_seconds: float  # from a round's opening to its merged fragment, mean
    broadcast_seconds: float  # from there until the last learner holds it, mean
    quorum_seconds: float  # from a round's first report to its opening, mean
    shard_busy: float  # largest share of the time in which a shard's core folds and merges
    traffic: tuple[Traffic, ...]  # of each place and direction
    step_seconds: float  # mean wall-clock of a step of the run's clock, which τ and H count
    # wall-clock of a step of all learners together: of unequal ones, the harmonic mean
    pace_seconds: float
    participation: tuple[float, ...]  # of each site, share of the rounds that its learners are in

    @property
    def utilization(self) -> float:
        """Steps that are taken, times rounds that take place: what the setting promises is 1."""
        return self.compute * self.kept
