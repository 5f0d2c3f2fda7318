"""How a run went so far, in a bounded number of samples of its `RunModel`.

The model knows the present alone, whatever the run's length. Here its state is noted at equal
intervals of the run's time, also while an old tape is read. When there are too many samples every
other one goes, and the interval doubles.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.observe.run_data import Evaluation, Rate
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.status import state_of

SAMPLES_MAX = 360
INTERVAL_SECONDS = 1.0
"""The first interval."""

LINES_MAX = 12
"""So many learners have a line of their own for their loss; of more, the middle and the range."""

AWAY_STATES = ("left", "finished", "ended")
"""States in which a learner's time counts for nothing."""

Span = list[Any]
"""From which sample on, in which state."""


@dataclass
class PageHistory:
    """Samples of a run, and what follows from them.

    Attributes:
        interval: Seconds from one sample to the next.
        rows: For each sample, what `columns` name.
        spans: For each learner and shard, its states, each with the sample in which it began.
        thinned: How often samples were dropped.
    """

    interval: float = INTERVAL_SECONDS
    rows: list[list[Any]] = field(default_factory=list)
    spans: dict[str, list[Span]] = field(default_factory=dict)
    evaluations: list[list[Any]] = field(default_factory=list)
    thinned: int = 0
    stepping_seconds: float = 0.0
    learner_seconds: float = 0.0
    up: Rate = field(default_factory=Rate)
    down: Rate = field(default_factory=Rate)
    _evaluation: Evaluation | None = None

    @property
    def due(self) -> float:
        """The instant of the next sample, in seconds since the run's first record."""
        return len(self.rows) * self.interval

    @property
    def time_in_steps(self) -> float | None:
        """About the share of the learners' time so far that went into steps."""
        return self.stepping_seconds / self.learner_seconds if self.learner_seconds else None

    def follow(self, run: RunModel, now: float) -> None:
        """Takes the samples that are due at an instant; the state is that of now."""
        evaluation = run.evaluations[-1] if run.evaluations else None
        if evaluation is not self._evaluation and evaluation is not None:
            self._evaluation = evaluation
            self.evaluations.append([evaluation.at, evaluation.global_step, evaluation.loss])
            if len(self.evaluations) > SAMPLES_MAX:
                self.evaluations = self.evaluations[:-1:2] + self.evaluations[-1:]
        for name, rate in (("data_sent", self.up), ("data_received", self.down)):
            moved = run.bytes_total
            if moved is not None:
                rate.add(now, getattr(moved, name))
        while self.due <= now:
            self._sample(run, min(now, self.due))

    def _sample(self, run: RunModel, at: float) -> None:
        index = len(self.rows)
        states = {name: state_of(run, one, at) for name, one in run.learners.items()}
        shards = {name: shard.phase for name, shard in run.shards.items()}
        for name, state in (states | shards).items():
            spans = self.spans.setdefault(name, [])
            if not spans or spans[-1][1] != state:
                spans.append([index, state])
        self._count(run, states.values())
        counts: dict[str, int] = {}
        for state in states.values():
            counts[state] = counts.get(state, 0) + 1
        rates = [run.token_rate.per_second(at), self.up.per_second(at), self.down.per_second(at)]
        opened = sum(len(shard.open) for shard in run.shards.values())
        self.rows.append([run.step, *rates, opened, counts, self._losses(run)])
        if len(self.rows) > SAMPLES_MAX:
            self._thin()

    def _count(self, run: RunModel, states: Iterable[str]) -> None:
        if run.tokens:
            there = [state for state in states if state not in AWAY_STATES]
            self.learner_seconds += self.interval * len(there)
            self.stepping_seconds += self.interval * there.count("stepping")

    def _losses(self, run: RunModel) -> dict[str, float]:
        """The last loss of each learner or, of many, how they lie."""
        known = {name: one.loss for name, one in run.learners.items() if one.loss is not None}
        if len(run.learners) <= LINES_MAX:
            return {name: round(loss, 5) for name, loss in known.items()}
        if len(known) < 2:
            return {}
        tenths = statistics.quantiles(known.values(), n=10)
        chosen = {"tenth": tenths[0], "middle": tenths[4], "nine tenths": tenths[-1]}
        return {name: round(loss, 5) for name, loss in chosen.items()}

    def _thin(self) -> None:
        """Of each two samples one is left: rates and losses are means, the rest is the later's."""
        self.rows = [_mean_of(self.rows[i : i + 2]) for i in range(0, len(self.rows), 2)]
        self.interval *= 2
        self.thinned += 1
        for name, spans in self.spans.items():
            kept: list[Span] = []
            for begin, state in spans:
                if kept and kept[-1][0] == begin // 2:
                    kept.pop()
                if not kept or kept[-1][1] != state:
                    kept.append([begin // 2, state])
            self.spans[name] = kept


def _mean_of(rows: Sequence[list[Any]]) -> list[Any]:
    step, _, _, _, opened, counts, losses = rows[-1]
    rates = [_mean([row[column] for row in rows]) for column in (1, 2, 3)]
    means = {name: _mean([row[6].get(name) for row in rows]) for name in losses}
    return [step, *rates, opened, counts, means]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
