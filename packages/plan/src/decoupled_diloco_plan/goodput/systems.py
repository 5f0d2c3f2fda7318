"""Simulation of the learners of each system together.

| system | learners | a failure stops | learners that wait |
|---|---|---|---|
| data-parallel | 1, not elastic | everything, for a restart | none |
| elastic | 1 | everything, for a downscale | none |
| barrier | M, elastic | its learner | all, for the last one, every H steps |
| decoupled | M, elastic | its learner | none while K learners step |

The protocol core decides when a clock is stalled, when a barrier's window closes, and, for unequal
speeds, every tick (`pace`). The stall decision depends only on the number of stepping learners. It
is evaluated once per number, because a month has millions of ticks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from decoupled_diloco.protocol.clock import stands
from decoupled_diloco_plan.goodput.barrier import Barrier
from decoupled_diloco_plan.goodput.chip_learner import (
    RUN,
    UPSCALE,
    Habits,
    Integers,
    Life,
    Repair,
    Slices,
    Visits,
    failures,
)
from decoupled_diloco_plan.goodput.chip_time import Account, Feed, enter, overlap, runs_of, stepping
from decoupled_diloco_plan.goodput.cluster_settings import Cluster, microseconds
from decoupled_diloco_plan.goodput.pace import pace_of

WARM_UP_REPAIRS = 6
"""Warm-up in mean repair times: at first all slices are present."""

WINDOW_FAILURES = 50_000
"""Expected failures per window; it bounds the memory, independent of the number of chips."""

EXACT_MAX = 4 * 10**18
"""Limit on the chip-microseconds of a window, so that its sums are exact in 64 bits."""


class Guest:
    """A scavenged block that is a separate learner: it joins, fetches the weights, and leaves."""

    def __init__(self, cluster: Cluster, chips: int, rng: np.random.Generator) -> None:
        assert cluster.scavenged is not None
        self.spans = array("q")
        self._chips, self._terms, self._rng = chips, cluster.scavenged, rng
        self._stay_seconds = cluster.block_stay_seconds
        self._clock = 0

    def advance(self, until: int) -> None:
        """Append spans up to this instant."""
        while self._clock < until:
            stay = _exponential(self._stay_seconds, self._rng)
            join = min(stay, microseconds(self._terms.join_seconds))
            ready, end = self._clock + join, self._clock + stay
            if join:
                self.spans.extend((self._clock, ready, UPSCALE, self._chips, self._chips))
            if ready < end:
                self.spans.extend((ready, end, RUN, self._chips, self._chips))
            self._clock = end + _exponential(self._terms.away_seconds, self._rng)


def simulate(
    cluster: Cluster,
    seconds: float,
    seed: int,
    watch: Callable[[list[Integers], list[Integers]], None] | None = None,
) -> Account:
    """Simulate one run.

    Args:
        cluster: The cluster.
        seconds: Length of the run, after a warm-up that is not counted.
        seed: Seed of the random numbers.
        watch: Called per window with each learner's spans and known waiting intervals, shape (n,
            2). The last call has the remaining waiting intervals. Waiting due to unequal speeds is
            a share without instants, so it is not included.
    """
    warm_up = microseconds(WARM_UP_REPAIRS * cluster.constants.repair_seconds)
    begin = 0 if cluster.preemptions else warm_up
    end = begin + microseconds(seconds)
    feeds = [Feed(life) for life in _lives(cluster, seed)]
    for feed in feeds:
        if begin:
            feed.take(begin)
    account = Account(wall=end - begin)
    books = _Books(cluster, seed, account, begin, len(feeds))
    window = _window(cluster)
    for start in range(begin, end, window):
        until = min(end, start + window)
        spans = [feed.take(until) for feed in feeds]
        waits = books.enter(spans, start, until)
        if watch is not None:
            watch(spans, waits)
    waits = books.close(end)
    if watch is not None:
        watch([each[:0] for each in spans], waits)
    account.check()
    return account


def _window(cluster: Cluster) -> int:
    """Return the length of a window, microseconds."""
    scavenged = cluster.scavenged
    chips = cluster.chips + (scavenged.chips if scavenged else 0)
    rate = cluster.chips / cluster.mtbi_seconds
    if scavenged:
        rate += scavenged.blocks / cluster.block_stay_seconds
    if cluster.stragglers:
        rate += cluster.chips / cluster.stragglers.interval_seconds
    return max(1, min(EXACT_MAX // chips, microseconds(min(1e12, WINDOW_FAILURES / rate))))


class _Books:
    """The account of a run, updated window by window."""

    def __init__(
        self, cluster: Cluster, seed: int, account: Account, begin: int, lives: int
    ) -> None:
        self._cluster, self._account = cluster, account
        # Each learner has a separate generator per purpose, so a change to one keeps other draws.
        self._rngs = [np.random.default_rng((seed, m, 3)) for m in range(lives)]
        self._slow_until = [0] * lives
        self._slowdowns = [*(cluster.slowdowns or (1.0,) * cluster.learners)]
        self._slowdowns += [1.0] * (lives - cluster.learners)
        self._useful = [Fraction(1)] * lives
        unequal = cluster.quorum > 1 and (cluster.slowdowns or cluster.jitter)
        if cluster.system == "decoupled" and unequal:
            pace = pace_of(cluster, seed)
            self._useful[: cluster.learners] = [_fraction(share) for share in pace.useful]
        self._barrier: Barrier | None = None
        if cluster.system == "barrier":
            self._barrier = Barrier(cluster, begin, np.random.default_rng((seed, 5)))

    def enter(self, spans: list[Integers], start: int, until: int) -> list[Integers]:
        """Book one window; return each learner's known waiting intervals."""
        runs = [runs_of(each) for each in spans]
        for each in spans:
            enter(self._account, each)
        slow = [self._slow(m, start, until) for m in range(len(runs))]
        if self._barrier is not None:
            return self._barrier.take(runs, slow)
        halted = self._halted(runs, start, until)
        self._account.up += until - start - int(np.diff(halted, axis=1).sum())
        for m, each in enumerate(runs):
            self._learner(m, each, halted, slow[m])
        return [halted] * len(runs)

    def close(self, end: int) -> list[Integers]:
        """Book the rest at the end of the run; return the remaining waiting intervals."""
        if self._barrier is not None:
            return self._barrier.close(self._account, end)
        return [np.empty((0, 2), np.int64)] * len(self._slowdowns)

    def _halted(self, runs: list[Integers], start: int, until: int) -> Integers:
        """Return the intervals in which the protocol core's rule stalls the syncer's clock."""
        at, count = stepping(runs)
        table = [stands(live, self._cluster.quorum) for live in range(len(runs) + 1)]
        edges = np.concatenate([[start], at, [until]])
        still = np.array(table)[np.concatenate([[0], count])]
        return np.asarray(np.stack([edges[:-1], edges[1:]], axis=1)[still])

    def _learner(
        self, m: int, runs: Integers, halted: Integers, slow: tuple[Integers, Integers]
    ) -> None:
        """Move the part of one learner's runs that was not useful to its causes."""
        account, chips = self._account, runs[:, 3]
        run = int(np.dot(runs[:, 1] - runs[:, 0], chips))
        waited = int(np.dot(overlap(runs, *halted.T), chips))
        waited += _part(run - waited, 1 - self._useful[m])
        account.move("waiting", waited)
        dragged = 0
        if len(slow[0]) and run:
            inside = int(np.dot(overlap(runs, *slow), chips))
            dragged = _part(inside * (run - waited) // run, self._drag())
            account.move("stragglers", dragged)
        account.tokens += _part(run - waited - dragged, 1 / _fraction(self._slowdowns[m]))

    def _drag(self) -> Fraction:
        assert self._cluster.stragglers is not None
        slowdown = _fraction(self._cluster.stragglers.slowdown)
        return slowdown / (1 + slowdown)

    def _slow(self, m: int, start: int, until: int) -> tuple[Integers, Integers]:
        """Return the intervals in which one learner has a straggler, in order and disjoint."""
        terms = self._cluster.stragglers
        if terms is None or m >= self._cluster.learners:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rng, chips = self._rngs[m], self._cluster.chips_of(m)
        count = rng.poisson(chips * (until - start) / microseconds(terms.interval_seconds))
        begins = np.sort(rng.integers(start, until, count))
        # A spell that began in an earlier window continues in this one.
        if self._slow_until[m] > start:
            begins = np.concatenate([[start], begins])
        ends = begins + microseconds(terms.seconds)
        if self._slow_until[m] > start:
            ends[0] = max(self._slow_until[m], start)
        ends = np.maximum.accumulate(ends)
        if len(ends):
            self._slow_until[m] = int(ends[-1])
        # Merge overlapping spells: one interval from each gap's end to the next gap's start.
        apart = np.concatenate([[True], begins[1:] > ends[:-1]]) if len(begins) else begins > 0
        last = np.concatenate([apart[1:], [True]]) if len(begins) else apart
        return begins[apart], np.minimum(ends[last], until)


def _lives(cluster: Cluster, seed: int) -> list[Life | Guest]:
    """Return every learner, followed by the scavenged learners."""
    blocks = _blocks(cluster)
    if not blocks or cluster.alone:
        return [_life(cluster, m, seed, blocks) for m in range(cluster.learners)]
    own = [_life(cluster, m, seed, ()) for m in range(cluster.learners)]
    rngs = (np.random.default_rng((seed, m, 2)) for m in range(len(blocks)))
    return [*own, *(Guest(cluster, chips, rng) for chips, rng in zip(blocks, rngs, strict=True))]


def _blocks(cluster: Cluster) -> tuple[int, ...]:
    terms = cluster.scavenged
    return () if terms is None else tuple(Slices(terms.chips, terms.blocks).sizes())


def _life(cluster: Cluster, m: int, seed: int, blocks: tuple[int, ...]) -> Life:
    constants, chips = cluster.constants, cluster.chips_of(m)
    slices = Slices(chips, max(1, round(chips / constants.slice_chips)))
    repair = Repair(constants.repair_seconds, constants.repair_power, constants.repair_tail)
    rng = np.random.default_rng((seed, m, 0))
    return Life(
        slices,
        habits_of(cluster, slices.count),
        failures(slices, cluster.mtbi_seconds, repair, rng),
        _visits(cluster, slices.count, np.random.default_rng((seed, m, 1))),
        blocks,
    )


def habits_of(cluster: Cluster, slices: int) -> Habits:
    constants = cluster.constants
    elastic = Habits(
        step=microseconds(constants.step_seconds),
        downscale=microseconds(constants.downscale_seconds),
        upscale=microseconds(constants.upscale_seconds),
        window=microseconds(constants.upscale_window_seconds),
        minimum=max(1, -int(-cluster.minimum_share * slices // 1)),
        sudden=cluster.sudden,
    )
    if cluster.system != "data-parallel":
        return elastic
    restart = microseconds(constants.restart_seconds)
    return replace(
        elastic,
        downscale=restart,
        upscale=restart,
        spare=True,
        checkpoint=microseconds(cluster.checkpoint_seconds),
    )


def _visits(cluster: Cluster, slices: int, rng: np.random.Generator) -> Visits:
    """Return slices that leave without a failure: preempted slices and scavenged blocks."""
    taken = [
        (microseconds(each.at_seconds), which, microseconds(each.seconds))
        for each in cluster.preemptions
        for which in range(-int(-each.share * slices // 1))
    ]
    terms = cluster.scavenged
    if terms is None or not cluster.alone:
        return Visits(heap=taken)
    stay_seconds = cluster.block_stay_seconds
    return Visits(
        stay=lambda: _exponential(stay_seconds, rng),
        away=lambda: _exponential(terms.away_seconds, rng),
        heap=taken,
    )


def _exponential(mean_seconds: float, rng: np.random.Generator) -> int:
    return microseconds(rng.exponential(mean_seconds)) if mean_seconds else 0


def _fraction(value: float) -> Fraction:
    """Return the value as a ratio, to about 1e-6, so that shares of amounts are exact."""
    return Fraction(value).limit_denominator(10**6)


def _part(amount: int, share: Fraction) -> int:
    """Return a share of an amount, rounded down."""
    return amount * share.numerator // share.denominator
