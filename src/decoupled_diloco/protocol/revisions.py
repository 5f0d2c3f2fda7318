"""How often a fragment is sent, and how long that may take: revisions of H and τ (rule 20).

A shard measures for each learner how many steps one body keeps its link busy, in the codec with the
fewest bits that the run allows, and how many steps a body is on its way once it is asked for. What
all but the slowest of them need goes to the coordinator with every tick. Now and then that looks
whether the present H and τ give so much time. If they do not twice in a row, it names a plan that
does: the smallest H and τ. If a smaller one would do with room to spare, several times in a row, it
names that. A *revision* bears a number, and the tick from which it holds; it reaches the shards,
and through them the learners.

Codecs come first: H is raised only where the coarsest codec of the ladder is still too much, and
lowered before a finer one is chosen, since a longer period costs more loss than fewer bits do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from decoupled_diloco.protocol.adapt import FITS, FITS_WELL, Hysteresis
from decoupled_diloco.protocol.grace import MovingAverage

BUSY = 0.95
"""A link that is busy for less of the time carries the plan: a longer period costs more loss than
to be heard a little less often."""

LOOKS_WELL = 3
"""So many looks in a row must find room, before H or τ is made smaller."""

BODIES_A_LOOK = 4
"""Of each learner, at least, from one look to the next; and half of the least period at least."""

LEAD_TICKS = 2
"""A revision holds from so many ticks on: by then everybody has heard of it."""


@dataclass(frozen=True, slots=True)
class AdaptLimits:
    """What the user allows.

    Attributes:
        period: The least and the greatest H, steps.
        overlap: The least and the greatest τ, steps.
        carried_by: The share of the learners whose links must carry it, above 0 to 1. Who is beyond
            is asked as fast as its link goes.
    """

    period: tuple[int, int]
    overlap: tuple[int, int]
    carried_by: float = 0.75

    @property
    def periods(self) -> tuple[int, ...]:
        """H in powers of two times the least, and the greatest.

        >>> AdaptLimits((24, 120), (2, 8)).periods
        (24, 48, 96, 120)
        """
        period, most = self.period
        found = [period]
        while 2 * found[-1] < most:
            found.append(2 * found[-1])
        return tuple(found) if found[-1] == most else (*found, most)


@dataclass(frozen=True, slots=True)
class Revision:
    """H and τ from a tick on. Coordinator → shard → learner; the one of the highest number holds.

    Number 0 is what the run's settings say.
    """

    number: int
    tick: int
    period: int
    overlap: int

    def __str__(self) -> str:
        return f"H = {self.period}, τ = {self.overlap}"


@dataclass(frozen=True, slots=True)
class Demand:
    """Shard → coordinator: what its learners' links need, in steps of the fastest learner.

    Attributes:
        body: How long one body keeps a link busy, in the coarsest codec.
        answer: From asking for a body until it is here.
    """

    body: float
    answer: float


@dataclass(slots=True)
class Needs:
    """What is known of one learner's link, in seconds.

    Attributes:
        answer: Of its contributions: from asking until it is here.
        copy: Of published copies: one keeps its link busy for so long.
    """

    answer: MovingAverage = field(default_factory=MovingAverage)
    copy: MovingAverage = field(default_factory=MovingAverage)


def needed_by(carried_by: float, needs: Collection[float]) -> float:
    """What the given share of the learners can do with, of what each of them needs.

    >>> needed_by(0.75, [1.0, 9.0, 2.0, 1.5]), needed_by(0.75, [1.0, 9.0])
    (2.0, 9.0)
    """
    return sorted(needs)[max(1, ceil(carried_by * len(needs) - 1e-9)) - 1]


def demand_of(
    links: Sequence[tuple[float, float]], carried_by: float, step_seconds: float
) -> Demand | None:
    """What a shard's learners need; ``None``: nothing is known.

    Args:
        links: Of each learner of whom something is known, seconds: of a body in the coarsest codec,
            and of an answer.
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
    """The smallest H and τ that give enough time.

    Where the present H is too short, answers wait for each other: then τ goes by one body alone.

    Args:
        limits: What the user allows: the greatest if nothing is long enough.
        fragments: P: a link has H/P steps for a body.
        demand: What is needed.
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
    """The coordinator's part. It begins anew with each of its processes; the revision is kept.

    Attributes:
        demands: What each shard has said last.
        patience: With the present plan.
        looked_at: The clock at the last look.
    """

    demands: dict[int, Demand] = field(default_factory=dict)
    patience: Hysteresis = field(default_factory=lambda: Hysteresis(LOOKS_WELL))
    looked_at: int | None = None

    def told(self, shard: int, demand: Demand) -> None:
        """A shard says what its learners need."""
        self.demands[shard] = demand

    def look(
        self, clock: int, limits: AdaptLimits, present: Revision, fragments: int
    ) -> tuple[Revision, str] | None:
        """At a tick; perhaps another plan holds from soon on, and why.

        Args:
            clock: The furthest shard's.
            limits: What the user allows.
            present: The newest revision.
            fragments: P.
        """
        if self.looked_at is None or clock < self.looked_at:
            self.looked_at = clock
        if (
            clock - self.looked_at < ticks_apart(limits, present, fragments)
            or clock < present.tick
            or not self.demands
        ):
            return None
        self.looked_at = clock
        demand = Demand(
            max(each.body for each in self.demands.values()),
            max(each.answer for each in self.demands.values()),
        )
        now, told = (present.period, present.overlap), (limits, fragments, demand, present.period)
        enough = _larger(now, fitting(*told, busy=BUSY, filled=FITS))
        roomy = _smaller(now, fitting(*told, busy=FITS_WELL, filled=FITS_WELL))
        match self.patience.saw(late=enough != now, well=enough == now and roomy != now):
            case "coarser":
                return _revised(present, clock, enough), _why(demand, "is too much")
            case "finer":
                return _revised(present, clock, roomy), _why(demand, "leaves room")
            case _:
                return None


def ticks_apart(limits: AdaptLimits, present: Revision, fragments: int) -> int:
    """From one look to the next.

    >>> ticks_apart(AdaptLimits((24, 192), (2, 8)), Revision(1, 50, 192, 2), 24)
    32
    """
    return max(1, limits.period[0] // 2, BODIES_A_LOOK * present.period // fragments)


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
        f"a body keeps a link busy for {demand.body:.3g} steps, and is here {demand.answer:.3g} "
        f"steps after it is asked for: that {what}"
    )
