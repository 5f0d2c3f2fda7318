"""What happened in a run, from one pass over its event tape.

`read_history` works on the tape of real processes and of virtual worlds alike. All instants are
seconds since the run's first record. Two definitions that the numbers rest on:

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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

from decoupled_diloco.observe.ledger import Ledger
from decoupled_diloco.observe.samples import BytesMoved, FaultInjected
from decoupled_diloco.protocol.effects import RoundFinished

Fate = Literal["merged", "abandoned", "idle"]

GAP_MEDIANS = 3.0
"""Gaps between steps longer than this many median steps count as standing still."""

STEP_FAULTS = ("pause", "slow", "clock-jump")
"""Faults on purpose that keep a learner from stepping."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A learner's training loss at one step."""

    at: float
    global_step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation of the global weights; ``loss`` is ``None`` when it was not finite.

    ``metrics``: what else the workload measures, by name.
    """

    at: float
    global_step: int
    loss: float | None
    tokens: int
    metrics: tuple[tuple[str, float | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Remark:
    """Something worth a line: a fault, a learner that came or went, what a process noted."""

    at: float
    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Outage:
    """A process that died.

    Attributes:
        who: The process.
        down_at: When it ended.
        how: In words: ``killed (SIGKILL)``, ``ended with exit code 4``, ``fell silent``.
        global_step: The run's global step at that time.
        restarted_at: When its next process was started; ``None``: none was.
        back_at: When it took part again; ``None``: it did not.
        lost_steps: For each learner that lived: steps it lost between ``down_at`` and ``back_at``.
    """

    who: str
    down_at: float
    how: str
    global_step: int
    restarted_at: float | None
    back_at: float | None
    lost_steps: dict[str, int]

    @property
    def seconds(self) -> float | None:
        """How long it was away."""
        return None if self.back_at is None else self.back_at - self.down_at

    @property
    def down_seconds(self) -> float | None:
        """How long there was no process, before the next one that then had to join."""
        return None if self.restarted_at is None else self.restarted_at - self.down_at

    @property
    def lost_steps_total(self) -> int:
        """Steps that all the others together lost meanwhile."""
        return sum(self.lost_steps.values())


@dataclass(frozen=True, slots=True)
class Cut:
    """A learner that lived and stepped on while shards did not hear of it.

    Attributes:
        who: The learner.
        cut_at: When a shard had last heard of it.
        back_at: When every shard counted on it again; ``None``: none did before its end.
        steps: Its own steps meanwhile.
        rounds_merged: The rounds that were merged meanwhile; ``rounds_missed``: without it.
        lost_steps: For each other learner that lived: steps that it lost meanwhile.
    """

    who: str
    cut_at: float
    back_at: float | None
    steps: int
    rounds_merged: int
    rounds_missed: int
    lost_steps: dict[str, int]

    @property
    def seconds(self) -> float | None:
        """How long it was cut off; ``None``: to its end."""
        return None if self.back_at is None else self.back_at - self.cut_at


@dataclass(slots=True)
class Life:
    """One life of a process, from its start record to its last record.

    Attributes:
        spawned_at: When the launcher started the process, before its first record.
        ended_at: When the process ended, if that is on the tape.
        crashed: It ended otherwise than at the end of the run or on purpose.
        over: The run was over for it.
        step_tokens: Tokens of each step.
        holds: From ``Hold`` to ``Release`` (infinity: never); synchronous baselines only.
        ledger: What became of the tokens that it was trained on.
        told: The most steps and tokens of it that a shard heard of.
        unrecorded: Of these, what the process was killed too early to write down.
        overwritten: Of a life that only the shards tell of, the fragment tokens that merged
            fragments have overwritten; ``None``: ``ledger`` knows more.
    """

    started_at: float
    last_at: float
    steps_at: list[float] = field(default_factory=list)
    ready_at: float | None = None
    over: bool = False
    spawned_at: float | None = None
    ended_at: float | None = None
    crashed: bool = False
    step_tokens: list[int] = field(default_factory=list)
    holds: list[tuple[float, float]] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    told: tuple[int, int] = (0, 0)
    unrecorded: tuple[int, int] = (0, 0)
    overwritten: int | None = None

    @property
    def began_at(self) -> float:
        """When the process was started, as far as the tape says."""
        return self.started_at if self.spawned_at is None else self.spawned_at

    def holds_between(self, begin: float, end: float) -> list[tuple[float, float]]:
        """The holds that reach into this time, cut off at its ends, in order."""
        first = max(0, bisect.bisect_right(self.holds, (begin, math.inf)) - 1)
        cut = []
        for a, b in self.holds[first:]:
            if a >= end:
                break
            if b > begin:
                cut.append((max(a, begin), min(b, end)))
        return cut


@dataclass
class LearnerHistory:
    """One learner.

    ``discarded_tokens``: tokens whose training was overwritten by merged fragments. An overwritten
    fragment is one of P parts of the model, so its tokens count 1/P. ``disturbed``: from when to
    when a fault on purpose kept it from stepping. ``afar``: its tape is not
    here, and all this is what the shards heard of it.
    """

    name: str
    lives: list[Life] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    losses_not_finite: int = 0
    tokens: int = 0
    discarded_tokens: float = 0.0
    applied: Counter[str] = field(default_factory=Counter)
    outages: list[Outage] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    rounds_asked: int = 0
    rounds_folded: int = 0
    rounds_merged_in_run: int = 0
    afar: bool = False
    disturbed: list[tuple[float, float]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Inner steps of all lives."""
        return sum(len(life.steps_at) + life.unrecorded[0] for life in self.lives)

    @property
    def steps_unrecorded(self) -> int:
        """Those that only the shards have heard of: their process was killed."""
        return sum(life.unrecorded[0] for life in self.lives)

    @property
    def steps_at(self) -> list[float]:
        """The instants at which steps were finished."""
        return [at for life in self.lives for at in life.steps_at]

    @property
    def joins_at(self) -> list[float]:
        """When each life had the global weights and began to train."""
        return [life.ready_at for life in self.lives if life.ready_at is not None]

    @cached_property
    def step_seconds_median(self) -> float | None:
        """Median seconds from one step to the next."""
        gaps = [b - a for a, b in self._gaps()]
        return statistics.median(gaps) if gaps else None

    @cached_property
    def gap_seconds_longest(self) -> float | None:
        """The longest time from one step to the next within a life: outages are not counted."""
        return max((b - a for a, b in self._gaps()), default=None)

    @property
    def participation(self) -> float | None:
        """Share of the run's merged rounds that its contribution went into."""
        total = self.rounds_merged_in_run
        return self.rounds_folded / total if total else None

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
        for life in self.lives:
            yield from pairwise(life.steps_at)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a shard: when, and everything that the shard said of it."""

    opened_at: float
    closed_at: float | None
    finished_at: float
    result: RoundFinished

    @property
    def fate(self) -> Fate:
        """How it ended: one in which nobody had anything new, as at the end, is not given up."""
        if self.result.verdict == "merged":
            return "merged"
        return "abandoned" if self.result.given_up else "idle"


@dataclass
class ShardHistory:
    """One shard of the syncer."""

    name: str
    lives: list[Life] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    clock_at: list[float] = field(default_factory=list)
    clock: list[int] = field(default_factory=list)
    terms: list[int] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)

    @property
    def merged(self) -> int:
        """Rounds that were merged."""
        return sum(r.result.verdict == "merged" for r in self.rounds)

    @property
    def abandoned(self) -> int:
        """Rounds that were given up; not those in which nobody had anything new."""
        return sum(r.result.given_up for r in self.rounds)

    def clock_by(self, at: float) -> int:
        """The shard's global step at an instant."""
        index = bisect.bisect_right(self.clock_at, at)
        return self.clock[index - 1] if index else 0


@dataclass
class RunHistory:
    """A whole run; ``records`` counts what could be read of its tape."""

    records: int = 0
    started_wall: float = 0.0
    duration: float = 0.0
    fragments: int = 0
    learners: dict[str, LearnerHistory] = field(default_factory=dict)
    shards: dict[str, ShardHistory] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    faults: list[tuple[float, FaultInjected]] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    bytes_moved: dict[str, BytesMoved] = field(default_factory=dict)
    headers: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    weights: list[str] = field(default_factory=list)
    corpus: dict[str, Any] | None = None
    sample_text: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def global_step(self) -> int:
        """The latest global step of any shard."""
        return max((s.clock[-1] for s in self.shards.values() if s.clock), default=0)

    def global_step_by(self, at: float) -> int:
        """The latest global step of any shard at an instant."""
        return max((shard.clock_by(at) for shard in self.shards.values()), default=0)

    @property
    def tokens(self) -> int:
        """Tokens that all learners together were trained on."""
        return sum(learner.tokens for learner in self.learners.values())

    @property
    def discarded_tokens(self) -> float:
        """Tokens whose training was overwritten by merged fragments."""
        return sum(learner.discarded_tokens for learner in self.learners.values())

    @property
    def rounds_merged(self) -> int:
        """Rounds that were merged, of all shards."""
        return sum(shard.merged for shard in self.shards.values())

    @property
    def rounds_abandoned(self) -> int:
        """Rounds that were given up, of all shards."""
        return sum(shard.abandoned for shard in self.shards.values())

    @property
    def members(self) -> list[LearnerHistory | ShardHistory]:
        """All learners, then all shards."""
        return [*self.learners.values(), *self.shards.values()]

    @property
    def outages(self) -> list[Outage]:
        """The outages of all learners and shards, in order of time."""
        every = [outage for member in self.members for outage in member.outages]
        return sorted(every, key=lambda outage: outage.down_at)

    @property
    def cuts(self) -> list[Cut]:
        """When learners were out of the syncer's reach, in order of time."""
        every = [cut for learner in self.learners.values() for cut in learner.cuts]
        return sorted(every, key=lambda cut: (cut.cut_at, cut.who))

    @cached_property
    def training_span(self) -> tuple[float, float] | None:
        """From the first step of anybody to the last step of anybody, once the tape is read."""
        steps = [at for learner in self.learners.values() for at in learner.steps_at]
        return (min(steps), max(steps)) if steps else None

    @property
    def afar(self) -> list[str]:
        """The learners that only the shards tell of."""
        return [learner.name for learner in self.learners.values() if learner.afar]

    @property
    def bytes_total(self) -> BytesMoved | None:
        """What all learners together have sent and received.

        Where learners have their tapes elsewhere it is what the shards have received and sent, in
        which an evaluator's part is small.
        """
        moved, whose = self.bytes_moved, self.shards if self.afar else self.learners
        parts = [b for who, b in moved.items() if who in whose]
        if not parts:
            return None
        if self.afar:
            parts = [b.seen_from_there for b in parts]
        return BytesMoved(
            sum(p.control_sent for p in parts),
            sum(p.control_received for p in parts),
            sum(p.data_sent for p in parts),
            sum(p.data_received for p in parts),
        )
