"""DiLoCo with a barrier: every H steps, all learners wait for the last one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decoupled_diloco.protocol.clock import reached_at, window_over
from decoupled_diloco_plan.goodput.chip_learner import Integers
from decoupled_diloco_plan.goodput.chip_time import Account, stepping, working
from decoupled_diloco_plan.goodput.cluster_settings import Cluster, microseconds

JITTER_BLOCK = 1024


@dataclass(slots=True)
class _Runs:
    """The runs of one learner that no round has used up, with prefix sums of time and work.

    `time` and `work` have the sums before each run, then the total. Instants and lengths are
    microseconds, work is chip-microseconds.
    """

    starts: list[int] = field(default_factory=list)
    chips: list[int] = field(default_factory=list)
    time: list[int] = field(default_factory=lambda: [0])
    work: list[int] = field(default_factory=lambda: [0])

    def add(self, runs: Integers) -> None:
        lengths = runs[:, 1] - runs[:, 0]
        self.starts += runs[:, 0].tolist()
        self.chips += runs[:, 3].tolist()
        self.time += (self.time[-1] + np.cumsum(lengths)).tolist()
        self.work += (self.work[-1] + np.cumsum(lengths * runs[:, 3])).tolist()

    def time_at(self, instant: int) -> int:
        """Return the run time before this instant."""
        index = bisect_right(self.starts, instant) - 1
        if index < 0:
            return self.time[0]
        return min(self.time[index] + instant - self.starts[index], self.time[index + 1])

    def reached(self, time: int) -> int | None:
        """Return the instant at which this run time is reached; ``None`` if it is not known yet."""
        if time > self.time[-1]:
            return None
        index = max(0, bisect_left(self.time, time) - 1)
        return self.starts[index] + time - self.time[index]

    def work_until(self, time: int) -> int:
        """Return the work in this run time."""
        index = max(0, bisect_left(self.time, time) - 1)
        if index >= len(self.chips):
            return self.work[-1]
        return self.work[index] + self.chips[index] * (time - self.time[index])

    def forget(self, instant: int) -> None:
        """Drop the runs that ended before this instant."""
        index = max(0, bisect_right(self.starts, instant) - 1)
        del self.starts[:index], self.chips[:index], self.time[:index], self.work[:index]
        # No sum is kept between windows, only lengths, so the sums can restart from zero.
        time, work = self.time[0], self.work[0]
        self.time = [each - time for each in self.time]
        self.work = [each - work for each in self.work]


class Barrier:
    """Rounds of H steps; the last learner determines the length of each round.

    A round ends when the protocol core closes a window whose quorum is all learners.
    """

    def __init__(self, cluster: Cluster, begin: int, rng: np.random.Generator) -> None:
        self._cluster, self._rng = cluster, rng
        self._round_at = begin
        self._runs = [_Runs() for _ in range(cluster.learners)]
        slowdowns = cluster.slowdowns or (1.0,) * cluster.learners
        step = microseconds(cluster.constants.step_seconds)
        self._lengths = np.asarray(slowdowns) * step * cluster.period
        self._slowdowns = slowdowns
        self._jitter: list[np.ndarray] = []
        self._needs: list[int] = []
        self._drawn: list[int] = []
        self._worked = [0] * cluster.learners
        self._dragged = [0.0] * cluster.learners
        self._total = [0] * cluster.learners
        self._rounds = 0
        self._up = 0
        self._uncounted = [np.empty((0, 2), np.int64)] * cluster.learners
        self._waits: list[list[tuple[int, int]]] = [[] for _ in range(cluster.learners)]

    def take(
        self, runs: Sequence[Integers], slow: Sequence[tuple[Integers, Integers]]
    ) -> list[Integers]:
        """Process all rounds that end in this window.

        Returns:
            For each learner the intervals in which it waited in these rounds.
        """
        for m, (mine, more) in enumerate(zip(self._runs, runs, strict=True)):
            mine.add(more)
            self._total[m] += int(np.dot(more[:, 1] - more[:, 0], more[:, 3]))
            self._uncounted[m] = np.concatenate([self._uncounted[m], more[:, :2]])
        edges = [(begins.tolist(), ends.tolist()) for begins, ends in slow]
        while self._one_round(edges):
            pass
        for mine in self._runs:
            if mine.starts:
                mine.forget(self._round_at)
        return self._count_up(self._round_at)

    def close(self, account: Account, end: int) -> list[Integers]:
        """Book all learners; run time in the unfinished last round counts as useful.

        Returns:
            For each learner the intervals in which it waited in that round.
        """
        for m, mine in enumerate(self._runs):
            begun = mine.time_at(self._round_at)
            until = begun + self._needs[m]
            done = mine.reached(until)
            if done is not None and done < end:
                self._waits[m].append((done, end))
            self._worked[m] += mine.work_until(min(mine.time[-1], until)) - mine.work_until(begun)
            account.move("waiting", self._total[m] - self._worked[m])
            dragged = min(int(self._dragged[m]), self._worked[m])
            account.move("stragglers", dragged)
            account.tokens += int((self._worked[m] - dragged) / self._slowdowns[m])
        account.rounds = self._rounds
        waits = self._count_up(end)
        account.up = self._up
        return waits

    def _count_up(self, until: int) -> list[Integers]:
        """Count the time in which any learner stepped, up to an instant with known waits."""
        waits = [np.array(each, np.int64).reshape(-1, 2) for each in self._waits]
        steps = []
        for m, runs in enumerate(self._uncounted):
            before, later = runs[runs[:, 0] < until], runs[runs[:, 1] > until]
            steps.append(working(np.minimum(before, until), waits[m]))
            self._uncounted[m] = np.maximum(later, until)
            self._waits[m] = []
        at, count = stepping(steps)
        self._up += int(np.diff(at)[count[:-1] > 0].sum())
        return waits

    def _one_round(self, edges: list[tuple[list[int], list[int]]]) -> bool:
        """Process one round; return False if its end is not known yet."""
        start, runs = self._round_at, self._runs
        if not self._needs:  # kept while the round continues in the next window
            self._drawn = self._draw()
            self._needs = [
                self._with_stragglers(need, edges[m], start) for m, need in enumerate(self._drawn)
            ]
        begun = [mine.time_at(start) for mine in runs]
        ends = [
            mine.reached(time + need)
            for mine, time, need in zip(runs, begun, self._needs, strict=True)
        ]
        known = [end for end in ends if end is not None]
        opened = reached_at(known, len(runs))
        if opened is None:
            return False
        over, _ = window_over(opened, known, quorum=len(runs), grace_seconds=0.0)
        for m, mine in enumerate(runs):
            work = mine.work_until(begun[m] + self._needs[m]) - mine.work_until(begun[m])
            self._worked[m] += work
            self._dragged[m] += work * (1 - self._drawn[m] / self._needs[m])
            if known[m] < over:
                self._waits[m].append((known[m], int(over)))
        self._round_at, self._needs = int(over), []
        self._rounds += 1
        return True

    def _draw(self) -> list[int]:
        """Draw the run time that each learner needs for its next H steps."""
        if not self._cluster.jitter:
            return [round(length) for length in self._lengths]
        if not self._jitter:
            # jitter is the deviation of one step; the mean of H independent steps has 1/sqrt(H)
            # of it. The lower bound keeps a normal variate's tail from giving negative times.
            share = self._cluster.jitter / self._cluster.period**0.5
            shape = (JITTER_BLOCK, len(self._lengths))
            self._jitter = list(np.maximum(0.2, 1 + share * self._rng.standard_normal(shape)))
        return [round(length) for length in self._lengths * self._jitter.pop()]

    def _with_stragglers(self, need: int, edges: tuple[list[int], list[int]], at: int) -> int:
        """Return the longer need of a learner that has a straggler when the round starts."""
        begins, ends = edges
        index = bisect_right(begins, at) - 1
        if self._cluster.stragglers is None or index < 0 or ends[index] <= at:
            return need
        return round(need * (1 + self._cluster.stragglers.slowdown))
