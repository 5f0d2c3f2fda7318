"""Steady state of a case's rounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic of a place's link in one direction."""

    place: str  # a site's name, "hub", or "inside SITE": between its relay and its learners
    direction: str  # "up": away from the place
    mean: float  # bytes per second over the measured periods
    peak: float  # the largest mean over one inner step, bytes per second
    capacity: float  # bytes per second that payloads may fill
    is_inside: bool = False


@dataclass(frozen=True, slots=True)
class Rounds:
    """Averages over the measured periods."""

    # share of the time in which learners step, without the overhead of `Learner.step`
    compute: float
    merged: float  # share of the due rounds that took place
    # `merged` times the share of requested contributions that arrive. A learner has none to send if
    # its last one for the fragment is still in transit, or if it holds no newer copy to train from.
    kept: float
    delay_steps: float  # steps from a snapshot to the boundary at which its merge is applied, mean
    delay_steps_max: float  # the same, largest
    merge_seconds: float  # from a round's opening to its merged fragment, mean
    broadcast_seconds: float  # from there until the last learner holds it, mean
    quorum_seconds: float  # from a round's first report to its opening, mean
    shard_busy: float  # largest share of the time in which a shard's core folds and merges
    # largest share of the time in which a relay's thread adds contributions; 0 without relays
    relay_busy: float
    traffic: tuple[Traffic, ...]  # of each place and direction
    step_seconds: float  # mean wall-clock time per step of the run's clock, the unit of τ and H
    # mean wall-clock time per step over all learners; for unequal learners the harmonic mean
    pace_seconds: float
    participation: tuple[float, ...]  # per site: share of the rounds that its learners are in

    @property
    def utilization(self) -> float:
        """Share of steps taken times share of rounds completed; 1 is ideal."""
        return self.compute * self.kept
