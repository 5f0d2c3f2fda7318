"""What plots and charts have in common: order, smoothing, thinning out, rates, rounds in rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from decoupled_diloco.observe.run_data import LearnerLog, LossPoint
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog

SMOOTHING_STEPS_MIN = 12
SMOOTHING_SHARE = 1 / 60
SMOOTHING_SHARE_MAX = 1 / 6
"""A learner's smoothed loss at a step is that of a straight line through the losses of this share
of its steps before and after it, or of so many steps if that is more: the mean of these, except at
both ends. Of few steps it is the largest share: one line through all of them says nothing."""


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit for an axis of this many seconds, and its name.

    >>> time_unit(250.0), time_unit(3600.0)
    ((1.0, 's'), (60.0, 'min'))
    """
    if seconds < 300:
        return (1.0, "s")
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def time_name(run: RunModel) -> str:
    return "virtual time" if run.virtual else "wall-clock time"


def losses_by_life(learner: LearnerLog) -> Iterator[list[LossPoint]]:
    """The losses of each life, so that no line is drawn across an outage."""
    ends = [life.started_at for life in learner.lives[1:]] + [math.inf]
    rest = list(learner.losses)
    for end in ends:
        part = [loss for loss in rest if loss.at < end]
        rest = rest[len(part) :]
        if part:
            yield part


def smoothed(values: Sequence[float]) -> list[float]:
    """Local straight lines, by least squares; unlike trailing means they do not lag."""
    x, y = np.arange(len(values), dtype=float), np.array(values)
    index = np.arange(len(values))
    least = min(SMOOTHING_STEPS_MIN, int(SMOOTHING_SHARE_MAX * len(values)))
    reach = max(least, int(SMOOTHING_SHARE * len(values)))
    first = np.maximum(0, index - reach)
    last = np.minimum(len(values), index + reach + 1)
    count = last - first

    def mean(terms: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(terms)])
        means: np.ndarray = (sums[last] - sums[first]) / count
        return means

    variance = mean(x * x) - mean(x) ** 2
    covariance = mean(x * y) - mean(x) * mean(y)
    slope = np.where(variance > 1e-6, covariance / np.maximum(variance, 1e-6), 0.0)
    return [float(value) for value in mean(y) + slope * (x - mean(x))]


def averaged(values: Sequence[float], most: int) -> list[float]:
    """No more values than this: means of equal groups."""
    group = math.ceil(len(values) / most)
    if group <= 1:
        return list(values)
    return [float(np.mean(values[i : i + group])) for i in range(0, len(values), group)]


def loss_limits(raw: Sequence[float], lines: Sequence[float]) -> tuple[float, float]:
    """Limits of an axis of losses: a few raw outliers must not flatten all lines."""
    low, high = (float(value) for value in np.percentile(np.array(raw), [0.5, 99.5]))
    low, high = min(low, *lines), max(high, *lines)
    margin = 0.06 * (high - low) or 0.1
    return (low - margin, high + margin)


def step_rates(learner: LearnerLog, edges: Sequence[float]) -> list[float]:
    """Steps per second between each two of these instants."""
    at: list[float] = []
    done: list[int] = []
    for life in learner.lives:
        if life.steps_at:
            begun = life.steps_at[0] - (learner.step_seconds_median or 0.0)
            before = done[-1] if done else 0
            at += [max([begun, life.ready_at or begun, *at[-1:]]), *life.steps_at]
            done += range(before, before + len(life.steps_at) + 1)
    if not at:
        return [0.0] * (len(edges) - 1)
    counts = np.interp(np.array(edges), np.array(at), np.array(done))
    return [
        float(b - a) / (until - since) if until > since else 0.0
        for (a, b), (since, until) in zip(pairwise(counts), pairwise(edges), strict=True)
    ]


def rows_of(rounds: Sequence[RoundLog]) -> list[int]:
    """For each round the first row that is free when it opens.

    Four rows at most, and no row for less than one in fifty: the closing sweep, with all its rounds
    at once, must not make everything else thin.
    """
    free_at = [-math.inf] * 4
    rows = [0] * len(rounds)
    for index in sorted(range(len(rounds)), key=lambda i: rounds[i].opened_at):
        opened = rounds[index].opened_at
        row = next((i for i, at in enumerate(free_at) if at <= opened), 3)
        rows[index], free_at[row] = row, rounds[index].finished_at
    most = sorted(rows)[int(0.98 * len(rows))] if rows else 0
    return [min(row, most) for row in rows]
