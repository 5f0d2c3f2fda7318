"""Simulation of one learner: it runs, pauses to change its size, and runs again.

Theory of operation. Time is divided into *spans*. In a span of kind `RUN` the learner steps with
the chips that it has. In all others it is paused.

| state | event | effect |
|---|---|---|
| run | a chip fails | at the end of the current step its slice leaves: `DOWNSCALE` |
| run | the window of a returned slice ends | at the end of the step all returned slices join:
`UPSCALE` |
| pause | a chip fails | its slice leaves in the same pause, which does not get longer |
| pause | a slice returns | it waits for its window |
| end of a pause | fewer slices than the minimum | `SHORT`, until enough slices have returned |

A failure during a pause does not restart the pause. The published systems progress with 13 s
between failures and pauses several times as long, which would be impossible otherwise.

Non-elastic training has one kind of pause, `RESTART`. A spare slice replaces the failed one, so the
learner is complete afterwards, and the work since the last checkpoint is `LOST`.

A learner of n chips fails n times as often as one chip, so its failures are one Poisson process.
The failed chip, and so its slice, is drawn for each failure. No state is kept per chip.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from decoupled_diloco_plan.goodput.cluster_settings import SECOND

BLOCK = 4096
"""Number of failures drawn at once."""

FAR = 2.0**62
"""Latest instant of a failure, microseconds: 146,000 years."""

Integers = NDArray[np.int64]
Failures = Iterator[tuple[list[int], list[int], list[int]]]
"""Blocks of failures in order of time: instants, slices and repair times."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Exponentiated Weibull distribution: F(x) = (1 − exp(−(x/σ)^k))^a, with σ from the mean.

    With power a = 1 it is the Weibull distribution. With tail k below 1 its tail is heavier than
    exponential.

    Source: Mudholkar and Srivastava, 1993.
    """

    mean_seconds: float
    power: float
    tail: float

    def draw(self, rng: np.random.Generator, count: int) -> Integers:
        """Draw `count` repair times, microseconds."""
        return self.at(rng.random(count))

    def at(self, share: NDArray[np.float64]) -> Integers:
        """Return the quantiles for these shares, microseconds."""
        scale = self.mean_seconds / _mean(self.power, self.tail)
        seconds = scale * _quantile(share, self.power, self.tail)
        return np.rint(seconds * SECOND).astype(np.int64)


def _quantile(share: NDArray[np.float64], power: float, tail: float) -> NDArray[np.float64]:
    """Return the inverse of F for σ = 1."""
    # Clip so that neither logarithm gets 0.
    below = np.clip(share, 1e-300, 1 - 1e-16) ** (1 / power)
    return np.asarray((-np.log1p(-np.minimum(below, 1 - 1e-16))) ** (1 / tail))


@lru_cache
def _mean(power: float, tail: float) -> float:
    """Return the mean for σ = 1, by the midpoint rule over z = −log(1 − F), where it is smooth."""
    z = (np.arange(400_000) + 0.5) * 1e-4
    survival = -np.expm1(power * np.log1p(-np.exp(-z)))
    edges = np.arange(400_001) * 1e-4
    return float(np.sum(survival * np.diff(edges ** (1 / tail))))


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of one learner, as equal as possible; the first ones have one chip more.

    >>> Slices(10, 3).sizes()
    [4, 3, 3]
    """

    chips: int
    count: int

    def size(self, which: int) -> int:
        return self.chips // self.count + (which < self.chips % self.count)

    def sizes(self) -> list[int]:
        return [self.size(which) for which in range(self.count)]

    def holding(self, chips: Integers) -> Integers:
        """Return the slices that hold these chips, numbered 0 to chips − 1."""
        size, larger = divmod(self.chips, self.count)
        first = larger * (size + 1)
        later = larger + (chips - first) // max(1, size)
        return np.where(chips < first, chips // (size + 1), later)


def failures(
    slices: Slices, mtbi_seconds: float, repair: Repair, rng: np.random.Generator
) -> Failures:
    """Yield the failures of one learner's chips forever."""
    mean, now = mtbi_seconds * SECOND / slices.chips, 0.0
    while True:
        at = now + np.cumsum(rng.exponential(mean, BLOCK))
        now = float(at[-1])
        which = slices.holding(rng.integers(0, slices.chips, BLOCK))
        lengths = repair.draw(rng, BLOCK)
        yield np.minimum(at, FAR).astype(np.int64).tolist(), which.tolist(), lengths.tolist()


NEVER = 2**62
RUN, DOWNSCALE, UPSCALE, RESTART, LOST, SHORT = range(6)


@dataclass(frozen=True, slots=True)
class Habits:
    """Reaction of a learner to failures; times in microseconds.

    With ``spare``, it is complete again after each pause, but loses the work since the last
    checkpoint.
    """

    step: int
    downscale: int
    upscale: int
    window: int
    minimum: int = 1
    spare: bool = False
    checkpoint: int = 0
    sudden: bool = False


@dataclass(slots=True)
class Visits:
    """Slices that leave for other reasons than a failed chip.

    ``stay`` and ``away`` draw how long scavenged slices stay and are away. ``heap`` has tuples
    (instant, slice, time away); a time of −1 is drawn when the slice leaves.
    """

    stay: Callable[[], int] = lambda: NEVER
    away: Callable[[], int] = lambda: 0
    heap: list[tuple[int, int, int]] = field(default_factory=list)


class Life:
    """One learner, from instant 0.

    Args:
        slices: Its own slices. Scavenged slices have the numbers from ``slices.count`` on.
        habits: Its reactions.
        failures: The failures of its chips.
        visits: Slices that leave and return for other reasons.
        scavenged: Chips of each scavenged slice; all are present at first.
    """

    def __init__(
        self,
        slices: Slices,
        habits: Habits,
        failures: Failures,
        visits: Visits | None = None,
        scavenged: tuple[int, ...] = (),
    ) -> None:
        self.spans = array("q")
        """The history, five numbers per span: start, end, kind, chips present, chips allocated."""

        self._slices, self._habits, self._failures = slices, habits, failures
        self._visits = visits or Visits()
        self._extra = scavenged
        for index in range(len(scavenged)):
            leaves = (self._visits.stay(), slices.count + index, -1)
            self._visits.heap.append(leaves)
        heapify(self._visits.heap)
        self._clock = 0
        self._chips = slices.chips + sum(scavenged)
        self._allocated = self._chips
        self._members = slices.count + len(scavenged)
        self._gone: set[int] = set()
        self._held: dict[int, int] = {}
        self._returns: list[tuple[int, int]] = []
        self._times: list[int] = []
        self._which: list[int] = []
        self._lengths: list[int] = []
        self._next = 0
        self._more()

    def advance(self, until: int) -> None:
        """Simulate until this instant, or beyond it to the end of the last span."""
        while self._clock < until:
            self._run()
            if self._clock < NEVER:
                self._stop()

    def _run(self) -> None:
        """Step until something requires a pause."""
        habits, start = self._habits, self._clock
        at = self._next_stop()
        if at <= start:
            return
        # Unless `sudden`, round up to the end of the step (floor of a negative number).
        end = at if habits.sudden else start - (start - at) // habits.step * habits.step
        self._clock = end = min(end, NEVER)
        kept = self._kept(end - start)
        if kept:
            self.spans.extend((start, start + kept, RUN, self._chips, self._allocated))
        if start + kept < end:
            self.spans.extend((start + kept, end, LOST, self._chips, self._allocated))

    def _kept(self, length: int) -> int:
        """Return the part of an interrupted run that is not lost."""
        habits = self._habits
        kept = length // habits.step * habits.step if habits.sudden else length
        if habits.spare and habits.checkpoint:
            kept = kept // habits.checkpoint * habits.checkpoint
        return kept

    def _stop(self) -> None:
        """Pause if slices leave or are due to join."""
        habits, start = self._habits, self._clock
        if self._leave(start):
            kind, length = (RESTART if habits.spare else DOWNSCALE), habits.downscale
        elif self._returns and self._returns[0][0] + habits.window <= start:
            kind, length = (RESTART if habits.spare else UPSCALE), habits.upscale
        else:
            return
        self._stand(kind, start + length)
        while self._members < habits.minimum:
            self._wait_for_more()

    def _stand(self, kind: int, end: int) -> None:
        """Pause; slices that have returned at its start join in an upscale or a restart."""
        start = self._clock
        joining = [] if kind == DOWNSCALE else self._returned(start)
        if end > start:
            self.spans.extend((start, end, kind, self._chips, self._allocated))
        self._clock = end
        self._leave(end)
        for which in joining:
            self._join(which, end)

    def _wait_for_more(self) -> None:
        """Pause until enough slices for the minimum have returned, then add them."""
        start, missing = self._clock, self._habits.minimum - self._members
        ready = sorted(self._returns)[:missing]
        end = max(start, ready[-1][0])
        if end > start:
            self.spans.extend((start, end, SHORT, self._chips, self._allocated))
        self._clock = end
        self._leave(end)
        self._stand(UPSCALE, end + self._habits.upscale)

    def _next_stop(self) -> int:
        """Return when the next upscale is due, or the next present slice leaves."""
        at = self._returns[0][0] + self._habits.window if self._returns else NEVER
        if self._visits.heap:
            at = min(at, self._visits.heap[0][0])
        while self._times[self._next] < at and self._which[self._next] in self._gone:
            self._skip()
        return min(at, self._times[self._next])

    def _leave(self, now: int) -> bool:
        """Remove slices that failed or were preempted until now; return whether any was present."""
        left = False
        while self._times[self._next] <= now:
            which = self._which[self._next]
            if which not in self._gone:
                left = True
                if not self._habits.spare:
                    back = self._times[self._next] + self._lengths[self._next]
                    self._take_out(which, max(now, back))
            self._skip()
        visits = self._visits.heap
        while visits and visits[0][0] <= now:
            at, which, length = heappop(visits)
            if length < 0 and which in self._gone:
                continue
            away = self._visits.away() if length < 0 else length
            if length >= 0:
                self._held[which] = at + length
            if which not in self._gone:
                left = True
                self._take_out(which, max(now, at + away))
        return left

    def _take_out(self, which: int, until: int) -> None:
        self._gone.add(which)
        self._members -= 1
        self._chips -= self._size(which)
        if which >= self._slices.count:
            self._allocated -= self._size(which)
        heappush(self._returns, (until, which))

    def _returned(self, now: int) -> list[int]:
        """Return the slices that are back now, except those that are still preempted."""
        ready = []
        while self._returns and self._returns[0][0] <= now:
            _, which = heappop(self._returns)
            held = self._held.get(which, 0)
            if held > now:
                heappush(self._returns, (held, which))
            else:
                self._held.pop(which, None)
                ready.append(which)
        return ready

    def _join(self, which: int, now: int) -> None:
        self._gone.discard(which)
        self._members += 1
        self._chips += self._size(which)
        if which >= self._slices.count:
            self._allocated += self._size(which)
            heappush(self._visits.heap, (now + self._visits.stay(), which, -1))

    def _size(self, which: int) -> int:
        own = self._slices.count
        return self._slices.size(which) if which < own else self._extra[which - own]

    def _skip(self) -> None:
        self._next += 1
        if self._next == len(self._times):
            self._more()

    def _more(self) -> None:
        self._times, self._which, self._lengths = next(self._failures)
        self._next = 0
