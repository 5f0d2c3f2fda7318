"""In how many bits a learner sends: the most that its link carries in time (rule 20).

For each learner a shard measures how long a body takes, from the moment at which the learner begins
to send, or has sent the one before, until it is here. A body has the time that the method gives it:
τ steps, and no more than the steps between two fragments that are due, since a link that is busy
for longer falls behind. The ladder is the list of codecs that the run allows, the most exact first.

A learner goes down, at once as far as it must, when two bodies in a row took too long. It goes up
by one, when a number of bodies in a row would have fitted well in the finer codec. That number is
doubled each time a learner has to come down again soon after, so that nothing flaps.

How often a learner takes part needs no setting: one whose link cannot carry the last codec of the
ladder either is asked as fast as its link goes (`asking`, arrears).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decoupled_diloco.protocol.grace import MovingAverage

FITS = 0.8
"""A body is in time that takes so much of the time it has."""

FITS_WELL = 0.5
"""And would be in a finer codec, if it then took so much."""

LATE_MAX = 2
"""So many bodies in a row that are not in time, and a coarser codec is chosen."""

PATIENCE = 8
"""So many in a row that would fit well, and a finer one is; doubled when that was too early."""

PATIENCE_MAX = 256

SMOOTHING = 0.3
"""Weight of the newest body: a link that recovers is soon believed."""

SOON = 16
"""Who comes down again within so many bodies went up too early."""

Ladder = tuple[tuple[str, float], ...]
"""Codecs and their bits an element, the most exact first."""


@dataclass(slots=True)
class Hysteresis:
    """When a setting is to change, so that nothing flaps.

    Attributes:
        wanted: So many looks in a row must find room for a finer setting; doubled when that was
            too early.
        late: Looks in a row that found the link behind.
        well: Looks in a row that found room.
        since: Looks since it became finer last.
    """

    wanted: int = PATIENCE
    late: int = 0
    well: int = 0
    since: int = SOON

    def saw(self, *, late: bool, well: bool) -> Literal["coarser", "finer", ""]:
        """One more look: whether the link is behind, and whether it has room for the finer."""
        self.since += 1
        self.late = self.late + 1 if late else 0
        self.well = self.well + 1 if well else 0
        if self.late >= LATE_MAX:
            self.late = self.well = 0
            if self.since < SOON:
                self.wanted = min(PATIENCE_MAX, 2 * self.wanted)
            return "coarser"
        if self.well >= self.wanted:
            self.well = self.since = 0
            return "finer"
        return ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A learner sends in another codec from now on, and why."""

    codec: str
    before: str
    why: str


@dataclass(slots=True)
class Uplink:
    """What one learner's bodies have told of its link.

    Attributes:
        rung: Of the ladder, 0 is the most exact codec.
        patience: With its codec, a look for each body.
        per_bit: Seconds of a body for each of its bits an element.
        free_at: When its last body was here.
    """

    rung: int = 0
    patience: Hysteresis = field(default_factory=Hysteresis)
    per_bit: MovingAverage = field(default_factory=MovingAverage)
    free_at: float = float("-inf")


def body_seconds(overlap: int, period: int, fragments: int, step_seconds: float) -> float:
    """How long a body may be on its way: τ steps, at most those between two that are due.

    Args:
        overlap: τ, steps; with 0 the time between two that are due is what counts.
        period: H, steps.
        fragments: P.
        step_seconds: Of the fastest live learner, above 0.

    >>> body_seconds(2, 24, 24, 0.5), body_seconds(2, 96, 24, 0.5)
    (0.5, 1.0)
    """
    between = period / fragments
    return step_seconds * (min(overlap, between) if overlap else between)


def arrived(
    uplink: Uplink, ladder: Ladder, began_at: float, now: float, allowed: float
) -> Choice | None:
    """A body in the present codec is here; perhaps the next one is to be in another.

    Args:
        uplink: Changed in place.
        ladder: At least one codec.
        began_at: When its learner began to send it.
        now: When it was here.
        allowed: Seconds that it may take; see `body_seconds`.
    """
    name, bits = ladder[uplink.rung]
    seconds = now - max(began_at, uplink.free_at)
    uplink.free_at = now
    uplink.per_bit.update(seconds / bits, SMOOTHING)
    late = seconds > FITS * allowed and uplink.rung + 1 < len(ladder)
    finer = ladder[uplink.rung - 1][1] if uplink.rung else 0.0
    would = max(seconds / bits, float(uplink.per_bit)) * finer
    well = finer > 0.0 and would <= FITS_WELL * allowed
    match uplink.patience.saw(late=late, well=well):
        case "coarser":
            return _down(uplink, ladder, seconds, allowed, name)
        case "finer":
            uplink.rung -= 1
            why = f"a body would take {would:.3g} s, and has {allowed:.3g} s"
            return Choice(ladder[uplink.rung][0], name, why)
        case _:
            return None


def _down(uplink: Uplink, ladder: Ladder, seconds: float, allowed: float, name: str) -> Choice:
    per_bit = seconds / ladder[uplink.rung][1]
    rungs = range(uplink.rung + 1, len(ladder))
    fits = (rung for rung in rungs if per_bit * ladder[rung][1] <= FITS * allowed)
    uplink.rung = next(fits, len(ladder) - 1)
    uplink.per_bit = MovingAverage(per_bit)
    why = f"{LATE_MAX} bodies took too long, the last one {seconds:.3g} s of {allowed:.3g} s"
    return Choice(ladder[uplink.rung][0], name, why)
