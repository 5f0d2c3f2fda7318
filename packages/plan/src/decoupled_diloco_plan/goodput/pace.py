"""Learners of unequal speed: how long each waits, by the protocol core's own rules.

When the clock ticks, when a round's window closes and how long the grace window is, the core
decides (`clock.reached_at`, `quorum.window_over`, `grace.Timing`), tick by tick. That is some
thousand calls, so it is done for some thousand ticks without failures, and its shares hold for the
run; a month of a cluster has millions of ticks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decoupled_diloco.protocol.clock import reached_at
from decoupled_diloco.protocol.grace import Timing
from decoupled_diloco.protocol.quorum import window_over
from decoupled_diloco_plan.goodput.settings import Cluster

TICKS = 2000
MARGIN = 0.8
SHORTEST = 0.2
"""No step is shorter than this share of its mean."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What unequal speeds come to."""

    useful: tuple[float, ...]  # for each learner the share of its time in steps; the rest it waits
    # Ticks of the clock for each step that the fastest learner makes if it never waits.
    against_fastest: float
    took_part: tuple[float, ...]  # for each learner the share of the rounds that it was in


def pace_of(cluster: Cluster, seed: int) -> Pace:
    """Steps every learner through `TICKS` ticks.

    A learner may not go on from step i before round i − `slack_steps` is over. One that steps by
    itself between two ticks has something to report, and takes part if its report comes in time. Of
    the cluster slowdowns, jitter, quorum, slack and grace count; its chips do not.
    """
    rng = np.random.default_rng((seed, 7))
    mean = np.asarray(cluster.slowdowns or (1.0,) * cluster.learners)
    learners = len(mean)
    timing, closed = Timing(), np.zeros(TICKS)
    now, busy = np.zeros(learners), np.zeros(learners)
    present, before = np.zeros(learners), 0.0
    finished, first = np.zeros((TICKS, learners)), np.zeros(learners, np.int64)
    for tick in range(TICKS):
        jitter = 1 + cluster.jitter * rng.standard_normal(learners)
        length = mean * np.maximum(jitter, SHORTEST)
        held_until = closed[tick - 1 - cluster.slack_steps] if tick > cluster.slack_steps else 0.0
        now = np.maximum(now, held_until if cluster.quorum > 1 else 0.0) + length
        busy += length
        finished[tick] = now
        opened = reached_at(now.tolist(), cluster.quorum)
        assert opened is not None, "a quorum is at most all learners"
        reports = _reports(finished[: tick + 1], first, before)
        margin = MARGIN if cluster.grace else 0.0
        window = timing.window(cluster.slack_steps, margin, float(mean.min()))
        closed[tick], _ = window_over(
            opened, reports.tolist(), quorum=cluster.quorum, grace_seconds=window.seconds
        )
        timing.quorum.update(max(0.0, float(np.sort(reports)[cluster.quorum - 1]) - opened))
        present += reports <= closed[tick]
        before = opened
    return Pace(
        useful=tuple((busy / now).tolist()),
        against_fastest=float(TICKS * mean.min() / closed[-1]),
        took_part=tuple((present / TICKS).tolist()),
    )


def _reports(finished: np.ndarray, first: np.ndarray, after: float) -> np.ndarray:
    """For each learner when it first finished a step after this instant.

    `finished`: when each step was, shape (steps, learners); `first`: for each learner such a step
    at an earlier instant, which is moved on.
    """
    learners, last = np.arange(len(first)), len(finished) - 1
    while (behind := (first < last) & (finished[first, learners] <= after)).any():
        first += behind
    return np.asarray(finished[first, learners])
