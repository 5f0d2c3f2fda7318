"""Learners that write their tapes elsewhere, or none, as the shards heard of them.

A shard hears of every step, so that steps, tokens, losses and the share that was overwritten are
known. Two things are not: why something was overwritten, and when exactly a step was taken that a
shard heard of late, because a link was cut or the shard itself stood still. Such steps are spread
evenly over the time since the one before.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from decoupled_diloco.observe.history import GAP_MEDIANS, LearnerHistory, Life, Loss
from decoupled_diloco.protocol.messages import LOSS_MAX

BURST_MEDIANS = 0.5
"""Steps that follow each other within less of a median step were heard of late."""


class FromAfar:
    """Builds the histories of learners from what the shards' tapes tell of them."""

    def __init__(self) -> None:
        self._learners: dict[str, LearnerHistory] = {}
        self._lives: dict[tuple[str, int], Life] = {}
        self._counted: dict[tuple[str, int], tuple[int, int]] = {}
        self._epochs: dict[tuple[str, str], int] = {}

    def accepted(self, at: float, shard: str, name: str, epoch: int) -> None:
        """A shard has taken a life of a learner in, for the first time or again."""
        self._epochs[shard, name] = epoch
        learner = self._learners.setdefault(name, LearnerHistory(name, afar=True))
        if (name, epoch) not in self._lives:
            life = self._lives[name, epoch] = Life(at, at, overwritten=0)
            learner.lives.append(life)

    def reported(
        self, at: float, shard: str, name: str, report: Mapping[str, Any], global_step: int
    ) -> None:
        """A shard has heard that a learner has finished a step.

        Raises:
            KeyError, TypeError, ValueError: the report is spoilt.
        """
        key = name, self._epochs.get((shard, name), 0)
        if key not in self._lives:
            return
        learner, life = self._learners[name], self._lives[key]
        steps, tokens = self._counted.get(key, (0, 0))
        new_steps, new_tokens = int(report["step"]) - steps, int(report["tokens"]) - tokens
        if new_steps < 1 or new_tokens < 0:
            return  # another shard has told it already
        self._counted[key] = (steps + new_steps, tokens + new_tokens)
        since = life.steps_at[-1] if life.steps_at else life.started_at
        if not life.steps_at:
            since = max(since, at - new_steps * float(report["seconds"]))
        life.last_at = at
        life.steps_at += [since + (at - since) * (k + 1) / new_steps for k in range(new_steps)]
        each, rest = divmod(new_tokens, new_steps)
        life.step_tokens += [each + (k < rest) for k in range(new_steps)]
        life.ledger.stepped(new_tokens)
        learner.tokens += new_tokens
        life.overwritten = max(life.overwritten or 0, int(report.get("discarded_tokens", 0)))
        self._lost(learner, at, global_step, report.get("loss"))

    def _lost(
        self, learner: LearnerHistory, at: float, global_step: int, loss: float | None
    ) -> None:
        if loss is None:
            return
        if loss >= LOSS_MAX:
            learner.losses_not_finite += 1
        else:
            learner.losses.append(Loss(at, global_step, float(loss)))

    def left(self, shard: str, name: str, reason: str) -> None:
        """A shard no longer counts on a learner."""
        if self._epochs.pop((shard, name), None) and reason == "left: the run is over":
            self._learners[name].lives[-1].over = True

    def finished(self, shard: str) -> None:
        """The run is over for everybody whom a shard still counts on."""
        for where, name in self._epochs:
            if where == shard:
                self._learners[name].lives[-1].over = True

    def histories(self, known: Collection[str]) -> dict[str, LearnerHistory]:
        """Those of all learners but the ones whose own tapes tell more."""
        found = {name: each for name, each in self._learners.items() if name not in known}
        for learner in found.values():
            for life in learner.lives:
                life.steps_at = evenly(life.steps_at)
                life.ready_at = _ready_at(life)
            learner.discarded_tokens = sum(life.overwritten or 0 for life in learner.lives)
        return found


def evenly(steps_at: list[float]) -> list[float]:
    """Spreads steps that came in a burst after a gap over the gap and the burst.

    >>> evenly([0.0, 1.0, 2.0, 3.0, 7.0, 7.0, 7.0, 7.0, 8.0, 9.0])
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    """
    even, median = list(steps_at), _median_gap(steps_at)
    for index, (before, at) in enumerate(pairwise(steps_at), start=1):
        last = index
        if at - before > GAP_MEDIANS * median:
            while last + 1 < len(even) and even[last + 1] - even[last] < BURST_MEDIANS * median:
                last += 1
        count = last - index + 1
        for k in range(count if count > 1 else 0):
            even[index + k] = before + (even[last] - before) * (k + 1) / count
    return even


def _ready_at(life: Life) -> float | None:
    """When it had the global weights: about a step before it had finished its first."""
    if not life.steps_at:
        return None
    return max(life.started_at, life.steps_at[0] - _median_gap(life.steps_at))


def _median_gap(steps_at: list[float]) -> float:
    return statistics.median([b - a for a, b in pairwise(steps_at)] or [0.0])
