"""What a `RunModel` remembers of a run, as plain data.

All instants are seconds since the run's first record. Two definitions that the numbers rest on:

* An **outage** of a learner begins when its process ends (as the launcher saw it, else at the last
  record of that life) and is over when it is **back**: when it holds all global weights again
  (``Ready``), or, if that is not on the tape, at its next step.
* **Lost steps**: a gap between two steps of one life that is longer than ``GAP_MEDIANS`` times the
  learner's median step counts as the steps that would have fitted in, one less than the gap divided
  by the median, rounded. Not what a fault on purpose kept it from itself: that is the fault.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from decoupled_diloco.observe.ledger import Ledger
from decoupled_diloco.protocol.effects import Recovered

RECENT_ROUNDS = 50
"""How many merged rounds the recent participation looks back."""

RATE_SECONDS = 15.0
"""Rates are those of this much time before the latest record."""

RATE_POINTS_MIN = 5
"""But of at least so many points, however far apart they are."""

STANDING_INTERVALS = 3.0
"""After so many of the usual intervals without a new point nothing comes any more."""

GAP_MEDIANS = 3.0
"""Gaps between steps longer than this many median steps count as standing still."""

STEP_FAULTS = ("pause", "slow", "clock-jump")
"""Faults on purpose that keep a learner from stepping."""

LINK_FAULTS = ("vanish", "cut", "break", "throttle", "delay", "loss", "corrupt")
"""Faults on purpose of the wires between processes."""

TOOK_PART = "took part"
NOT_ASKED = "not asked"
OUT_OF_REACH = "out of reach"
AWAY = "away"
"""Why a learner was (not) in a merged round; besides the states of `Participant`: *not asked* is a
live learner that had no new step before the window closed, *out of reach* one that was live without
a connection, *away* one that was not live."""


class Rate:
    """How much of something there is per second, over the last ``RATE_SECONDS``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def clear(self) -> None:
        self._points.clear()

    def add(self, at: float, total: float) -> None:
        """Notes the running total at an instant."""
        self._points.append((at, total))
        while len(self._points) > RATE_POINTS_MIN and self._points[1][0] < at - RATE_SECONDS:
            self._points.popleft()

    @property
    def settled(self) -> bool:
        """Whether it rests on more than a process's first, slow steps."""
        return len(self._points) >= RATE_POINTS_MIN

    def per_second(self, now: float | None = None) -> float | None:
        """The rate, ``None`` when there is too little to tell; 0 if nothing comes any more."""
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return None
        (since, before), (until, after) = self._points[0], self._points[-1]
        usual = (until - since) / (len(self._points) - 1)
        if now is not None and now - until > max(RATE_SECONDS, STANDING_INTERVALS * usual):
            return 0.0
        return (after - before) / (until - since)


@dataclass(frozen=True, slots=True)
class LossPoint:
    """A learner's training loss at one step."""

    at: float
    global_step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the global weights."""

    at: float
    global_step: int
    loss: float | None  # None: it was not finite
    tokens: int
    metrics: tuple[tuple[str, float | None], ...] = ()  # what else the workload measures, by name


@dataclass(frozen=True, slots=True)
class Remark:
    """Something worth a line."""

    at: float
    who: str  # the process that told it
    subject: str  # the process that it is about; "": none
    kind: str  # the type of the record that it comes from
    text: str


@dataclass(slots=True)
class FaultLog:
    """A fault on purpose; one that ends at infinity lasts to the run's end."""

    kind: str
    target: str
    processes: tuple[str, ...]
    begin: float
    end: float = math.inf


@dataclass(frozen=True, slots=True)
class Outage:
    """A process that died."""

    who: str
    down_at: float
    how: str  # in words: "killed (SIGKILL)", "ended with exit code 4", "fell silent"
    global_step: int  # of the run, at that time
    restarted_at: float | None  # when its next process was started; None: none was
    back_at: float | None  # when it took part again; None: it did not
    lost_steps: dict[str, int]  # of each learner that lived, between down_at and back_at

    @property
    def seconds(self) -> float | None:
        return None if self.back_at is None else self.back_at - self.down_at

    @property
    def down_seconds(self) -> float | None:
        """How long there was no process, before the next one that then had to join."""
        return None if self.restarted_at is None else self.restarted_at - self.down_at


@dataclass(frozen=True, slots=True)
class CutOff:
    """A learner that lived and stepped on while shards did not hear of it."""

    learner: str
    cut_at: float  # when a shard had last heard of it
    back_at: float | None  # when every shard counted on it again; None: none did before its end
    steps: int  # its own, meanwhile
    rounds_merged: int  # meanwhile
    rounds_missed: int  # those of them that it was not in
    lost_steps: dict[str, int]  # of each other learner that lived, meanwhile

    @property
    def seconds(self) -> float | None:
        return None if self.back_at is None else self.back_at - self.cut_at


@dataclass(slots=True)
class ProcessLife:
    """One life of a process, from its start record to its last record."""

    started_at: float
    last_at: float
    steps_at: list[float] = field(default_factory=list)  # ends of steps, of a whole tape
    ready_at: float | None = None
    over: bool = False  # the run was over for it
    spawned_at: float | None = None  # when the launcher started it, before its first record
    ended_at: float | None = None
    crashed: bool = False  # it ended otherwise than at the end of the run or on purpose
    step_tokens: list[int] = field(default_factory=list)  # of each of ``steps_at``
    holds: list[tuple[float, float]] = field(default_factory=list)  # ``Hold`` to ``Release``
    ledger: Ledger = field(default_factory=Ledger)  # what became of its tokens
    steps: int = 0  # as far as its own tape tells; ``tokens`` likewise
    tokens: int = 0
    told: tuple[int, int] = (0, 0)  # the most steps and tokens that a shard heard of
    overwritten: int | None = None  # fragment tokens, as shards tell; None: ``ledger`` knows more

    burst_from: int = 0  # where in ``steps_at`` those begin that were told at once, as shards tell
    burst_step_seconds: float = 0.0  # how long a step took meanwhile, as the learner says

    def spread_burst(self) -> None:
        """Moves steps that were told at once to where they were made: evenly before the last one.

        While the syncer's machine is asleep its learners step on, and all of their reports are
        there at one instant afterwards.
        """
        first, count = self.burst_from, len(self.steps_at) - self.burst_from
        if first == 0 or count < 2:
            return
        until = self.steps_at[-1]
        since = max(self.steps_at[first - 1], until - count * self.burst_step_seconds)
        if since < self.steps_at[first]:
            each = (until - since) / count
            self.steps_at[first:] = [since + each * (k + 1) for k in range(count)]

    @property
    def began_at(self) -> float:
        """When the process was started, as far as the tape says."""
        return self.started_at if self.spawned_at is None else self.spawned_at

    @property
    def unrecorded(self) -> tuple[int, int]:
        """Steps and tokens that shards heard of, and that it did not live to write down."""
        return (max(0, self.told[0] - self.steps), max(0, self.told[1] - self.tokens))

    def holds_between(self, begin: float, end: float) -> list[tuple[float, float]]:
        """The holds that reach into this time, cut off at its ends, in order."""
        first = max(0, bisect.bisect_right(self.holds, (begin, math.inf)) - 1)
        last = bisect.bisect_left(self.holds, (end,))
        return [(max(a, begin), min(b, end)) for a, b in self.holds[first:last] if b > begin]


@dataclass
class LearnerLog:
    """One learner, over all shards and lives."""

    name: str
    lives: list[ProcessLife] = field(default_factory=list)  # of its own tape, if that is here
    epoch: int = 0  # its newest life, counted by the coordinator
    process: str = ""  # "" (not known), joining, training, restarting, down, finished
    has_tape: bool = False
    down_at: float | None = None  # when its process ended, until it is back
    device: str = ""  # what its newest life trains on, in words
    left: str = ""  # what its newest life said when it left on purpose
    cut_from: set[str] = field(default_factory=set)  # shards that no longer count on it
    cut_at: float = 0.0  # since when, while it is not down
    seen_at: float | None = None
    stepped_at: float | None = None
    steps_of: dict[int, int] = field(default_factory=dict)  # of each epoch, as reported
    tokens_of: dict[int, int] = field(default_factory=dict)
    discarded_of: dict[int, int] = field(default_factory=dict)
    life_of: dict[int, ProcessLife] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    tokens_counted: int = 0  # of its tokens, what the total of the run holds
    loss: float | None = None
    losses: list[LossPoint] = field(default_factory=list)
    losses_not_finite: int = 0
    discarded: Counter[tuple[str, str]] = field(default_factory=Counter)  # by mode and reason
    bytes_up: int = 0
    recoveries: list[Recovered] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # rounds it was in, or why not
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
    accepted_at: float | None = None
    accepted_step: int | None = None
    accepted: dict[str, int] = field(default_factory=dict)
    """For each shard, how many rounds it had merged when this learner was last in one."""
    evictions: list[tuple[float, str, str]] = field(default_factory=list)  # when, which shard, why
    outages: list[Outage] = field(default_factory=list)
    cuts: list[CutOff] = field(default_factory=list)
    disturbed: list[tuple[float, float]] = field(default_factory=list)  # by faults on purpose

    @property
    def afar(self) -> bool:
        """Whether its tape is not here, and all this is what the shards heard of it."""
        return not self.has_tape

    @property
    def steps(self) -> int:
        """Own steps of all lives, as far as the syncer or its own tape knows."""
        own = sum(life.steps + life.unrecorded[0] for life in self.lives)
        return max(sum(self.steps_of.values()), own)

    @property
    def steps_unrecorded(self) -> int:
        """Steps that only the shards have heard of, because their process was killed."""
        return sum(life.unrecorded[0] for life in self.lives)

    @property
    def tokens(self) -> int:
        """Tokens of all lives, as far as the syncer or its own tape knows."""
        own = sum(life.tokens + life.unrecorded[1] for life in self.lives)
        return max(sum(self.tokens_of.values()), own)

    @property
    def discarded_fragment_tokens(self) -> int:
        """Tokens that were overwritten, summed over fragments: the run's P times too many."""
        return max(sum(self.discarded_of.values()), sum(self.discarded.values()))

    @property
    def steps_at(self) -> list[float]:
        return [at for life in self.lives for at in life.steps_at]

    @cached_property
    def step_seconds_median(self) -> float | None:
        """Median seconds from one step to the next, once the tape is read."""
        gaps = [b - a for a, b in self._gaps()]
        return statistics.median(gaps) if gaps else None

    @cached_property
    def gap_seconds_longest(self) -> float | None:
        """The longest time from one step to the next within a life: outages are not counted."""
        return max((b - a for a, b in self._gaps()), default=None)

    def lost_steps(self, since: float, until: float) -> int:
        """Steps that are missing in gaps that reach into this time; see the head of this file."""
        median = self.step_seconds_median
        if not median:
            return 0
        gaps, latest_ends = self._long_gaps
        first = bisect.bisect_right(latest_ends, since)
        after = bisect.bisect_left(gaps, (until,))
        found = [(a, b) for a, b in gaps[first:after] if b > since]
        life = self.lives[-1]
        last = life.steps_at[-1:]
        until = until if life.ended_at is None else min(until, life.ended_at)  # it may have left
        if last and last[0] < until and not life.over:
            found.append((max(last[0], since), until))
        found = [gap for gap in found if not self._was_disturbed(*gap)]
        return sum(round((b - a) / median) - 1 for a, b in found if b - a > GAP_MEDIANS * median)

    def _was_disturbed(self, begin: float, end: float) -> bool:
        """Whether a gap is a fault of its own, or of the few steps in which that ends."""
        settling = GAP_MEDIANS * (self.step_seconds_median or 0.0)
        return any(a < end and begin < b + settling for a, b in self.disturbed)

    @cached_property
    def _long_gaps(self) -> tuple[list[tuple[float, float]], list[float]]:
        """The gaps that lose steps, by their beginnings, and for each the latest end so far."""
        limit = GAP_MEDIANS * (self.step_seconds_median or math.inf)
        gaps = sorted((a, b) for a, b in self._gaps() if b - a > limit)
        return gaps, list(accumulate((b for _, b in gaps), max))

    def _gaps(self) -> Iterator[tuple[float, float]]:
        return (gap for life in self.lives for gap in pairwise(life.steps_at))
