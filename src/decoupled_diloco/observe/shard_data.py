"""What a `RunModel` remembers of the shards of the syncer, as plain data; see `run_data`."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from typing import Literal

from decoupled_diloco.observe.run_data import (
    AWAY,
    NOT_ASKED,
    OUT_OF_REACH,
    TOOK_PART,
    Outage,
    ProcessLife,
)
from decoupled_diloco.protocol.effects import Fold, Participant, RoundFinished, RoundOpened
from decoupled_diloco.protocol.messages import Hello
from decoupled_diloco.protocol.versions import Asking, Version


@dataclass(slots=True)
class Asked:
    """One pull: when, its name, and why the learner qualified."""

    at: float
    name: Asking
    why: str


@dataclass(slots=True)
class RoundLog:
    """One round of a shard."""

    shard: str
    number: int
    fragment: int
    opened_at: float
    opened: RoundOpened | None = None  # None on tapes from before shards told
    asks: dict[str, list[Asked]] = field(default_factory=dict)  # one that came back: once more
    folds: dict[Asking, tuple[float, Fold]] = field(default_factory=dict)  # in fold order
    fallen: dict[str, tuple[float, str]] = field(default_factory=dict)  # given up: when and why
    merging_at: float | None = None  # when everything was in and the merge began
    finished_at: float = math.inf  # infinity: it is not over
    result: RoundFinished | None = None
    live: dict[str, float | None] = field(default_factory=dict)
    """The learners that were live when its window closed and connected when it ended, and when each
    had last reported a step."""
    unreachable: tuple[str, ...] = ()  # live without a connection
    late_bodies: dict[str, float] = field(default_factory=dict)  # that came after the end
    held_at: dict[str, float] = field(default_factory=dict)  # when each learner held the version
    life: int = 1  # of the shard's process, from 1: each counts its rounds anew

    @property
    def tick(self) -> int | None:
        """The global step at which it was due."""
        told = self.result or self.opened
        return None if told is None else told.tick

    @property
    def outcome(self) -> RoundFinished:
        """Everything that the shard said of its end, once it is over."""
        assert self.result is not None, f"round {self.number} of {self.shard} is not over"
        return self.result

    @property
    def closed_at(self) -> float | None:
        """When its window closed, once it is over."""
        closed = self.outcome.closed_seconds
        return None if closed is None else self.opened_at + closed

    @property
    def merged(self) -> bool:
        """Whether it is over and gave a new version."""
        return self.result is not None and self.result.verdict == "merged"

    @property
    def fate(self) -> Literal["merged", "abandoned", "idle"]:
        """How it ended; if no learner had anything new, as at the end, it is not given up."""
        if self.merged:
            return "merged"
        return "abandoned" if self.outcome.given_up else "idle"

    @property
    def folded(self) -> list[Participant]:
        """The contributions that are in it, once it is over."""
        return [each for each in self.outcome.participants if each.state == "folded"]

    def reason_of(self, learner: str) -> str:
        """`TOOK_PART`, or why a learner was not in it, once it is over."""
        for participant in self.outcome.participants:  # what is folded comes first, and counts
            if participant.learner == learner:
                return TOOK_PART if participant.state == "folded" else participant.state
        if learner in self.live:
            return NOT_ASKED
        return OUT_OF_REACH if learner in self.unreachable else AWAY

    def summed_up(self) -> RoundLog:
        """The same without the learners that were asked, live or late: for runs of thousands."""
        told = (self.shard, self.number, self.fragment, self.opened_at)
        return RoundLog(*told, finished_at=self.finished_at, result=self.result, life=self.life)


@dataclass(slots=True)
class Stay:
    """A learner as one shard sees it, for as long as it is live there, and why it came and went."""

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

    @property
    def run_step(self) -> int:
        """s_m: what the shard told it at join, and its own steps since."""
        return self.offset + self.step


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
    """One shard of the syncer."""

    name: str
    phase: str = "starting"  # of its process and its part of the run
    lives: list[ProcessLife] = field(default_factory=list)
    terms: list[int] = field(default_factory=list)  # those that it was granted, in order
    clock: int = 0  # as its present life tells; one that was started again may be behind
    clock_max: int = 0  # the furthest of all lives: what the coordinator counts of a budget
    heard_at: float | None = None
    merged: int = 0
    abandoned: int = 0
    members: dict[str, Stay] = field(default_factory=dict)
    departed: list[Stay] = field(default_factory=list)  # since the oldest open round began
    stays: list[Stay] = field(default_factory=list)  # all that ever were, of a whole tape
    versions: dict[int, Version] = field(default_factory=dict)
    open: dict[int, RoundLog] = field(default_factory=dict)
    rounds: list[RoundLog] = field(default_factory=list)  # those that are over
    lost: list[RoundLog] = field(default_factory=list)  # that were open when its process ended
    ticks: list[TickLog] = field(default_factory=list)
    reports: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # run step and when
    moved: tuple[int, list[tuple[str, int, int]]] = field(default_factory=lambda: (-1, []))
    """Whose run steps the latest reports moved, from where to where; before it, the number of the
    record that told them."""
    last_merged: dict[int, RoundLog] = field(default_factory=dict)
    paths: dict[str, tuple[int, str]] = field(default_factory=dict)
    folds: dict[int, dict[Asking, tuple[float, Fold]]] = field(default_factory=dict)
    """By fragment, what was folded for its next version."""
    greeting: tuple[int, Hello] | None = None  # the latest connection, accepted or refused at once
    outages: list[Outage] = field(default_factory=list)

    @property
    def index(self) -> int:
        number = self.name.rpartition("-")[2]
        return int(number) if number.isdigit() else 0

    @property
    def life(self) -> int:
        """The number of its present life, from 1."""
        return max(1, len(self.lives))

    def clock_by(self, at: float) -> int:
        index = bisect.bisect_right(self.ticks, at, key=lambda tick: tick.at)
        return self.ticks[index - 1].clock if index else 0

    def ticks_of(self, life: int) -> list[TickLog]:
        """How its clock moved in one of its lives."""
        return [tick for tick in self.ticks if tick.life == life]

    def clock_setter(self, cause: int | None, clock: int, quorum: int) -> str:
        """The learner whose report moved the clock there: the K-th that reached it; empty: none."""
        seq, moved = self.moved
        reached_now = [name for name, before, step in moved if before < clock <= step]
        if seq != cause or not reached_now:
            return ""
        reached = sum(member.run_step >= clock for member in self.members.values())
        others = reached - sum(name in self.members for name in reached_now)
        return reached_now[min(max(quorum - others, 1), len(reached_now)) - 1]

    def reports_of(self, life: int, learner: str) -> list[tuple[int, float]]:
        """What a learner reported to one of its lives."""
        starts = [own.started_at for own in self.lives]
        since = starts[life - 1] if 1 < life <= len(starts) else -math.inf
        until = starts[life] if life < len(starts) else math.inf
        return [(step, at) for step, at in self.reports.get(learner, []) if since <= at < until]
