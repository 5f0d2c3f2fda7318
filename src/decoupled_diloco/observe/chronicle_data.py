"""What a `Chronicle` remembers, as plain data. All instants are wall-clock seconds."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from decoupled_diloco.observe.live import Rate
from decoupled_diloco.observe.samples import BytesMoved
from decoupled_diloco.protocol.effects import Fold, Recovered, RoundFinished, RoundOpened
from decoupled_diloco.protocol.messages import LOSS_MAX, Asking, Hello, StepReport, Version

RECENT_ROUNDS = 50
"""How many merged rounds the recent participation looks back."""

TOOK_PART = "took part"
LATE = "late"
NOT_ASKED = "not asked"
OUT_OF_REACH = "out of reach"
AWAY = "away"
"""Why a learner was (not) in a merged round; besides the states of `Participant`: *not asked* is a
live learner that had no new step before the window closed, *out of reach* one that was live without
a connection, *away* one that was not live."""


@dataclass(slots=True)
class Asked:
    """One pull: when, its name, and why the learner qualified."""

    at: float
    name: Asking
    why: str


@dataclass(slots=True)
class RoundLog:
    """One round.

    Attributes:
        shard: Name of the shard.
        life: Of the shard's process, from 1: each counts its rounds anew.
        opened: What the shard said when it opened; ``None`` on tapes from before it did.
        asks: The pulls of each learner, in order; a learner that connected anew is asked again.
        folds: What was folded in, in fold order.
        fallen: Who was given up before the end, when and why.
        merging_at: When everything was in and the merge began.
        live: Who was live when its window closed and connected when it ended, and when each had
            last reported a step.
        unreachable: Who was live without a connection.
        unasked: When those who were not asked reported while it was open.
        late_reports: When those who were not asked reported their next step.
        late_bodies: Bodies that came after the end.
        held_at: When each learner held the new version.
    """

    shard: str
    number: int
    fragment: int
    opened_at: float
    opened: RoundOpened | None = None
    asks: dict[str, list[Asked]] = field(default_factory=dict)
    folds: dict[Asking, tuple[float, Fold]] = field(default_factory=dict)
    fallen: dict[str, tuple[float, str]] = field(default_factory=dict)
    merging_at: float | None = None
    finished_at: float | None = None
    result: RoundFinished | None = None
    live: dict[str, float | None] = field(default_factory=dict)
    unreachable: tuple[str, ...] = ()
    unasked: dict[str, list[float]] = field(default_factory=dict)
    late_reports: dict[str, float] = field(default_factory=dict)
    late_bodies: dict[str, float] = field(default_factory=dict)
    held_at: dict[str, float] = field(default_factory=dict)
    life: int = 1

    @property
    def tick(self) -> int | None:
        """The global step at which it was due."""
        if self.result is not None:
            return self.result.tick
        return None if self.opened is None else self.opened.tick


@dataclass(slots=True)
class Member:
    """A live learner as one shard sees it."""

    learner: str
    epoch: int
    since: float
    connected: bool = True
    step: int = 0
    offset: int = 0
    step_seconds: float = 0.0
    reported_at: float | None = None
    held: dict[int, Version] = field(default_factory=dict)

    @property
    def run_step(self) -> int:
        """s_m: what the shard told it at join, and its own steps since."""
        return self.offset + self.step


@dataclass(slots=True)
class Stay:
    """From when to when a learner was live at a shard, and why it came and went."""

    learner: str
    epoch: int
    since: float
    why: str
    until: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Remark:
    """A note: who told it, and of which process it is; ``""``: of none."""

    at: float
    who: str
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class TickLog:
    """The shard's clock has moved; ``setter`` is the learner whose report moved it.

    ``before`` is ``None`` for the first tick of a shard that was started again: what clock its
    learners have told it is not on the tape. ``life`` is that of `RoundLog`.
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
    """One shard.

    Attributes:
        clock: As its present life tells; one that was started again may be behind.
        clock_max: The furthest that any life told: what the coordinator counts of a budget.
        lives: When each life of its process began.
        reports: For each learner the run steps that it reported, and when.
        greeting: The latest connection that was greeted, accepted or refused at once.
        moved: Whose run steps the latest reports moved, from where to where; before it, the
            number of the record that told them.
        unreported: Finished rounds that wait for the next report of a learner not in them.
        departed: Who left since the oldest round that is open began, and when.
        former: The last that was known of learners that are no longer live.
        lost: Rounds that were open when the shard's process ended.
        folds: By fragment, what was folded for its next version.
    """

    name: str
    phase: str = "starting"
    term: int = 0
    clock: int = 0
    clock_max: int = 0
    lives: list[float] = field(default_factory=list)
    heard_at: float | None = None
    merged: int = 0
    abandoned: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    departed: deque[tuple[float, Member]] = field(default_factory=deque)
    former: dict[str, Member] = field(default_factory=dict)
    versions: dict[int, Version] = field(default_factory=dict)
    open: dict[int, RoundLog] = field(default_factory=dict)
    finished: list[RoundLog] = field(default_factory=list)
    lost: list[RoundLog] = field(default_factory=list)
    ticks: list[TickLog] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    reports: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    moved: tuple[int, list[tuple[str, int, int]]] = field(default_factory=lambda: (-1, []))
    last_merged: dict[int, RoundLog] = field(default_factory=dict)
    unreported: dict[str, list[RoundLog]] = field(default_factory=dict)
    paths: dict[str, tuple[int, str]] = field(default_factory=dict)
    folds: dict[int, dict[Asking, tuple[float, Fold]]] = field(default_factory=dict)
    greeting: tuple[int, Hello] | None = None
    bytes_moved: BytesMoved | None = None

    @property
    def index(self) -> int:
        """Its number."""
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    @property
    def life(self) -> int:
        """The number of its present life, from 1."""
        return max(1, len(self.lives))

    def ticks_of(self, life: int) -> list[TickLog]:
        """How its clock moved in one of its lives."""
        return [tick for tick in self.ticks if tick.life == life]

    def clock_setter(self, cause: int | None, clock: int, quorum: int) -> str:
        """Whose report moved the clock there: the K-th that reached it, if reports moved it."""
        seq, moved = self.moved
        reached_now = [name for name, before, step in moved if before < clock <= step]
        if seq != cause or not reached_now:
            return ""
        reached = sum(member.run_step >= clock for member in self.members.values())
        others = reached - sum(name in self.members for name in reached_now)
        return reached_now[min(max(quorum - others, 1), len(reached_now)) - 1]

    def reports_of(self, life: int, learner: str) -> list[tuple[int, float]]:
        """What a learner reported to one of its lives."""
        since = self.lives[life - 1] if 1 < life <= len(self.lives) else -math.inf
        until = self.lives[life] if life < len(self.lives) else math.inf
        return [(step, at) for step, at in self.reports.get(learner, []) if since <= at < until]


@dataclass
class LearnerLog:
    """One learner, over all shards and lives.

    Attributes:
        epoch: Its newest life, counted by the coordinator.
        process: What the launcher and its own tape say of its process: ``""`` (nothing),
            ``joining``, ``training``, ``restarting``, ``down``, ``finished``.
        left: What its newest life said when it left on purpose.
        steps_of: Own steps of each epoch, as reported; `tokens_of` and `discarded_of` likewise.
        began: Its own steps and tokens when its present process began.
        told: The most that the shards heard of that process.
        unrecorded: Steps and tokens that shards heard of, and that earlier processes did not live
            to write down: a process that is killed takes its last records with it.
        discarded: Fragment-tokens discarded, by mode and reason, from its own tape.
        recoveries: How each of its processes came by its state, from its own tape.
        reasons: How many merged rounds it was in, or why not.
        tokens_counted: Of its tokens, what the total of the run holds.
        accepted: For each shard, how many rounds it had merged when this learner was last in one.
    """

    name: str
    epoch: int = 0
    process: str = ""
    has_tape: bool = False
    started_at: float | None = None
    down_at: float | None = None
    left: str = ""
    seen_at: float | None = None
    reported_at: float | None = None
    steps_of: dict[int, int] = field(default_factory=dict)
    tokens_of: dict[int, int] = field(default_factory=dict)
    discarded_of: dict[int, int] = field(default_factory=dict)
    rate: Rate = field(default_factory=Rate)
    tokens_counted: int = 0
    own_steps: int = 0
    own_tokens: int = 0
    began: tuple[int, int] = (0, 0)
    told: tuple[int, int] = (0, 0)
    unrecorded: tuple[int, int] = (0, 0)
    own_rate: Rate = field(default_factory=Rate)
    stepped_at: float | None = None
    loss: float | None = None
    discarded: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_up: int = 0
    bytes_moved: dict[float, BytesMoved] = field(default_factory=dict)
    recoveries: list[Recovered] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=RECENT_ROUNDS))
    accepted_at: float | None = None
    accepted_step: int | None = None
    accepted: dict[str, int] = field(default_factory=dict)

    def report(self, epoch: int, report: StepReport) -> None:
        """Takes a report in; every shard gets it, and they may come out of order."""
        for table, value in (
            (self.steps_of, report.step),
            (self.tokens_of, report.tokens),
            (self.discarded_of, report.discarded_tokens),
        ):
            table[epoch] = max(value, table.get(epoch, 0))
        self.told = (max(self.told[0], report.step), max(self.told[1], report.tokens))
        if report.loss is not None and not self.has_tape:
            self.loss = report.loss if report.loss < LOSS_MAX else None

    def begin_process(self) -> None:
        """A process of it has begun: what the one before has not written down stays unrecorded."""
        self.unrecorded = self._unrecorded()
        self.began, self.told = (self.own_steps, self.own_tokens), (0, 0)

    def _unrecorded(self) -> tuple[int, int]:
        own = (self.own_steps - self.began[0], self.own_tokens - self.began[1])
        steps, tokens = (max(0, told - mine) for told, mine in zip(self.told, own, strict=True))
        return (self.unrecorded[0] + steps, self.unrecorded[1] + tokens)

    def count(self, reason: str) -> None:
        """One more merged round."""
        self.reasons[reason] += 1
        self.recent.append(reason)

    @property
    def steps(self) -> int:
        """Own steps of all lives, as far as the syncer or its own tape knows."""
        return max(sum(self.steps_of.values()), self.own_steps + self._unrecorded()[0])

    @property
    def tokens(self) -> int:
        """Tokens of all lives, as far as the syncer or its own tape knows."""
        return max(sum(self.tokens_of.values()), self.own_tokens + self._unrecorded()[1])

    @property
    def discarded_fragment_tokens(self) -> int:
        """Tokens that were overwritten, summed over fragments: the run's P times too many."""
        return max(sum(self.discarded_of.values()), sum(self.discarded.values()))
