"""Exact accounts of chip-time, in chip-microseconds.

Spans are arrays of shape (n, 5), int64: start, end, kind, chips, chips allocated.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from decoupled_diloco_plan.goodput.chip_learner import (
    DOWNSCALE,
    LOST,
    RESTART,
    RUN,
    SHORT,
    UPSCALE,
    Integers,
)

CAUSES = {
    "waiting": ("wait", "waiting for other learners: a barrier, or a missing quorum"),
    "downscale": ("down", "paused while slices leave a learner"),
    "upscale": ("up", "paused while slices join a learner"),
    "restart": ("restart", "restarts of non-elastic training"),
    "lost_work": ("lost", "steps since the last checkpoint, or the interrupted step"),
    "below_minimum": ("short", "paused because a learner has too few slices"),
    "missing_chips": ("miss", "slices that are away, or have returned but not joined yet"),
    "stragglers": ("slow", "chips slowed down by the slowest chip of their learner"),
}
"""All badput: column head and description per cause."""

_CAUSE_OF = {
    DOWNSCALE: "downscale",
    UPSCALE: "upscale",
    RESTART: "restart",
    LOST: "lost_work",
    SHORT: "below_minimum",
}


@dataclass(slots=True)
class Account:
    """Chip-time of one simulated run, in chip-microseconds; `check` verifies the total."""

    allocated: int = 0
    useful: int = 0
    badput: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    tokens: int = 0  # useful chip-time at the pace of a learner whose slowdown is 1
    wall: int = 0  # microseconds
    up: int = 0  # microseconds in which at least one learner steps and does not wait for others
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
        """Move an amount from useful time to a cause."""
        self.useful -= amount
        self.badput[cause] += amount

    def check(self) -> None:
        """Assert that useful time and all badput add up to the allocated time, exactly."""
        assert self.useful + sum(self.badput.values()) == self.allocated
        assert min(self.useful, *self.badput.values()) >= 0


class Living(Protocol):
    """A source of spans."""

    spans: array[int]

    def advance(self, until: int) -> None:
        """Append spans up to this instant, or somewhat beyond."""


@dataclass(slots=True)
class Feed:
    """The spans of one life in windows; a span is split where a window ends."""

    life: Living
    _rest: Integers = field(default_factory=lambda: np.empty((0, 5), np.int64))

    def take(self, until: int) -> Integers:
        """Return the spans from the end of the last window until this instant."""
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
    """Book the spans of one learner; all of its runs count as useful at first."""
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
    """Return the intervals, shape (n, 2), in which a learner runs and does not wait for others.

    Args:
        runs: Spans, or intervals of shape (n, 2), in order and disjoint.
        waits: Intervals of shape (n, 2), in order and disjoint.
    """
    # The running sum is 1 exactly where a run is open (+1) and no wait is (-2).
    edges = (runs[:, 0], runs[:, 1], waits[:, 0], waits[:, 1])
    at = np.concatenate(edges)
    change = np.repeat((1, -1, -2, 2), [len(edge) for edge in edges])
    order = np.argsort(at, kind="stable")
    at, steps = at[order], np.cumsum(change[order])[:-1] == 1
    found = np.stack([at[:-1], at[1:]], axis=1)[steps]
    return np.asarray(found[found[:, 0] < found[:, 1]])


def stepping(runs: list[Integers]) -> tuple[Integers, Integers]:
    """Return the instants at which the number of stepping learners changes, and the new numbers."""
    starts = np.concatenate([run[:, 0] for run in runs])
    ends = np.concatenate([run[:, 1] for run in runs])
    at = np.concatenate([starts, ends])
    change = np.concatenate([np.ones_like(starts), -np.ones_like(ends)])
    # At equal instants ends sort before starts, so a run that continues does not count twice.
    order = np.lexsort((change, at))
    return at[order], np.cumsum(change[order])


def overlap(runs: Integers, starts: Integers, ends: Integers) -> Integers:
    """Return each run's microseconds inside these intervals, which are in order and disjoint."""
    if not len(starts):
        return np.zeros(len(runs), np.int64)
    before = np.concatenate([[0], np.cumsum(ends - starts)])

    def measure(at: Integers) -> Integers:
        index = np.searchsorted(starts, at, side="right")
        last = np.maximum(index - 1, 0)
        inside = np.minimum(at, ends[last]) - starts[last]
        return np.where(index > 0, before[last] + inside, 0)

    return measure(runs[:, 1]) - measure(runs[:, 0])
