"""What a run looks like right now, kept up to date record by record while it is going on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.observe.acting import Acting
from decoupled_diloco.observe.historian import ending_in_words, is_learner, is_shard
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.samples import (
    Evaluated,
    FaultEnded,
    FaultInjected,
    LinkState,
    LossMeasured,
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
    TookOver,
    WeightsSaved,
    WentBack,
)
from decoupled_diloco.observe.words import named
from decoupled_diloco.protocol.effects import (
    Accept,
    ClockAdvanced,
    EndTraining,
    Evict,
    Note,
    Ready,
    RoundFinished,
    RoundOpened,
)
from decoupled_diloco.protocol.events import StepFinished
from decoupled_diloco.protocol.messages import LOSS_MAX
from decoupled_diloco.units import format_duration

RATE_SECONDS = 15.0
"""Rates are those of this much time before the latest record."""

QUIET_SECONDS = 10.0
"""A learner without a step for this long is shown as quiet."""

CUT_OFF = "cut off"
"""The state of a learner that steps on while no shard can be heard."""

OUT_OF_REACH = "out of reach"
"""The state of one that no shard hears of, and whose own tape is elsewhere: it may be down."""

REPEAT_SECONDS = 5.0
"""The same line, from several processes within this time, is told once."""

_LOOKED_AT = frozenset(
    cls.__name__
    for cls in (
        Accept,
        ClockAdvanced,
        EndTraining,
        Evaluated,
        Evict,
        FaultEnded,
        FaultInjected,
        LinkState,
        LossMeasured,
        Note,
        ProcessEnded,
        ProcessStarted,
        Ready,
        RestartScheduled,
        RoundFinished,
        RoundOpened,
        StepFinished,
        TookOver,
        WeightsSaved,
        WentBack,
    )
)


class Rate:
    """How much of something there is per second, over the last ``RATE_SECONDS``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def add(self, at: float, total: float) -> None:
        """Notes the running total at an instant."""
        self._points.append((at, total))
        while len(self._points) > 2 and self._points[1][0] < at - RATE_SECONDS:
            self._points.popleft()

    def clear(self) -> None:
        """Forgets what was: the process has started anew."""
        self._points.clear()

    def per_second(self) -> float | None:
        """The rate, ``None`` when there is too little to tell."""
        if len(self._points) < 2 or self._points[-1][0] <= self._points[0][0]:
            return None
        (since, before), (until, after) = self._points[0], self._points[-1]
        return (after - before) / (until - since)


@dataclass
class LearnerView:
    """One learner, as of now.

    ``state`` is one of starting, joining, stepping, down, restarting, finished; ``links``: whether
    its connection to each shard is there; ``cut_at``: since when shards that it lost, ``cut_from``,
    do not count on it. ``afar``: it writes its tape elsewhere, and the shards alone tell of it;
    ``epoch``: of its latest join, ``before``: its steps and tokens until then.
    """

    name: str
    state: str = "starting"
    down_at: float | None = None
    stepped_at: float | None = None
    steps: int = 0
    tokens: int = 0
    token_rate: Rate = field(default_factory=Rate)
    loss: float | None = None
    folded: int = 0
    links: dict[int, bool] = field(default_factory=dict)
    cut_from: set[str] = field(default_factory=set)
    cut_at: float = 0.0
    afar: bool = False
    epoch: int = 0
    before: tuple[int, int] = (0, 0)


@dataclass
class ShardView:
    """One shard of the syncer, as of now."""

    name: str
    state: str = "starting"
    clock: int = 0
    clock_max: int = 0
    merged: int = 0
    abandoned: int = 0
    open: set[int] = field(default_factory=set)
    grace_seconds: float | None = None


class LiveView:
    """The run as of the latest record; `take` returns lines worth telling."""

    def __init__(self) -> None:
        self.learners: dict[str, LearnerView] = {}
        self.shards: dict[str, ShardView] = {}
        self._acting = Acting()
        self.evaluation: Evaluated | None = None
        self.began: float | None = None
        self.now = 0.0
        self.clock_rate = Rate()
        self.token_rate = Rate()
        self._told: dict[str, float] = {}
        self._own: set[str] = set()

    @property
    def furthest(self) -> int:
        """The latest clock of any shard: the step at which something happens."""
        return max((shard.clock for shard in self.shards.values()), default=0)

    @property
    def step(self) -> int:
        """How far the slowest shard has come: what a budget of steps is measured by."""
        return min((shard.clock_max for shard in self.shards.values()), default=0)

    @property
    def tokens(self) -> int:
        """Tokens of all learners together."""
        return sum(learner.tokens for learner in self.learners.values())

    @property
    def elapsed(self) -> float:
        """Seconds from the first record to the latest."""
        return 0.0 if self.began is None else self.now - self.began

    def state_of(self, learner: LearnerView) -> str:
        """A learner's state in words, also that it has not been heard of for a while."""
        if learner.state == "stepping" and learner.stepped_at is not None:
            silence = self.now - learner.stepped_at
            if silence > QUIET_SECONDS:
                return f"quiet for {format_duration(silence)}"
            nowhere = bool(learner.links) and not any(learner.links.values())
            if nowhere or (self.shards and learner.cut_from == set(self.shards)):
                return OUT_OF_REACH if learner.afar else CUT_OFF
        return learner.state

    def take(self, record: Record) -> list[tuple[float, str]]:
        """Takes one record in.

        Returns:
            Lines for people, each with seconds since the run's first record.
        """
        self.began = record.wall if self.began is None else min(self.began, record.wall)
        self.now = max(self.now, record.wall)
        if record.kind == "start":
            self._started(record)
            return []
        if record.type in ("Greeted", "Said"):
            lines = list(self._from_afar(record))
            return [(self._since(record), x) for x in lines if self._is_new(record.wall, x)]
        if record.type not in _LOOKED_AT:
            return []
        try:
            value = record.value()
        except ProtocolError as error:
            return [(self._since(record), f"a record of {record.who} is left out: {error}")]
        lines = [*self._member(record, value), *self._anybody(record, value)]
        return [(self._since(record), line) for line in lines if self._is_new(record.wall, line)]

    def _since(self, record: Record) -> float:
        assert self.began is not None
        return record.wall - self.began

    def _is_new(self, wall: float, line: str) -> bool:
        told = self._told.get(line)
        self._told[line] = wall
        return told is None or wall - told > REPEAT_SECONDS

    def _from_afar(self, record: Record) -> Iterator[str]:
        """A learner whose own tape is elsewhere: what the shards hear of it.

        There are many of these records, so that nothing is made of those of other learners.
        """
        said = record.data.get("hello") or record.data.get("message") or {}
        name = str(record.data.get("learner") or said.get("learner"))
        if name in self._own or not is_shard(record.who):
            return
        known = self.learners.get(name)
        if said.get("type") == "Hello" and said.get("role") == "learner":
            if known is None or known.state != "stepping":
                self._learner(name).state = "joining"
            self.learners[name].afar = True
        elif said.get("type") == "StepReport":
            if known is None:
                known = self.learners[name] = LearnerView(name, "joining", afar=True)
            yield from self._stepped(known, record.wall, said)
            yield from self._lost(known, said.get("loss"))

    def _lost(self, learner: LearnerView, loss: float | None) -> Iterator[str]:
        """A loss as a shard has heard it: one that is not finite is told as ``LOSS_MAX``."""
        if loss is None:
            return
        learner.loss = loss if loss < LOSS_MAX else None
        if learner.loss is None:
            yield f"the loss of {learner.name} is not finite: it has diverged"

    def _stepped(
        self, learner: LearnerView, wall: float, report: Mapping[str, Any]
    ) -> Iterator[str]:
        if learner.state == "joining":
            learner.state = "stepping"
            yield _joined(learner, wall)
        if learner.state != "stepping":
            return  # of before it left, told by another shard
        steps, tokens = learner.before
        learner.steps = max(learner.steps, steps + report["step"])
        learner.tokens = max(learner.tokens, tokens + report["tokens"])
        learner.stepped_at = wall
        learner.token_rate.add(wall, learner.tokens)
        self.token_rate.add(self.now, self.tokens)

    def _started(self, record: Record) -> None:
        self._own.add(record.who)
        if is_learner(record.who):
            learner = self._learner(record.who)
            learner.state = "joining"
            learner.token_rate.clear()
            learner.links.clear()
            learner.cut_from.clear()
        elif is_shard(record.who):
            shard = self._shard(record.who)
            shard.state = "running"
            shard.open.clear()
            for learner in self.learners.values():
                learner.cut_from.discard(shard.name)
            self.clock_rate.clear()

    def _learner(self, name: str) -> LearnerView:
        return self.learners.setdefault(name, LearnerView(name))

    def _shard(self, name: str) -> ShardView:
        return self.shards.setdefault(name, ShardView(name))

    def _member(self, record: Record, value: Any) -> Iterator[str]:
        if is_learner(record.who):
            yield from self._learner_said(self._learner(record.who), record.wall, value)
        elif is_shard(record.who):
            yield from self._shard_said(self._shard(record.who), record.wall, value)

    def _learner_said(self, learner: LearnerView, wall: float, value: Any) -> Iterator[str]:
        match value:
            case StepFinished(tokens):
                learner.steps += 1
                learner.tokens += tokens
                learner.stepped_at = wall
                learner.token_rate.add(wall, learner.tokens)
                self.token_rate.add(self.now, self.tokens)
            case LossMeasured(loss=loss):
                learner.loss = loss
                if loss is None:
                    yield f"the loss of {learner.name} is not finite: it has diverged"
            case LinkState(shard, connected):
                learner.links[shard] = connected
            case Ready():
                learner.state, learner.stepped_at = "stepping", wall
                yield _joined(learner, wall)
            case EndTraining():
                learner.state = "finished"
                yield "the budget is spent: the closing rounds begin"

    def _shard_said(self, shard: ShardView, wall: float, value: Any) -> Iterator[str]:
        match value:
            case Evict(name, why) if name in self.learners and why.startswith("left"):
                if self.learners[name].afar:
                    self.learners[name].state = "finished"
            case Evict(name) if name in self.learners:
                learner = self.learners[name]
                learner.cut_at = learner.cut_at if learner.cut_from else wall
                learner.cut_from.add(shard.name)
            case Accept(_, name, epoch) if name in self.learners:
                self._entered(self.learners[name], epoch)
                yield from self._heard_again(self.learners[name], shard, wall)
            case ClockAdvanced(clock, _, _):
                shard.clock, shard.clock_max = clock, max(clock, shard.clock_max)
                self.clock_rate.add(wall, self.step)
            case RoundOpened():
                shard.open.add(value.round)
            case RoundFinished():
                shard.open.discard(value.round)
                shard.grace_seconds = value.grace_seconds
                shard.merged += value.verdict == "merged"
                shard.abandoned += value.given_up
                for participant in value.participants:
                    if value.verdict == "merged" and participant.state == "folded":
                        self._learner(participant.learner).folded += 1

    def _entered(self, learner: LearnerView, epoch: int) -> None:
        if learner.afar and epoch > learner.epoch:
            learner.epoch, learner.before = epoch, (learner.steps, learner.tokens)

    def _heard_again(self, learner: LearnerView, shard: ShardView, wall: float) -> Iterator[str]:
        if shard.name in learner.cut_from:
            learner.cut_from.discard(shard.name)
            if not learner.cut_from and learner.state == "stepping":
                away = format_duration(wall - learner.cut_at)
                yield f"{learner.name} is live again, {away} after it was not"

    def _anybody(self, record: Record, value: Any) -> Iterator[str]:
        match value:
            case ProcessStarted(name, _):
                self._process_started(name)
            case ProcessEnded(name, code, signal):
                yield from self._process_ended(record.wall, name, code, signal)
            case FaultInjected(kind, target):
                yield f"fault on purpose: {kind} {target}"
            case FaultEnded(kind, target):
                yield f"fault undone: {kind} {target}"
            case RestartScheduled(name, seconds):
                if name in self.learners:
                    self.learners[name].state = "restarting"
                if (shard := self._acting.whose(name)) in self.shards:
                    self.shards[shard].state = "restarting"
                yield f"{name} is started again in {format_duration(seconds)}"
            case Evaluated(global_step, loss, _, metrics):
                self.evaluation = value
                told = [f"loss {_number(loss)}"]
                told += [f"{metric.name} {_number(metric.value)}" for metric in metrics]
                yield f"evaluation at step {global_step}: {', '.join(told)}"
            case TookOver():
                if line := self._acting.took_over(value):
                    yield line
            case WeightsSaved(path):
                yield f"weights saved: {path}"
            case WentBack(told):
                for each in self.shards.values():
                    each.clock = each.clock_max = 0
                self.clock_rate.clear()
                yield told
            case Note(text, why):
                yield from _note(record.who, text, why)

    def _process_started(self, process: str) -> None:
        self._own.add(process)
        name = self._acting.whose(process)
        if is_learner(name):
            self._learner(name).state = "starting"
        elif is_shard(name):
            self._shard(name).state = "starting"

    def _process_ended(
        self, wall: float, name: str, code: int | None, signal: int | None
    ) -> Iterator[str]:
        how = "finished" if code == 0 else "down"
        if name in self.learners:
            self.learners[name].state = how
            self.learners[name].down_at = None if code == 0 else wall
        if (shard := self._acting.whose(name)) in self.shards:
            self.shards[shard].state = how
        if code != 0:
            was = "" if signal is None else "was "
            yield f"{name} {was}{ending_in_words(code, signal)} at step {self.furthest}"


def _joined(learner: LearnerView, wall: float) -> str:
    down_at, learner.down_at = learner.down_at, None
    if down_at is None:
        return f"{learner.name} joined"
    return f"{learner.name} is back, {format_duration(wall - down_at)} after it went down"


def _note(who: str, text: str, why: str) -> Iterator[str]:
    """A remark of the protocol, for whoever watches the run."""
    learner, _, left = text.partition(" (epoch ")
    if left.endswith("is no longer live") and why.startswith("left: "):
        reason = why.removeprefix("left: ")
        done = reason == "the run is over"
        yield f"{learner} is done" if done else f"{learner} left: {reason}"
    elif text.endswith("could not be had"):
        # A newer copy was there before this one was fetched, or it is fetched again: no harm done.
        if "digest" in why:
            yield f"{who} takes a copy again that came spoilt: {why}"
    elif why != "the run has only begun":
        yield f"{named(who, text)}: {why}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
