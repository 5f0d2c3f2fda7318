"""Adaptive communication (rule 20): the codec of each learner, and the run's H and τ.

*Codecs.* The goal is the most bits that a learner's link carries in time. For each learner, a shard
measures how long a payload takes: from when the learner starts to send it, or has sent the one
before, until its arrival. The time allowed is τ steps, and at most the steps between two due
fragments, because a link that is busy for longer falls behind. The ladder is the list of codecs
that the run allows, the most exact first.

A learner moves to a coarser codec when two payloads in a row took too long, at once as many rungs
as needed. It moves up one rung when a number of payloads in a row would have fitted well in the
finer codec. That number doubles each time the learner must move down again soon after, which
prevents flapping.

Fewer bits do not help where a round trip or a busy processor takes the time. If the first payloads
in a coarser codec are hardly faster, the learner moves back. Before the next attempt, twice as many
payloads in a row must be late.

The participation rate needs no setting: a learner whose link cannot carry even the last codec of
the ladder receives requests as fast as its link permits (`rounds`, backlog).

*H and τ* follow the links in schedule revisions. For each learner, a shard measures for how many
steps one payload occupies its link, in the coarsest allowed codec, and how many steps pass between
a request and the payload's arrival. With every tick, it reports to the coordinator what all but the
slowest learners need. The coordinator compares this with the present H and τ at intervals. If they
do not give enough time twice in a row, it chooses the smallest H and τ that do. If smaller values
would suffice with room to spare several times in a row, it chooses those. A *revision* has a number
and the tick from which it applies. It reaches the shards, and through them the learners.

A user's *schedule* may determine H instead: a function of the step. Its changes are revisions, too.

Codecs come first: H is raised only if the coarsest codec of the ladder is still too slow, and
lowered before a finer codec is chosen, because a longer period costs more loss than fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

from decoupled_diloco.errors import ConfigError, MethodError
from decoupled_diloco.protocol.clock import MovingAverage
from decoupled_diloco.protocol.messages import Demand, Revision

FITS = 0.8
"""A payload is in time if it takes at most this share of the allowed time."""


FITS_WELL = 0.5
"""A finer codec is chosen if its payloads would take at most this share of the allowed time."""


LATE_MAX = 2
"""A coarser codec is chosen after this number of late payloads in a row.

It is undone after as many payloads that are hardly faster.
"""


PATIENCE = 8
"""A finer codec is chosen after this number of payloads in a row that would fit well.

The number doubles, up to ``PATIENCE_MAX``, each time the change was too early.
"""


PATIENCE_MAX = 256


IN_VAIN_MAX = 32
"""Most late payloads in a row that are needed after coarser codecs did not help.

A few of them bound the time for which a link that only seemed not to improve keeps its codec.
"""


SMOOTHING = 0.3
"""Weight of the newest payload: a faster link counts soon."""


SOON = 16
"""A change to a finer codec was too early if it is undone within this number of payloads."""


Ladder = tuple[tuple[str, float], ...]
"""Codecs and their bits per element, the most exact first."""


@dataclass(slots=True)
class Hysteresis:
    """Decides when a setting changes, without flapping.

    Attributes:
        wanted: Number of observations in a row that must find room for a finer setting. Doubles
            when a change was too early.
        late_max: Number of late observations in a row before a coarser setting. Doubles when a
            change did not help.
        late: Observations in a row in which the link was behind.
        well: Observations in a row with room for the finer setting.
        since: Observations since the last change to a finer setting.
    """

    wanted: int = PATIENCE
    late_max: int = LATE_MAX
    late: int = 0
    well: int = 0
    since: int = SOON

    def observe(self, *, late: bool, well: bool) -> Literal["coarser", "finer", ""]:
        """Add one observation: whether the link is behind, and whether it has room."""
        self.since += 1
        self.late = self.late + 1 if late else 0
        self.well = self.well + 1 if well else 0
        if self.late >= self.late_max:
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
    """A change of a learner's codec, and its reason."""

    codec: str
    before: str
    why: str


@dataclass(slots=True)
class Uplink:
    """The measurements of one learner's uplink.

    Attributes:
        rung: Index in the ladder; 0 is the most exact codec.
        patience: Hysteresis with one observation per payload.
        per_bit: Seconds per payload for each bit per element.
        free_at: When its last payload arrived.
        trial: The finer rung before a change to a coarser one, and the seconds below which a
            payload must stay to show that the change helps; ``None``: it does.
        in_vain: Payloads in a row that took longer.
    """

    rung: int = 0
    trial: tuple[int, float] | None = None
    in_vain: int = 0
    patience: Hysteresis = field(default_factory=Hysteresis)
    per_bit: MovingAverage = field(default_factory=MovingAverage)
    free_at: float = float("-inf")


def body_seconds(overlap: int, period: int, fragments: int, step_seconds: float) -> float:
    """Return how long a payload may take: τ steps, at most those between two due fragments.

    Args:
        overlap: τ, steps; with 0, only the time between two due fragments counts.
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
    """Record a payload in the present codec, and return a change of codec, if any.

    Args:
        uplink: Changed in place.
        ladder: At least one codec.
        began_at: When its learner started to send it.
        now: When it arrived.
        allowed: Seconds that it may take; see `body_seconds`.
    """
    name, bits = ladder[uplink.rung]
    seconds = now - max(began_at, uplink.free_at)
    uplink.free_at = now  # the next payload may have queued behind this one: time it from here
    if (choice := _back_if_in_vain(uplink, ladder, seconds)) is not None:
        return choice
    uplink.per_bit.update(seconds / bits, SMOOTHING)
    late = seconds > FITS * allowed and uplink.rung + 1 < len(ladder)
    finer = ladder[uplink.rung - 1][1] if uplink.rung else 0.0
    # The slower of the last payload and the average: one fast payload proves little.
    would = max(seconds / bits, float(uplink.per_bit)) * finer
    well = finer > 0.0 and would <= FITS_WELL * allowed
    match uplink.patience.observe(late=late, well=well):
        case "coarser":
            return _down(uplink, ladder, seconds, allowed, name)
        case "finer":
            uplink.rung -= 1
            why = f"a payload would take {would:.3g} s of {allowed:.3g} s"
            return Choice(ladder[uplink.rung][0], name, why)
        case _:
            return None


def _down(uplink: Uplink, ladder: Ladder, seconds: float, allowed: float, name: str) -> Choice:
    before = uplink.rung
    per_bit = seconds / ladder[before][1]
    rungs = range(before + 1, len(ladder))
    fits = (rung for rung in rungs if per_bit * ladder[rung][1] <= FITS * allowed)
    uplink.rung = next(fits, len(ladder) - 1)
    uplink.per_bit = MovingAverage(per_bit)  # the old average describes a faster link
    # Halfway between a payload that is as fast as its bits promise, and one that is not faster.
    uplink.trial = before, (seconds + per_bit * ladder[uplink.rung][1]) / 2
    late_max = uplink.patience.late_max
    why = f"{late_max} payloads took too long, the last one {seconds:.3g} s of {allowed:.3g} s"
    return Choice(ladder[uplink.rung][0], name, why)


def _back_if_in_vain(uplink: Uplink, ladder: Ladder, seconds: float) -> Choice | None:
    """Undo a change to a coarser codec whose first payloads are hardly faster."""
    if uplink.trial is None:
        return None
    rung, limit = uplink.trial
    uplink.in_vain = uplink.in_vain + 1 if seconds > limit else 0
    if not uplink.in_vain:
        uplink.trial, uplink.patience.late_max = None, LATE_MAX
    if uplink.in_vain < LATE_MAX:
        return None
    name, uplink.rung = ladder[uplink.rung][0], rung
    uplink.trial, uplink.in_vain, uplink.per_bit = None, 0, MovingAverage()
    uplink.patience.late_max = min(IN_VAIN_MAX, 2 * uplink.patience.late_max)
    why = f"fewer bits do not help: a payload still took {seconds:.3g} s"
    return Choice(ladder[rung][0], name, why)


# Revisions of H and τ


BUSY = 0.95
"""Highest share of the time for which a link may be busy.

It is close to 1 because a longer period costs more loss than a slightly lower participation.
"""


REVIEWS_WELL = 3
"""H or τ becomes smaller after this number of reviews in a row that found room."""


PAYLOADS_PER_REVIEW = 4
"""Least number of payloads per learner between two reviews.

The interval is also at least half of the smallest period.
"""


LEAD_TICKS = 2
"""A revision applies this number of ticks later, when every process has received it."""


PERIOD_MAX = 100_000
"""The longest H that a schedule may return. A table of the period is kept in memory."""


Schedule = Callable[[int, int | None], int]
"""Called as ``schedule(step, steps)``; returns H, and always the same H for the same arguments.

``steps`` is the run's number of steps; ``None``: the run ends by another budget.
"""


def period_at(schedule: Schedule, step: int, steps: int | None, overlap: int = 0) -> int:
    """Return the H of a schedule at a step.

    Raises:
        MethodError: The schedule raises, or returns something else than an integer that is above
            the overlap and at most `PERIOD_MAX`.

    >>> period_at(lambda step, steps: 24 if step < 0.8 * steps else 8, 80, 100)
    8
    """
    try:
        period = schedule(step, steps)
    except ConfigError:
        raise  # it is not loaded
    except Exception as error:
        raise MethodError(
            f"schedule raises {error!r} for step={step}, steps={steps}: correct the function"
        ) from error
    if type(period) is not int or not overlap < period <= PERIOD_MAX:
        raise MethodError(
            f"schedule returned {period!r} for step={step}, steps={steps}: return an integer from "
            f"{overlap + 1} (overlap_steps + 1) to {PERIOD_MAX}"
        )
    return period


def scheduled(
    schedule: Schedule, steps: int | None, clock: int, present: Revision
) -> tuple[Revision, str] | None:
    """Return the revision that a schedule requires at a tick, with its reason, if any.

    Args:
        schedule: The user's function.
        steps: See `Schedule`.
        clock: That of the shard that is furthest ahead.
        present: The newest revision.

    Raises:
        MethodError: See `period_at`.
    """
    if clock < present.tick:  # the last revision does not apply yet
        return None
    period = period_at(schedule, clock + LEAD_TICKS, steps, present.overlap)
    if period == present.period:
        return None
    found = _revised(present, clock, (period, present.overlap))
    return found, f"the schedule returns {period} for step {found.tick}"


@dataclass(frozen=True, slots=True)
class AdaptLimits:
    """The limits that the user sets.

    Attributes:
        period: The least and the greatest H, steps.
        overlap: The least and the greatest τ, steps.
        carried_by: The share of the learners whose links must carry the plan, above 0 to 1. The
            others receive requests as fast as their links permit.
    """

    period: tuple[int, int]
    overlap: tuple[int, int]
    carried_by: float = 0.75

    @property
    def periods(self) -> tuple[int, ...]:
        """The allowed values of H: the least times powers of two, and the greatest.

        >>> AdaptLimits((24, 120), (2, 8)).periods
        (24, 48, 96, 120)
        """
        period, most = self.period
        found = [period]
        while 2 * found[-1] < most:
            found.append(2 * found[-1])
        return tuple(found) if found[-1] == most else (*found, most)


@dataclass(slots=True)
class Needs:
    """The measurements of one learner's link, in seconds.

    Attributes:
        answer: From a request until its contribution arrives.
        copy: Time for which one published copy occupies the link.
    """

    answer: MovingAverage = field(default_factory=MovingAverage)
    copy: MovingAverage = field(default_factory=MovingAverage)


def needed_by(carried_by: float, needs: Collection[float]) -> float:
    """Return the least value that covers the needs of this share of the learners.

    >>> needed_by(0.75, [1.0, 9.0, 2.0, 1.5]), needed_by(0.75, [1.0, 9.0])
    (2.0, 9.0)
    """
    # 1e-9: a rounding error in the product must not raise ceil by one.
    return sorted(needs)[max(1, ceil(carried_by * len(needs) - 1e-9)) - 1]


def demand_of(
    links: Sequence[tuple[float, float]], carried_by: float, step_seconds: float
) -> Demand | None:
    """Return what a shard's learners need, or ``None`` without measurements.

    Args:
        links: For each measured learner, in seconds: a payload in the coarsest codec, and an
            answer.
        carried_by: See `AdaptLimits`.
        step_seconds: Of the fastest live learner.
    """
    if not links or step_seconds <= 0.0:
        return None
    found = (needed_by(carried_by, each) / step_seconds for each in zip(*links, strict=True))
    return Demand(*found)


def fitting(
    limits: AdaptLimits,
    fragments: int,
    demand: Demand,
    period: int,
    *,
    busy: float,
    filled: float,
) -> tuple[int, int]:
    """Return the smallest H and τ that give enough time.

    If the present H is too short, answers queue behind each other. Then τ is chosen for one payload
    alone.

    Args:
        limits: The user's limits. If no value is large enough, the greatest is used.
        fragments: P; a link has H/P steps per payload.
        demand: What the learners need.
        period: The present H.
        busy: The share of the time for which a link may be busy, above 0 to 1.
        filled: The share of τ that an answer may take.

    >>> fitting(AdaptLimits((24, 120), (2, 8)), 24, Demand(1.2, 1.5), 24, busy=0.95, filled=0.8)
    (48, 2)
    """
    least, most = limits.overlap
    queues = fragments * demand.body > BUSY * period
    answer = min(demand.answer, demand.body) if queues else demand.answer
    overlap = ceil(answer / filled)
    overlap = min(max(least, overlap), most)
    needed = fragments * demand.body / busy
    enough = (each for each in limits.periods if needed <= each and overlap < each)
    found = next(enough, limits.period[1])
    return found, min(overlap, found - 1)  # break: overlap-as-long-as-period


@dataclass(slots=True)
class Reviser:
    """The coordinator's side. Only the revision is durable; a new process starts with no demands.

    Attributes:
        demands: The last report of each shard.
        patience: Hysteresis for the present plan.
        reviewed_at: The clock at the last review.
    """

    demands: dict[int, Demand] = field(default_factory=dict)
    patience: Hysteresis = field(default_factory=lambda: Hysteresis(REVIEWS_WELL))
    reviewed_at: int | None = None

    def record(self, shard: int, demand: Demand) -> None:
        """Record what a shard's learners need."""
        self.demands[shard] = demand

    def review(
        self, clock: int, limits: AdaptLimits, present: Revision, fragments: int
    ) -> tuple[Revision, str] | None:
        """Review the plan at a tick, and return a new revision with its reason, if any.

        Args:
            clock: That of the shard that is furthest ahead.
            limits: The user's limits.
            present: The newest revision.
            fragments: P.
        """
        if self.reviewed_at is None or clock < self.reviewed_at:
            self.reviewed_at = clock
        if (
            clock - self.reviewed_at < ticks_apart(limits, present, fragments)
            or clock < present.tick  # the last revision does not apply yet
            or not self.demands
        ):
            return None
        self.reviewed_at = clock
        demand = Demand(
            max(each.body for each in self.demands.values()),
            max(each.answer for each in self.demands.values()),
        )
        now, needs = (present.period, present.overlap), (limits, fragments, demand, present.period)
        enough = _larger(now, fitting(*needs, busy=BUSY, filled=FITS))
        roomy = _smaller(now, fitting(*needs, busy=FITS_WELL, filled=FITS_WELL))
        match self.patience.observe(late=enough != now, well=enough == now and roomy != now):
            case "coarser":
                return _revised(present, clock, enough), _why(demand, "is too much")
            case "finer":
                return _revised(present, clock, roomy), _why(demand, "leaves room")
            case _:
                return None


def ticks_apart(limits: AdaptLimits, present: Revision, fragments: int) -> int:
    """Return the number of ticks between two reviews.

    >>> ticks_apart(AdaptLimits((24, 192), (2, 8)), Revision(1, 50, 192, 2), 24)
    32
    """
    return max(1, limits.period[0] // 2, PAYLOADS_PER_REVIEW * present.period // fragments)


def _larger(plan: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(plan[0], other[0]), max(plan[1], other[1])


def _smaller(plan: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    period = min(plan[0], other[0])
    return period, min(plan[1], other[1], period - 1)


def _revised(present: Revision, clock: int, plan: tuple[int, int]) -> Revision:
    return replace(
        present,
        number=present.number + 1,  # break: revision-number-reused
        tick=clock + LEAD_TICKS,
        period=plan[0],  # break: period-above-maximum
        overlap=plan[1],
    )


def _why(demand: Demand, what: str) -> str:
    return (
        f"a payload occupies a link for {demand.body:.3g} steps and arrives {demand.answer:.3g} "
        f"steps after its request: this {what}"
    )
