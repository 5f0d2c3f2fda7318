"""Where the chip-time went: exactly, in chip-microseconds.

Spans are arrays of shape (n, 5), int64: start, end, kind, chips, chips allocated.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from decoupled_diloco_plan.goodput.life import (
    DOWNSCALE,
    LOST,
    RESTART,
    RUN,
    SHORT,
    UPSCALE,
    Integers,
)

CAUSES = {
    "waiting": ("wait", "for others: a barrier, or a quorum that is not there"),
    "downscale": ("down", "a learner stands while slices leave it"),
    "upscale": ("up", "a learner stands while slices join it"),
    "restart": ("restart", "training that is not elastic begins again"),
    "lost_work": ("lost", "steps since the last checkpoint, or the step under way"),
    "below_minimum": ("short", "a learner has fewer slices than it needs"),
    "missing_chips": ("miss", "slices that are away, or back and not yet taken in"),
    "stragglers": ("slow", "chips at the pace of the slowest of their learner"),
}
"""Everything that is not useful: the head of its column, and in words."""

_CAUSE_OF = {
    DOWNSCALE: "downscale",
    UPSCALE: "upscale",
    RESTART: "restart",
    LOST: "lost_work",
    SHORT: "below_minimum",
}


@dataclass(slots=True)
class Account:
    """Chip-time of one simulated run, chip-microseconds; `check` says that nothing is missing."""

    allocated: int = 0
    useful: int = 0
    badput: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    tokens: int = 0  # useful chip-time at the pace of a learner whose slowdown is 1
    wall: int = 0  # microseconds
    up: int = 0  # microseconds in which at least one learner steps; who waits for others does not
    rounds: int = 0  # rounds of a barrier

    @property
    def goodput(self) -> float:
        """Share of the allocated chip-time in useful steps, percent."""
        return 100 * self.useful / self.allocated if self.allocated else 0.0

    @property
    def uptime(self) -> float:
        """Share of the time in which at least one learner steps, percent."""
        return 100 * self.up / self.wall if self.wall else 0.0

    def move(self, cause: str, amount: int) -> None:
        """What was taken as useful was not."""
        self.useful -= amount
        self.badput[cause] += amount

    def check(self) -> None:
        """Asserts that useful and all badput together are what was allocated, exactly."""
        assert self.useful + sum(self.badput.values()) == self.allocated
        assert min(self.useful, *self.badput.values()) >= 0


class Living(Protocol):
    """What makes spans."""

    spans: array[int]

    def advance(self, until: int) -> None:
        """Makes spans up to this instant, or somewhat beyond."""


@dataclass(slots=True)
class Feed:
    """The spans of one life in windows: each is cut where the window ends."""

    life: Living
    _rest: Integers = field(default_factory=lambda: np.empty((0, 5), np.int64))

    def take(self, until: int) -> Integers:
        """The spans from where the last window ended until this instant."""
        self.life.advance(until)
        made = np.array(self.life.spans, np.int64).reshape(-1, 5)
        self.life.spans = array("q")
        spans = np.concatenate([self._rest, made])
        now, later = spans[spans[:, 0] < until].copy(), spans[spans[:, 1] > until].copy()
        now[:, 1] = np.minimum(now[:, 1], until)
        later[:, 0] = np.maximum(later[:, 0], until)
        self._rest = later
        return now


def enter(account: Account, spans: Integers) -> None:
    """Books the spans of one learner; every run as useful."""
    lengths = spans[:, 1] - spans[:, 0]
    allocated = int(np.dot(lengths, spans[:, 4]))
    there = lengths * spans[:, 3]
    account.allocated += allocated
    account.badput["missing_chips"] += allocated - int(there.sum())
    account.useful += int(there[spans[:, 2] == RUN].sum())
    for kind, cause in _CAUSE_OF.items():
        account.badput[cause] += int(there[spans[:, 2] == kind].sum())


def runs_of(spans: Integers) -> Integers:
    runs: Integers = spans[spans[:, 2] == RUN]
    return runs


def working(runs: Integers, waits: Integers) -> Integers:
    """The intervals, shape (n, 2), in which a learner runs and does not wait for others.

    Args:
        runs: spans in order and apart; or intervals of shape (n, 2).
        waits: intervals of shape (n, 2), in order and apart.
    """
    edges = (runs[:, 0], runs[:, 1], waits[:, 0], waits[:, 1])
    at = np.concatenate(edges)
    change = np.repeat((1, -1, -2, 2), [len(edge) for edge in edges])
    order = np.argsort(at, kind="stable")
    at, steps = at[order], np.cumsum(change[order])[:-1] == 1
    found = np.stack([at[:-1], at[1:]], axis=1)[steps]
    return np.asarray(found[found[:, 0] < found[:, 1]])


def stepping(runs: list[Integers]) -> tuple[Integers, Integers]:
    """Instants at which the number of learners that step changes, and that number from then on."""
    starts = np.concatenate([run[:, 0] for run in runs])
    ends = np.concatenate([run[:, 1] for run in runs])
    at = np.concatenate([starts, ends])
    change = np.concatenate([np.ones_like(starts), -np.ones_like(ends)])
    order = np.lexsort((change, at))  # who goes on at once leaves before it comes
    return at[order], np.cumsum(change[order])


def overlap(runs: Integers, starts: Integers, ends: Integers) -> Integers:
    """For each run the microseconds inside these intervals, which are in order and disjoint."""
    if not len(starts):
        return np.zeros(len(runs), np.int64)
    before = np.concatenate([[0], np.cumsum(ends - starts)])

    def measure(at: Integers) -> Integers:
        index = np.searchsorted(starts, at, side="right")
        last = np.maximum(index - 1, 0)
        inside = np.minimum(at, ends[last]) - starts[last]
        return np.where(index > 0, before[last] + inside, 0)

    return measure(runs[:, 1]) - measure(runs[:, 0])
