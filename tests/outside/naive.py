"""Naive implementations of rules 1 and 2, as recorders beside a shard's state machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from decoupled_diloco.protocol import Options, messages

AN_INSTANT = 1e-6


class Clock:
    """Rule 1: t = max(t, the K-th largest run step), shifted when the remaining ones are behind."""

    def __init__(self, options: Options, shard: str = "shard-0") -> None:
        self.options, self.shard = options, shard
        self.t = self.announced = 0
        self.run_step: dict[str, int] = {}
        self.own: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        self.checked = self.shifts = 0

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if process != self.shard:
            return
        shifted = 0
        match event:
            case messages.Received(learner, messages.StepReport(step)) if learner in self.run_step:
                self.run_step[learner] += step - self.own[learner]
                self.own[learner] = step
            case messages.Connected(_, hello):
                shifted += self._greeted(hello, effects)
        gone = [e.learner for e in effects if isinstance(e, messages.Evict)]
        if isinstance(event, messages.Received) and isinstance(event.message, messages.Leave):
            gone.append(event.peer)
        for learner in gone:
            self.run_step.pop(learner, None)
            shifted += self._shift()
        self.t = max(self.t, self._kth())
        shifts = [e.message.by for e in effects if _is(e, messages.Shifted)]
        assert sum(shifts) == shifted, f"t={now} shifted by {shifts}, not by {shifted}"
        self.announced = max(
            [self.announced, *(e.clock for e in effects if isinstance(e, messages.ClockAdvanced))]
        )
        assert self.announced == self.t, f"t={now} {event}: clock {self.announced}, not {self.t}"
        self.checked += 1

    def _greeted(self, hello: messages.Hello, effects: Sequence[Any]) -> int:
        """Start a learner that joins, or joins again, at the present clock; return the shift."""
        shifted = 0
        if not any(isinstance(e, messages.Accept) for e in effects):
            return shifted
        if self.epoch.get(hello.learner) != hello.epoch:
            self.run_step.pop(hello.learner, None)  # its earlier incarnation has ended
            shifted += self._shift()
        if hello.learner not in self.run_step:
            self.epoch[hello.learner] = hello.epoch
            self.run_step[hello.learner] = self.t
            self.own[hello.learner] = hello.step
        return shifted

    def _kth(self) -> int:
        ordered = sorted(self.run_step.values(), reverse=True)
        enough = len(ordered) >= self.options.quorum
        return ordered[self.options.quorum - 1] if enough else 0

    def _shift(self) -> int:
        if len(self.run_step) < self.options.quorum or self._kth() >= self.t:
            return 0
        by = self.t - self._kth()
        self.shifts += by > 0
        self.run_step = {name: s + by for name, s in self.run_step.items()}
        return by


def _is(effect: Any, kind: type) -> bool:
    return isinstance(effect, messages.Send | messages.Broadcast) and isinstance(
        effect.message, kind
    )


@dataclass
class Slot:
    """The round that holds a slot, and the latest time until which it does."""

    round: int
    until: float


@dataclass
class Queue:
    """Rule 2: due fragments open in order, as soon as a slot is free, one round at a time each."""

    options: Options
    shard: int = 0
    t: int = 0
    due: list[int] = field(default_factory=list)
    tick: dict[int, int] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    since: dict[int, float] = field(default_factory=dict)
    now: float = 0.0
    open: dict[int, Slot] = field(default_factory=dict)
    opened: int = 0
    most_open: int = 0

    def __call__(self, process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if process != f"shard-{self.shard}":
            return
        self.now = now
        for effect in effects:
            match effect:
                case messages.ClockAdvanced(clock):
                    for tick in range(self.t + 1, clock + 1):
                        self._tick(tick)
                    self.t = clock
                case messages.Merge(_, fragment) if fragment in self.open:
                    if now <= self.open[fragment].until + AN_INSTANT:
                        self.open[fragment].until = inf
                case messages.RoundFinished():
                    self._ended(effect)
                case messages.RoundOpened() if not effect.closing:
                    self._opens(now, effect)
        assert not (self.due and self._taken(now) < self.options.open_rounds_max), (
            f"t={now}: {self.due} wait although only {self._taken(now)} of "
            f"{self.options.open_rounds_max} slots are taken"
        )

    def _tick(self, tick: int) -> None:
        for p in range(self.shard, self.options.fragments, self.options.shards):
            own = p * self.options.period // self.options.fragments
            if p in self.abandoned or tick % self.options.period == own:
                self._is_due(p, tick)
        self.abandoned = []

    def _is_due(self, p: int, tick: int) -> None:
        if p in self.open:
            self.again[p] = tick
            return
        self.tick[p] = tick
        if p not in self.due:
            self.due.append(p)
            self.since[p] = self.now

    def _opens(self, now: float, effect: messages.RoundOpened) -> None:
        p = effect.fragment
        assert p not in self.open, f"t={now}: a second open round of {p}"
        assert p in self.due, f"t={now}: {p} opens, but {self.due} are due"
        first = min(self.due, key=lambda q: self.since[q])
        assert self.since[p] <= self.since[first] + AN_INSTANT, (
            f"t={now}: {p} opens, but {first} waits for longer: {self.since}"
        )
        assert effect.tick == self.tick[p], f"t={now}: {p} opens for {effect.tick}, {self.tick[p]}"
        held = self._taken(now, AN_INSTANT)
        assert held < self.options.open_rounds_max, f"t={now}: {held} slots are taken"
        self.due.remove(p)
        self.open[p] = Slot(effect.round, now + effect.delivery_seconds)
        self.opened += 1
        self.most_open = max(self.most_open, len(self.open))

    def _ended(self, effect: messages.RoundFinished) -> None:
        p = effect.fragment
        self.open.pop(p, None)
        if effect.verdict == "abandoned":
            self.abandoned.append(p)
            self.again.pop(p, None)
        elif p in self.again:
            self.tick[p] = self.again.pop(p)
            self.due.append(p)
            self.since[p] = self.now

    def _taken(self, now: float, early: float = -AN_INSTANT) -> int:
        return sum(now < slot.until - early for slot in self.open.values())
