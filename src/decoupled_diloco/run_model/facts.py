"""The state of a `RunModel` as plain data, with the figures derived from it.

All instants are seconds since the run's first record. Two definitions are the basis of the numbers:

* An **outage** of a learner starts when its process ends, as recorded by the launcher. Without such
  a record it starts at the last record of the incarnation. It ends when the learner is **back**:
  when it has all global weights again (``Ready``) or, if that is not on the tape, at its next step.
* **Lost steps** are the steps that would have fit into a gap. A gap is a time between two steps of
  one incarnation that exceeds ``GAP_MEDIANS`` times the learner's median step. It counts as
  round(gap / median) - 1 lost steps, unless a fault injected into this learner caused it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from decoupled_diloco.protocol.messages import (
    Asking,
    Fold,
    Hello,
    KeepCheckpoint,
    Participant,
    Recovered,
    Revision,
    RoundFinished,
    RoundOpened,
    Scored,
    Version,
)
from decoupled_diloco.protocol.syncer_state import SiteTraffic
from decoupled_diloco.run_model.ledger import Ledger
from decoupled_diloco.run_model.phrases import Departure
from decoupled_diloco.tape import samples
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.samples import TookOver
from decoupled_diloco.units import format_duration

REMARKS_MAX = 500
"""Maximum number of remarks kept for a running run: the newest ones."""

REPEAT_SECONDS = 5.0
"""A remark that several processes make within this time is listed once."""

Keep = Literal["now", "run", "details"]
"""The scope of a model: the current state; also every step and round; also each round's details."""


RECENT_ROUNDS = 50
"""Number of merged rounds in the recent participation."""

RATE_SECONDS = 15.0
"""Length of the window for rates, before the latest record."""

RATE_POINTS_MIN = 5
"""Minimum number of points for a rate; the window is extended to contain them."""

STALLED_INTERVALS = 3.0
"""A rate is 0 after this many usual intervals without a new point."""

GAP_MEDIANS = 3.0
"""A learner counts as stalled in a gap between steps longer than this many median steps."""

STEP_FAULTS = ("pause", "slow", "clock-jump")
"""Injected faults that prevent a learner from stepping."""

LINK_FAULTS = ("vanish", "cut", "break", "throttle", "delay", "loss", "corrupt")
"""Injected faults of the links between processes."""

TOOK_PART = "took part"

NOT_ASKED = "not asked"

OUT_OF_REACH = "out of reach"

AWAY = "away"
"""Reasons why a learner was or was not in a merged round, in addition to the states of
`Participant`. *Not asked*: it was live but had no new step before the window closed. *Out of
reach*: it was live without a connection. *Away*: it was not live."""

_OTHERS = frozenset({"coordinator", "evaluator", "launcher", "logger", "mirror"})
"""Processes that are neither learners nor shards; ``launcher.NAME`` launches only that process."""

_SHARD = re.compile(r"shard-\d+")
"""The name of a shard, which is also the name of its primary process."""


class RunFacts:
    """The data of a `RunModel`; each fold fills in its subject."""

    def __init__(self, keep: Keep = "now") -> None:
        self.keep = keep
        self.record: Record  # the record that is being folded; ``at`` is its instant
        self.at = 0.0
        self.records = 0  # number of folded records
        self.started_wall = 0.0  # wall-clock time of the first record; instants count from it
        self.duration = 0.0  # instant of the latest record
        self.shards: dict[str, ShardLog] = {}
        self.learners: dict[str, LearnerLog] = {}
        self.observers: set[str] = set()
        self.settings: dict[str, Any] = {}  # public settings, preferably from a shard's tape
        self.revisions: dict[int, tuple[Revision, str]] = {}  # of H and τ, with reasons, by number
        self.virtual = False
        self.tokens = 0
        self.clock_rate = Rate()
        self.token_rate = Rate()
        self.evaluations: list[Evaluation] = []  # only the last one with ``keep="now"``
        self.faults: list[FaultLog] = []
        self.remarks: list[Remark] = []  # only the newest ones with ``keep="now"``
        self.remarks_made = 0
        self.warnings: dict[str, str] = {}  # warnings that need action, by subject
        self.checkpoint: tuple[float, KeepCheckpoint] | None = None
        self.sites: dict[str, SiteLog] = {}
        self.store: tuple[float, samples.StoreMirrored] | None = None  # the newest report
        self.store_state_at: float | None = None  # when its newest state was first reported
        self.headers: dict[str, dict[str, Any]] = {}
        self.releases: dict[str, str] = {}
        self.corpus: dict[str, Any] | None = None
        self.sample_text: str | None = None
        self.pictures: tuple[samples.GrayPicture, ...] = ()
        self.told_to_end: set[str] = set()  # asked to stop by the launcher, not restarted since
        self.stopped_by = ""  # the party that has ended the run before its budget was reached
        self.ends: dict[str, list[tuple[float, samples.ProcessEnded]]] = {}
        self.orders: dict[str, list[float]] = {}  # when each process was asked to stop
        self.spawns: dict[str, float] = {}
        self.left_out: Counter[str] = Counter()  # records that cannot be decoded, by reason
        self.problems: list[str] = []  # parts of the tape that could not be read
        self._bytes: dict[str, dict[int, samples.BytesMoved]] = {}
        self.fragments_seen = 0
        self._remarked: dict[str, float] = {}  # when each text was last remarked

    @property
    def whole(self) -> bool:
        """Whether every step and round is kept."""
        return self.keep != "now"

    @property
    def latest(self) -> float:
        """Wall-clock seconds of the latest record."""
        return self.started_wall + self.duration

    @property
    def finished(self) -> bool:
        """Whether every shard has seen the end of the run."""
        return bool(self.shards) and all(s.phase == "finished" for s in self.shards.values())

    @property
    def interrupted(self) -> bool:
        """Whether the launcher stopped the syncer before the run was finished."""
        return any(map(is_shard, self.told_to_end)) and not self.finished

    @property
    def step(self) -> int:
        """The furthest clock of the slowest shard, which a step budget is compared with."""
        return min((shard.clock_max for shard in self.shards.values()), default=0)

    @property
    def global_step(self) -> int:
        """The latest clock of any shard: the step at which something happens."""
        return max((shard.clock for shard in self.shards.values()), default=0)

    def global_step_by(self, at: float) -> int:
        """Return the latest clock of any shard at an instant, from a whole tape."""
        return max((shard.clock_by(at) for shard in self.shards.values()), default=0)

    @property
    def fragments(self) -> int:
        """P, from the run's settings or from the fragments that learners applied; 0 if unknown."""
        configured = self.settings_of("sync").get("fragments")
        return max(configured if isinstance(configured, int) else 0, self.fragments_seen)

    @property
    def has_devices(self) -> bool:
        """Whether the learners are devices, which are away most of the time."""
        return "devices" in self.settings_of("sync")

    @property
    def rounds_merged(self) -> int:
        return sum(shard.merged for shard in self.shards.values())

    @property
    def rounds_abandoned(self) -> int:
        return sum(shard.abandoned for shard in self.shards.values())

    @property
    def rounds(self) -> Iterator[RoundLog]:
        """All finished rounds that are kept, shard by shard."""
        return (round for shard in self.shards.values() for round in shard.rounds)

    @property
    def trained(self) -> dict[str, LearnerLog]:
        """The learners with records on a tape, other than that they were started."""
        return {name: learner for name, learner in self.learners.items() if learner.lives}

    @property
    def members(self) -> list[LearnerLog | ShardLog]:
        """All learners, then all shards."""
        return [*self.trained.values(), *self.shards.values()]

    @property
    def afar(self) -> list[str]:
        """The learners that only appear on the shards' tapes."""
        return [learner.name for learner in self.trained.values() if learner.afar]

    @property
    def outages(self) -> list[Outage]:
        """The outages of all learners and shards, in order of time."""
        every = [outage for member in self.members for outage in member.outages]
        return sorted(every, key=lambda outage: outage.down_at)

    @property
    def cuts(self) -> list[CutOff]:
        """The times in which learners could not reach the syncer, in order of time."""
        every = [cut for learner in self.learners.values() for cut in learner.cuts]
        return sorted(every, key=lambda cut: (cut.cut_at, cut.learner))

    @cached_property
    def training_span(self) -> tuple[float, float] | None:
        """The instants of the first and last step of any learner; valid for a whole tape."""
        steps = [at for learner in self.learners.values() for at in learner.steps_at]
        return (min(steps), max(steps)) if steps else None

    def participation_of(self, learner: LearnerLog) -> float | None:
        """Return the share of the run's merged rounds that include the learner's contribution."""
        merged = self.rounds_merged
        return learner.reasons[TOOK_PART] / merged if merged else None

    def settings_of(self, *tables: str) -> dict[str, Any]:
        """Return one table of the run's public settings, by its path; empty if it is not known."""
        found: Any = self.settings
        for table in tables:
            found = found.get(table) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def bytes_moved(self) -> dict[str, samples.BytesMoved]:
        """The bytes that each process has sent and received over all of its incarnations."""
        return {name: _sum_of(lives.values()) for name, lives in self._bytes.items()}

    def bytes_of(self, *, syncer: bool) -> samples.BytesMoved | None:
        """Return the bytes that all learners have sent and received.

        Args:
            syncer: Use the shards' counters instead of the learners'.
        """
        moved, whose = self.bytes_moved, self.shards if syncer else self.learners
        parts = [
            b.seen_from_there if syncer else b for process, b in moved.items() if process in whose
        ]
        return _sum_of(parts) if parts else None

    @property
    def bytes_total(self) -> samples.BytesMoved | None:
        """The bytes that all learners together have sent and received.

        If the learners' tapes are not available, the shards' counters are used. They include the
        small traffic of an evaluator.
        """
        return self.bytes_of(syncer=bool(self.afar))

    def leave_out(self, why: str) -> None:
        """Count a record that cannot be decoded, and remark on the first one for each reason."""
        process = self.record.process
        if not self.left_out[f"{process}: {why}"]:
            self.remark("", f"a record of {process} is skipped: {why}")
        self.left_out[f"{process}: {why}"] += 1

    def learner(self, name: str) -> LearnerLog:
        """Return the learner of this name, and create it if necessary."""
        if name not in self.learners:
            self.learners[name] = LearnerLog(name)
        return self.learners[name]

    def observe_only(self, name: str) -> None:
        """Record that a process with a learner's name is an observer."""
        self.observers.add(name)
        self.learners.pop(name, None)

    def count_tokens(self, learner: LearnerLog) -> None:
        """Add a learner's new tokens to the total of the run."""
        tokens = learner.tokens
        self.tokens += tokens - learner.tokens_counted
        learner.tokens_counted = tokens

    def remark(self, subject: str, text: str) -> None:
        """Add a remark, unless it is empty or was made within the last `REPEAT_SECONDS`."""
        if not text:
            return
        before = self._remarked.get(text)
        self._remarked[text] = at = self.at
        if before is not None and at - before <= REPEAT_SECONDS:
            return
        if len(self._remarked) > REMARKS_MAX:
            self._remarked = {t: w for t, w in self._remarked.items() if at - w <= REPEAT_SECONDS}
        self.remarks_made += 1
        self.remarks.append(Remark(at, self.record.process, subject, self.record.type, text))
        if not self.whole:
            del self.remarks[:-REMARKS_MAX]


def _sum_of(parts: Iterable[samples.BytesMoved]) -> samples.BytesMoved:
    return samples.BytesMoved(*map(sum, zip(*map(dataclasses.astuple, parts), strict=True)))


class Rate:
    """A rate per second of a running total, over the last ``RATE_SECONDS``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def clear(self) -> None:
        self._points.clear()

    def add(self, at: float, total: float) -> None:
        """Record the running total at an instant."""
        self._points.append((at, total))
        while len(self._points) > RATE_POINTS_MIN and self._points[1][0] < at - RATE_SECONDS:
            self._points.popleft()

    @property
    def settled(self) -> bool:
        """Whether the rate covers more than a process's first, slow steps."""
        return len(self._points) >= RATE_POINTS_MIN

    def per_second(self, now: float | None = None) -> float | None:
        """Return the rate; ``None`` with too few points, 0 if new points have stopped."""
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return None
        (since, before), (until, after) = self._points[0], self._points[-1]
        usual = (until - since) / (len(self._points) - 1)
        if now is not None and now - until > max(RATE_SECONDS, STALLED_INTERVALS * usual):
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
    loss: float | None  # None if it was not finite
    tokens: int
    # the workload's other measurements, and those of the average of the weights (`average_…`)
    metrics: tuple[tuple[str, float | None], ...] = ()

    @property
    def average_loss(self) -> float | None:
        """The loss of the average of the weights; None if it was not evaluated."""
        return dict(self.metrics).get("average_loss")


@dataclass(frozen=True, slots=True)
class Remark:
    """An event of the run that outputs list as one line."""

    at: float
    process: str  # the process that wrote the record
    subject: str  # the process that it is about; "" if none
    kind: str  # the type of the record
    text: str


@dataclass(slots=True)
class FaultLog:
    """An injected fault; an infinite ``end`` means that it lasts to the end of the run."""

    kind: str
    target: str
    processes: tuple[str, ...]
    begin: float
    end: float = math.inf


@dataclass(frozen=True, slots=True)
class Outage:
    """A process that died."""

    process: str
    down_at: float
    how: str  # "killed (SIGKILL)", "ended with exit code 4", "fell silent"
    global_step: int  # of the run, at that time
    restarted_at: float | None  # when its next process was started; None if none was
    back_at: float | None  # when it took part again; None if it did not
    lost_steps: dict[str, int]  # of each other live learner, between down_at and back_at

    @property
    def seconds(self) -> float | None:
        return None if self.back_at is None else self.back_at - self.down_at

    @property
    def down_seconds(self) -> float | None:
        """Seconds without a process, until the next one started to join."""
        return None if self.restarted_at is None else self.restarted_at - self.down_at


@dataclass(frozen=True, slots=True)
class CutOff:
    """An interval in which a learner continued to step but shards received no report."""

    learner: str
    cut_at: float  # when a shard last received a message from it
    back_at: float | None  # when all shards counted it as live again; None if they did not
    steps: int  # the learner's steps in the interval
    rounds_merged: int  # in the interval
    rounds_missed: int  # merged rounds without its contribution
    lost_steps: dict[str, int]  # of each other live learner, in the interval

    @property
    def seconds(self) -> float | None:
        return None if self.back_at is None else self.back_at - self.cut_at


@dataclass(slots=True)
class ProcessLife:
    """One incarnation of a process, from its start record to its last record."""

    started_at: float
    last_at: float
    steps_at: list[float] = field(default_factory=list)  # ends of steps; only for a whole tape
    ready_at: float | None = None
    over: bool = False  # the process saw the end of the run
    spawned_at: float | None = None  # when the launcher started it, before its first record
    ended_at: float | None = None
    crashed: bool = False  # it ended neither at the end of the run nor on purpose
    step_tokens: list[int] = field(default_factory=list)  # for each of ``steps_at``
    holds: list[tuple[float, float]] = field(default_factory=list)  # ``Hold`` to ``Release``
    ledger: Ledger = field(default_factory=Ledger)  # the fate of its tokens
    steps: int = 0  # from its own tape; ``tokens`` likewise
    tokens: int = 0
    reported: tuple[int, int] = (0, 0)  # the largest steps and tokens reported to a shard
    overwritten: int | None = None  # fragment tokens as reported; None if ``ledger`` is complete

    burst_from: int = 0  # start in ``steps_at`` of the steps that shards received at once
    burst_step_seconds: float = 0.0  # seconds per step in the burst, as reported by the learner

    def spread_burst(self) -> None:
        """Spread steps that were reported at once evenly before the last one.

        While the syncer's machine sleeps, its learners continue to step. When it wakes up, all of
        their reports arrive at one instant.
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
        """When the process was started: by the launcher's record, otherwise its start record."""
        return self.started_at if self.spawned_at is None else self.spawned_at

    @property
    def unrecorded(self) -> tuple[int, int]:
        """Steps and tokens that it reported to shards but lost from its tape in a crash."""
        return (max(0, self.reported[0] - self.steps), max(0, self.reported[1] - self.tokens))

    def holds_between(self, begin: float, end: float) -> list[tuple[float, float]]:
        """Return the holds that overlap this interval, clipped to it, in order."""
        first = max(0, bisect.bisect_right(self.holds, (begin, math.inf)) - 1)
        last = bisect.bisect_left(self.holds, (end,))
        return [(max(a, begin), min(b, end)) for a, b in self.holds[first:last] if b > begin]


@dataclass
class LearnerLog:
    """One learner, over all shards and incarnations."""

    name: str
    lives: list[ProcessLife] = field(default_factory=list)  # from its own tape, if available
    epoch: int = 0  # its newest incarnation, counted by the coordinator
    process: str = ""  # "" (unknown), joining, training, restarting, down, finished
    has_tape: bool = False
    down_at: float | None = None  # when its process ended, until it is back
    device: str = ""  # description of the device of its newest incarnation
    left: str = ""  # reason of its newest incarnation when it left on purpose
    supervised: bool = False  # a launcher records how its processes end
    ends: Counter[Departure] = field(default_factory=Counter)  # of its processes, by the launcher
    departures: dict[int, Departure] = field(default_factory=dict)  # by incarnation, at the shards
    site: str = ""  # the relay through which it has connected last, if any
    cut_from: set[str] = field(default_factory=set)  # shards that no longer count it as live
    cut_at: float = 0.0  # since when
    seen_at: float | None = None
    stepped_at: float | None = None
    steps_of: dict[int, int] = field(default_factory=dict)  # by incarnation, as reported
    tokens_of: dict[int, int] = field(default_factory=dict)
    discarded_of: dict[int, int] = field(default_factory=dict)
    life_of: dict[int, ProcessLife] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    tokens_counted: int = 0  # the part of its tokens that the run's total includes
    loss: float | None = None
    losses: list[LossPoint] = field(default_factory=list)
    losses_not_finite: int = 0
    scored: Scored | None = None  # its newest score, by any shard
    discarded: Counter[tuple[str, str]] = field(default_factory=Counter)  # by mode and reason
    bytes_up: int = 0
    recoveries: list[Recovered] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # merged rounds by `reason_of`
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
    accepted_at: float | None = None
    accepted_step: int | None = None
    accepted: dict[str, int] = field(default_factory=dict)
    """For each shard, the number of its merged rounds when this learner was last in one."""
    merges: dict[int, int] = field(default_factory=dict)
    """With differential privacy, the merges of each fragment that count for this learner."""
    evictions: list[tuple[float, str, str]] = field(default_factory=list)  # instant, shard, reason
    outages: list[Outage] = field(default_factory=list)
    cuts: list[CutOff] = field(default_factory=list)
    disturbed: list[tuple[float, float]] = field(default_factory=list)  # by injected faults

    @property
    def failures(self) -> int:
        """How often it failed: its process crashed, or its lease ran out."""
        return self._count("failed")

    @property
    def preemptions(self) -> int:
        """How often it was asked to stop, but not by the launcher, and left in order."""
        return self._count("preempted")

    def _count(self, kind: Departure) -> int:
        return self.ends[kind] if self.supervised else [*self.departures.values()].count(kind)

    @property
    def afar(self) -> bool:
        """Whether its tape is not available, so that all facts come from the shards' tapes."""
        return not self.has_tape

    @property
    def steps(self) -> int:
        """Its steps over all incarnations: the larger count of the syncer and its own tape."""
        own = sum(life.steps + life.unrecorded[0] for life in self.lives)
        return max(sum(self.steps_of.values()), own)

    @property
    def steps_unrecorded(self) -> int:
        """Steps that only the shards recorded, because the learner's process was killed."""
        return sum(life.unrecorded[0] for life in self.lives)

    @property
    def tokens(self) -> int:
        """Its tokens over all incarnations: the larger count of the syncer and its own tape."""
        own = sum(life.tokens + life.unrecorded[1] for life in self.lives)
        return max(sum(self.tokens_of.values()), own)

    @property
    def discarded_fragment_tokens(self) -> int:
        """Overwritten tokens, summed over fragments: each token counts up to P times."""
        return max(sum(self.discarded_of.values()), sum(self.discarded.values()))

    @property
    def steps_at(self) -> list[float]:
        return [at for life in self.lives for at in life.steps_at]

    @cached_property
    def step_seconds_median(self) -> float | None:
        """Median seconds from one step to the next; valid after the tape is read."""
        gaps = [b - a for a, b in self._gaps()]
        return statistics.median(gaps) if gaps else None

    @cached_property
    def gap_seconds_longest(self) -> float | None:
        """The longest time from one step to the next within an incarnation, without outages."""
        return max((b - a for a, b in self._gaps()), default=None)

    def lost_steps(self, since: float, until: float) -> int:
        """Return the lost steps in gaps that overlap this interval; see the module's docstring."""
        median = self.step_seconds_median
        if not median:
            return 0
        gaps, latest_ends = self._long_gaps
        first = bisect.bisect_right(latest_ends, since)
        after = bisect.bisect_left(gaps, (until,))
        found = [(a, b) for a, b in gaps[first:after] if b > since]
        life = self.lives[-1]
        last = life.steps_at[-1:]
        until = until if life.ended_at is None else min(until, life.ended_at)
        # A gap at the end of the tape is still open: it has no next step.
        if last and last[0] < until and not life.over:
            found.append((max(last[0], since), until))
        found = [gap for gap in found if not self._was_disturbed(*gap)]
        return sum(round((b - a) / median) - 1 for a, b in found if b - a > GAP_MEDIANS * median)

    def _was_disturbed(self, begin: float, end: float) -> bool:
        """Return whether a gap overlaps a fault of this learner, or the few steps after it."""
        settling = GAP_MEDIANS * (self.step_seconds_median or 0.0)
        return any(a < end and begin < b + settling for a, b in self.disturbed)

    @cached_property
    def _long_gaps(self) -> tuple[list[tuple[float, float]], list[float]]:
        """The gaps with lost steps, sorted by start, and for each the latest end so far.

        The latest ends never decrease, so `lost_steps` can search both lists by bisection.
        """
        limit = GAP_MEDIANS * (self.step_seconds_median or math.inf)
        gaps = sorted((a, b) for a, b in self._gaps() if b - a > limit)
        return gaps, list(accumulate((b for _, b in gaps), max))

    def _gaps(self) -> Iterator[tuple[float, float]]:
        return (gap for life in self.lives for gap in pairwise(life.steps_at))


@dataclass(slots=True)
class Asked:
    """One request for a contribution: when, its identity, and why the learner qualified."""

    at: float
    name: Asking
    why: str


@dataclass(slots=True)
class SumLog:
    """A sum of a relay, or what a relay had without a sum when its connection broke."""

    relay: str
    fragment: int
    number: int  # as the relay counts the sums of the fragment; 0: there was no sum
    at: float  # when it arrived or failed
    asks: tuple[Asking, ...]
    nbytes: int = 0
    relayed_bytes: int = 0  # size of its contributions, as they arrived at the relay
    upstream: str = ""  # the relay that has received it; empty: the shard
    problem: str = ""  # why its contributions are void; empty if they count


@dataclass(slots=True)
class Relayed:
    """A contribution that a relay has, and that is in no sum yet."""

    fragment: int
    relay: str
    nbytes: int


@dataclass(slots=True)
class RoundLog:
    """One round of a shard."""

    shard: str
    number: int
    fragment: int
    opened_at: float
    opened: RoundOpened | None = None  # None if the tape does not contain the event
    asks: dict[str, list[Asked]] = field(default_factory=dict)  # several if a learner came back
    folds: dict[Asking, tuple[float, Fold]] = field(default_factory=dict)  # in fold order
    fallen: dict[str, tuple[float, str]] = field(default_factory=dict)  # abandoned: when and why
    sums: list[SumLog] = field(default_factory=list)  # of its fragment, since the version before
    merging_at: float | None = None  # when everything was in and the merge started
    finished_at: float = math.inf  # infinity if it is not finished
    result: RoundFinished | None = None
    live: dict[str, float | None] = field(default_factory=dict)
    """The learners that were live when its window closed and connected when it ended, with the time
    of each one's last step report."""
    unreachable: tuple[str, ...] = ()  # live without a connection
    late_bodies: dict[str, float] = field(default_factory=dict)  # payloads that came after the end
    held_at: dict[str, float] = field(default_factory=dict)  # when each learner had the version
    life: int = 1  # incarnation of the shard, from 1; each counts its rounds from the start

    @property
    def tick(self) -> int | None:
        """The global step at which it was due."""
        event = self.result or self.opened
        return None if event is None else event.tick

    @property
    def outcome(self) -> RoundFinished:
        """The shard's record of its end; valid once it is finished."""
        assert self.result is not None, f"round {self.number} of {self.shard} is not finished"
        return self.result

    @property
    def closed_at(self) -> float | None:
        """When its window closed; valid once it is finished."""
        closed = self.outcome.closed_seconds
        return None if closed is None else self.opened_at + closed

    @property
    def merged(self) -> bool:
        """Whether it is finished with a new version."""
        return self.result is not None and self.result.verdict == "merged"

    @property
    def fate(self) -> Literal["merged", "abandoned", "idle"]:
        """How it ended: "idle" if no learner had anything new, as at the end of a run."""
        if self.merged:
            return "merged"
        return "abandoned" if self.outcome.given_up else "idle"

    @property
    def folded(self) -> list[Participant]:
        """The contributions in it; valid once it is finished."""
        return [each for each in self.outcome.participants if each.state == "folded"]

    def reason_of(self, learner: str) -> str:
        """Return `TOOK_PART`, or why a learner was not in it; valid once it is finished."""
        for participant in self.outcome.participants:  # a learner's folded contribution comes first
            if participant.learner == learner:
                return TOOK_PART if participant.state == "folded" else participant.state
        if learner in self.live:
            return NOT_ASKED
        return OUT_OF_REACH if learner in self.unreachable else AWAY

    def summed_up(self) -> RoundLog:
        """Return a copy without per-learner details, to save memory with thousands of learners."""
        identity = (self.shard, self.number, self.fragment, self.opened_at)
        return RoundLog(*identity, finished_at=self.finished_at, result=self.result, life=self.life)


@dataclass(slots=True)
class Stay:
    """A learner's membership at one shard, from admission to eviction, with the reasons."""

    learner: str
    epoch: int
    since: float
    why: str = ""
    until: float = math.inf
    reason: str = ""
    connected: bool = True
    step: int = 0
    offset: int = 0
    step_seconds: float = 0.0
    reported_at: float | None = None
    held: dict[int, Version] = field(default_factory=dict)
    relay: str = ""  # through which it is connected

    @property
    def run_step(self) -> int:
        """s_m: the run step that the shard assigned at the join, plus its own steps since."""
        return self.offset + self.step


@dataclass(frozen=True, slots=True)
class TickLog:
    """A step of the shard's clock; ``setter`` is the learner whose report moved it.

    ``before`` is ``None`` for the first tick of a restarted shard, because the tape does not
    contain the clock that its learners reported. ``life`` is as in `RoundLog`.
    """

    at: float
    clock: int
    before: int | None
    live: int
    setter: str
    why: str
    life: int = 1


@dataclass
class ShardLog:
    """One shard of the syncer."""

    name: str
    phase: str = "starting"  # of its process and its part of the run
    lives: list[ProcessLife] = field(default_factory=list)
    terms: list[int] = field(default_factory=list)  # terms granted to it, in order
    clock: int = 0  # of its current incarnation, which may be behind after a restart
    clock_max: int = 0  # the furthest of all incarnations, which the coordinator uses for a budget
    heard_at: float | None = None
    merged: int = 0
    abandoned: int = 0
    members: dict[str, Stay] = field(default_factory=dict)
    departed: list[Stay] = field(default_factory=list)  # since the oldest open round started
    stays: list[Stay] = field(default_factory=list)  # all memberships; only for a whole tape
    versions: dict[int, Version] = field(default_factory=dict)
    open: dict[int, RoundLog] = field(default_factory=dict)
    rounds: list[RoundLog] = field(default_factory=list)  # finished rounds
    lost: list[RoundLog] = field(default_factory=list)  # rounds open when its process ended
    ticks: list[TickLog] = field(default_factory=list)
    reports: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # run step and when
    moved: tuple[int, list[tuple[str, int, int]]] = field(default_factory=lambda: (-1, []))
    """The ``seq`` of the latest record with step reports, and its learners with their run steps
    before and after."""
    last_merged: dict[int, RoundLog] = field(default_factory=dict)
    paths: dict[str, tuple[int, str]] = field(default_factory=dict)
    folds: dict[int, dict[Asking, tuple[float, Fold]]] = field(default_factory=dict)
    """By fragment, the contributions folded for its next version, here or at a relay."""
    sums: dict[int, list[SumLog]] = field(default_factory=dict)  # by fragment, likewise
    relayed: dict[Asking, Relayed] = field(default_factory=dict)
    relays: dict[str, str] = field(default_factory=dict)
    """The connected relays, each with the relay before it; empty: there is none."""
    greeting: tuple[int, Hello, str] | None = None  # latest connection, its ``Hello`` and relay
    outages: list[Outage] = field(default_factory=list)

    @property
    def index(self) -> int:
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    @property
    def life(self) -> int:
        """The number of its current incarnation, from 1."""
        return max(1, len(self.lives))

    def clock_by(self, at: float) -> int:
        index = bisect.bisect_right(self.ticks, at, key=lambda tick: tick.at)
        return self.ticks[index - 1].clock if index else 0

    def ticks_of(self, life: int) -> list[TickLog]:
        """Return the ticks of one of its incarnations."""
        return [tick for tick in self.ticks if tick.life == life]

    def clock_setter(self, cause: int | None, clock: int, quorum: int) -> str:
        """Return the learner whose report moved the clock: the K-th that reached it; "" if none."""
        seq, moved = self.moved
        reached_now = [name for name, before, step in moved if before < clock <= step]
        if seq != cause or not reached_now:
            return ""
        reached = sum(member.run_step >= clock for member in self.members.values())
        others = reached - sum(name in self.members for name in reached_now)
        return reached_now[min(max(quorum - others, 1), len(reached_now)) - 1]

    def reports_of(self, life: int, learner: str) -> list[tuple[int, float]]:
        """Return the step reports of a learner to one of its incarnations."""
        starts = [own.started_at for own in self.lives]
        since = starts[life - 1] if 1 < life <= len(starts) else -math.inf
        until = starts[life] if life < len(starts) else math.inf
        return [(step, at) for step, at in self.reports.get(learner, []) if since <= at < until]


def is_shard(process: str) -> bool:
    """Whether a process is a shard of the syncer, by its name."""
    return _SHARD.fullmatch(process) is not None


def is_learner(process: str) -> bool:
    """Whether a process is a learner, by its name."""
    is_other = process.startswith(("shard-", "relay-"))
    return process.partition(".")[0] not in _OTHERS and not is_other


@dataclass
class SiteLog:
    """A site, with the time of its relay.

    Attributes:
        learners: Its learners according to the run's file; empty if the file does not list it.
        traffic: What its relay has sent to all shards.
        connected: When its relay was connected to any shard: begin and end; the last one may be
            infinite.
        sums_at: When each of its accepted sums arrived; only for a whole tape.
        lost_at: When a shard has lost it last.
    """

    learners: tuple[str, ...] = ()
    traffic: SiteTraffic = field(default_factory=SiteTraffic)
    connected: list[list[float]] = field(default_factory=list)
    sums_at: list[float] = field(default_factory=list)
    lost_at: float | None = None


class Acting:
    """Follows which process acts for each shard, record by record."""

    def __init__(self) -> None:
        self._process: dict[str, str] = {}

    def took_over(self, value: TookOver) -> str:
        """Record that a process acts from now on; return a remark, empty for the first process."""
        self._process[f"shard-{value.shard}"] = value.process
        if value.claim == 1:
            return ""
        silent = format_duration(value.waited_seconds)
        return (
            f"{value.process} acts for shard {value.shard} by claim {value.claim}: "
            f"the previous claim was last renewed {silent} ago"
        )

    def name_of(self, process: str) -> str:
        """Return the name for a process's start and end: its shard's name if it acts for one.

        >>> acting = Acting()
        >>> acting.took_over(TookOver("shard-1-standby", 1, 1, 0.0))
        ''
        >>> [acting.name_of(name) for name in ("shard-1-standby", "shard-1", "learner-0")]
        ['shard-1', 'shard-1, standing by', 'learner-0']
        """
        shard = _SHARD.match(process)
        if shard is None or shard[0] not in self._process:
            return process
        return shard[0] if self._process[shard[0]] == process else f"{process}, standing by"
