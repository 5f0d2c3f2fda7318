"""What a process counts as it happens, because no state remembers it: plain numbers, a few each.

Everything else that is told of a process is read from its state when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from decoupled_diloco.protocol.effects import RoundFinished
from decoupled_diloco.protocol.messages import FromLearner, Leave, StepReport

SECONDS_BOUNDS = (0.005, 0.02, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histograms: from a merge of a small fragment to a round over a bad link."""


@dataclass
class Durations:
    """How often something took how long; the last count is of what is above all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS_BOUNDS) + 1))
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """It took so long once more."""
        self.counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self.seconds += seconds


@dataclass
class ShardTally:
    """What a shard counts.

    Attributes:
        rounds: How many are over: ``merged``, ``abandoned``, ``idle`` (nobody had anything new).
        contributions: What became of them, by the states of `Participant`.
        reports: The last report of each learner that has not left.
        discarded_fragment_tokens: What all have reported as overwritten, once for each fragment.
    """

    rounds: Counter[str] = field(default_factory=Counter)
    contributions: Counter[str] = field(default_factory=Counter)
    round_durations: Durations = field(default_factory=Durations)
    merge_durations: Durations = field(default_factory=Durations)
    reports: dict[str, StepReport] = field(default_factory=dict)
    discarded_fragment_tokens: int = 0

    def finished(self, round: RoundFinished) -> None:
        """A round is over."""
        merged = round.verdict == "merged"
        self.rounds["merged" if merged else "abandoned" if round.given_up else "idle"] += 1
        self.contributions.update(part.state for part in round.participants)
        if merged:
            self.round_durations.add(round.finished_seconds)
            if round.uploaded_seconds is not None:
                self.merge_durations.add(round.finished_seconds - round.uploaded_seconds)

    def said(self, learner: str, message: FromLearner) -> None:
        """A learner has said something."""
        if isinstance(message, StepReport):
            before = self.reports.get(learner)
            known = 0 if before is None else before.discarded_tokens
            self.discarded_fragment_tokens += max(0, message.discarded_tokens - known)
            self.reports[learner] = message
        elif isinstance(message, Leave):
            self.reports.pop(learner, None)


@dataclass
class LearnerTally:
    """What a learner counts.

    Attributes:
        calls: Steps that were told of in this life; ``seconds``: what their loop waited for that.
        applied: Global versions of fragments that were taken; ``applied_at``: when the last was.
        loss: The last that the loop has told.
    """

    calls: int = 0
    seconds: float = 0.0
    applied: int = 0
    applied_at: float | None = None
    loss: float | None = None

    def stepped(self, began: float, ended: float, applied: int, loss: float | None) -> None:
        """A step was told of, from the one instant to the other."""
        self.calls += 1
        self.seconds += ended - began
        if applied:
            self.applied, self.applied_at = self.applied + applied, ended
        if loss is not None:
            self.loss = loss
