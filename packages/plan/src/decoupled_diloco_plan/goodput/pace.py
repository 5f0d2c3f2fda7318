"""Waiting times of learners with unequal speed, by the protocol core's rules.

The core decides, tick by tick, when the clock ticks, when a round's window closes and how long the
grace window is (`clock.reached_at`, `clock.window_over`, `clock.Timing`). A month of a cluster has
millions of ticks. So only some thousand ticks without failures are simulated, and the resulting
shares are used for the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from decoupled_diloco.protocol.clock import Timing, reached_at, window_over
from decoupled_diloco_plan.goodput.cluster_settings import Cluster

TICKS = 2000
MARGIN = 0.8
SHORTEST = 0.2
"""Minimum length of a step, as a share of its mean."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Effects of unequal speeds."""

    useful: tuple[float, ...]  # per learner: share of its time in steps; the rest is waiting
    # ticks of the clock per step of the fastest learner if it never waited
    against_fastest: float
    took_part: tuple[float, ...]  # per learner: share of the rounds that it was in


def pace_of(cluster: Cluster, seed: int) -> Pace:
    """Step every learner through `TICKS` ticks.

    A learner may not continue from step i before round i − `slack_steps` ends. A learner that
    finishes a step between two ticks reports it, and takes part if the report arrives in time. The
    cluster's slowdowns, jitter, quorum, slack and grace are used; its chips are not.
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
    """Return when each learner first finished a step after this instant.

    Args:
        finished: The end of each step, shape (steps, learners).
        first: Per learner the index of such a step for an earlier instant; it is advanced in place.
        after: The instant.
    """
    learners, last = np.arange(len(first)), len(finished) - 1
    while (behind := (first < last) & (finished[first, learners] <= after)).any():
        first += behind
    return np.asarray(finished[first, learners])
