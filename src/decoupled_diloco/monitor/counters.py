"""Counters of a process: a few plain numbers that no state holds.

All other metrics are read from the process's state at each scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from decoupled_diloco.protocol.messages import FromLearner, Leave, RoundFinished, StepReport
from decoupled_diloco.run_model.phrases import departure_of

SECONDS_BOUNDS = (0.005, 0.02, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histograms: from a merge of a small fragment to a round on a slow link."""


@dataclass
class Durations:
    """A histogram of durations; the last count is for values above all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.seconds += seconds


@dataclass
class ShardTally:
    """Counters of a shard.

    Attributes:
        rounds: Number of finished rounds: ``merged``, ``abandoned``, ``idle`` (no learner had
            anything new).
        contributions: Number of contributions by the states of `Participant`.
        reports: The last report of each learner that has not left.
        discarded_fragment_tokens: Overwritten tokens of all learners, counted once per fragment.
        failures: Number of failures of each learner that the shard has noticed.
        preemptions: Number of times that each learner was asked to stop, and left in order.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    contributions: Counter[str] = field(default_factory=Counter)
    round_durations: Durations = field(default_factory=Durations)
    merge_durations: Durations = field(default_factory=Durations)
    reports: dict[str, StepReport] = field(default_factory=dict)
    discarded_fragment_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    preemptions: Counter[str] = field(default_factory=Counter)

    def evicted(self, learner: str, reason: str) -> None:
        """Count the departure of a learner, if it failed or was preempted."""
        kind = departure_of(reason)
        if kind is not None:
            (self.failures if kind == "failed" else self.preemptions)[learner] += 1

    def finished(self, round: RoundFinished) -> None:
        """Count a finished round."""
        merged = round.verdict == "merged"
        self.rounds["merged" if merged else "abandoned" if round.given_up else "idle"] += 1
        self.contributions.update(part.state for part in round.participants)
        if merged:
            self.round_durations.add(round.finished_seconds)
            if round.uploaded_seconds is not None:
                self.merge_durations.add(round.finished_seconds - round.uploaded_seconds)

    def count_message(self, learner: str, message: FromLearner) -> None:
        """Count a message from a learner."""
        if isinstance(message, StepReport):
            before = self.reports.get(learner)
            known = 0 if before is None else before.discarded_tokens
            # A restarted learner counts from 0 again; its total must not decrease.
            self.discarded_fragment_tokens += max(0, message.discarded_tokens - known)
            self.reports[learner] = message
        elif isinstance(message, Leave):
            self.reports.pop(learner, None)


@dataclass
class LearnerTally:
    """Counters of a learner.

    Attributes:
        calls: Steps of this incarnation; ``seconds``: total time of these calls.
        applied: Global fragment versions applied; ``applied_at``: time of the last one.
        loss: The last loss that the training loop reported.
    """

    calls: int = 0
    seconds: float = 0.0
    applied: int = 0
    applied_at: float | None = None
    loss: float | None = None

    def stepped(self, began: float, ended: float, applied: int, loss: float | None) -> None:
        """Count a call of `Learner.step` that began and ended at these instants."""
        self.calls += 1
        self.seconds += ended - began
        if applied:
            self.applied, self.applied_at = self.applied + applied, ended
        if loss is not None:
            self.loss = loss
