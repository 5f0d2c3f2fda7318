"""Rules 1 and 2, written again as plainly as they are said, and watched beside the machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any

from decoupled_diloco.protocol import Options
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as ev
from decoupled_diloco.protocol import messages as msg
from outside.nodes import Node
from outside.shard import Shard
from outside.world import World

AN_INSTANT = 1e-6


class Clock:
    """Rule 1: t = max(t, the K-th largest run step), shifted when who is left lies behind."""

    def __init__(self, world: World, shard: int = 0) -> None:
        self.options, self.shard = world.options, shard
        self.t = self.told = 0
        self.run_step: dict[str, int] = {}
        self.own: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        self.checked = self.shifts = 0
        world.watchers.append(self)

    def __call__(self, node: Node, event: Any, effects: list[Any]) -> None:
        if not isinstance(node, Shard) or node.index != self.shard:
            return
        shifted = 0
        match event:
            case ev.Received(learner, msg.StepReport(step)) if learner in self.run_step:
                self.run_step[learner] += step - self.own[learner]
                self.own[learner] = step
            case ev.Connected(_, hello):
                shifted += self._greeted(hello, effects)
        gone = [e.learner for e in effects if isinstance(e, do.Evict)]
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Leave):
            gone.append(event.peer)
        for learner in gone:
            self.run_step.pop(learner, None)
            shifted += self._shift()
        self.t = max(self.t, self._kth())
        told = [e.message.by for e in effects if _is(e, msg.Shifted)]
        assert sum(told) == shifted, f"t={node.world.now} shifted by {told}, not by {shifted}"
        self.told = max([self.told, *(e.clock for e in effects if isinstance(e, do.ClockAdvanced))])
        assert self.told == self.t, f"t={node.world.now} {event}: clock {self.told}, not {self.t}"
        self.checked += 1

    def _greeted(self, hello: msg.Hello, effects: list[Any]) -> int:
        """Who comes for the first time, or anew, is told the clock as it is."""
        shifted = 0
        if not any(isinstance(e, do.Accept) for e in effects):
            return shifted
        if self.epoch.get(hello.learner) != hello.epoch:
            self.run_step.pop(hello.learner, None)  # an earlier life has gone
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
    return isinstance(effect, do.Send | do.Broadcast) and isinstance(effect.message, kind)


@dataclass
class Slot:
    """What holds one, and until when at most."""

    round: int
    until: float


@dataclass
class Queue:
    """Rule 2: what is due, in order; it opens as soon as there is a slot, and once at a time."""

    options: Options
    shard: int = 0
    t: int = 0
    due: list[int] = field(default_factory=list)
    tick: dict[int, int] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    given_up: list[int] = field(default_factory=list)
    since: dict[int, float] = field(default_factory=dict)
    now: float = 0.0
    open: dict[int, Slot] = field(default_factory=dict)
    opened: int = 0
    most_open: int = 0

    def __call__(self, node: Node, event: Any, effects: list[Any]) -> None:
        if not isinstance(node, Shard) or node.index != self.shard:
            return
        now = self.now = node.world.now
        for effect in effects:
            match effect:
                case do.ClockAdvanced(clock):
                    for tick in range(self.t + 1, clock + 1):
                        self._tick(tick)
                    self.t = clock
                case do.Merge(_, fragment) if fragment in self.open:
                    if now <= self.open[fragment].until + AN_INSTANT:
                        self.open[fragment].until = inf
                case do.RoundFinished():
                    self._ended(effect)
                case do.RoundOpened() if not effect.closing:
                    self._opens(now, effect)
        if not node.world.coordinator.ending:
            assert not (self.due and self._taken(now) < self.options.open_rounds_max), (
                f"t={now}: {self.due} wait though of {self.options.open_rounds_max} slots "
                f"{self._taken(now)} are taken"
            )

    def _tick(self, tick: int) -> None:
        for p in range(self.shard, self.options.fragments, self.options.shards):
            own = p * self.options.period // self.options.fragments
            if p in self.given_up or tick % self.options.period == own:
                self._is_due(p, tick)
        self.given_up = []

    def _is_due(self, p: int, tick: int) -> None:
        if p in self.open:
            self.again[p] = tick
            return
        self.tick[p] = tick
        if p not in self.due:
            self.due.append(p)
            self.since[p] = self.now

    def _opens(self, now: float, effect: do.RoundOpened) -> None:
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

    def _ended(self, effect: do.RoundFinished) -> None:
        p = effect.fragment
        self.open.pop(p, None)
        if effect.verdict == "abandoned":
            self.given_up.append(p)
            self.again.pop(p, None)
        elif p in self.again:
            self.tick[p] = self.again.pop(p)
            self.due.append(p)
            self.since[p] = self.now

    def _taken(self, now: float, early: float = -AN_INSTANT) -> int:
        return sum(now < slot.until - early for slot in self.open.values())
