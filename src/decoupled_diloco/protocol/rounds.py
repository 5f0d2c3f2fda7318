"""One round of one fragment: who was asked, who delivered, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decoupled_diloco.protocol.effects import Participant, RoundFinished, RoundOpened
from decoupled_diloco.protocol.grace import Grace
from decoupled_diloco.protocol.messages import Version

AskState = Literal["waiting", "folded", "declined", "refused", "late", "gone"]


@dataclass(slots=True)
class Ask:
    """One learner that was asked for its fragment; what answers another ``number`` is void."""

    learner: str
    epoch: int
    number: int
    path: str
    asked_at: float
    deadline: float
    state: AskState = "waiting"
    steps: int = 0
    tokens: int = 0
    delivered_at: float | None = None
    reason: str = ""


@dataclass(slots=True)
class Round:
    """An open round. Instants are seconds of the shard's clock."""

    number: int
    fragment: int
    tick: int
    base: Version
    opened_at: float
    previous_tick_at: float
    grace: Grace
    final: bool
    quorum_at: float | None = None
    closed_at: float | None = None
    close_reason: str = ""
    settled_at: float | None = None
    quorum_delivered_at: float | None = None
    paused_seconds: float = 0.0
    version: Version | None = None
    asks: dict[str, Ask] = field(default_factory=dict)

    def count(self, *states: AskState) -> int:
        """How many asks are in one of these states."""
        return sum(ask.state in states for ask in self.asks.values())

    @property
    def qualified(self) -> int:
        """Learners that were asked and have not fallen out."""
        return self.count("waiting", "folded")

    @property
    def closes_at(self) -> float:
        """The end of the grace window."""
        return self.opened_at + self.grace.seconds

    def held_up(self, seconds: float) -> None:
        """The shard was paused: everybody gets so much longer."""
        self.paused_seconds += seconds
        if self.quorum_delivered_at is not None:
            self.quorum_delivered_at += seconds
        for ask in self.asks.values():
            ask.deadline += seconds

    def opened(self, why: str) -> RoundOpened:
        """The opening's record for observers."""
        return RoundOpened(
            round=self.number,
            fragment=self.fragment,
            tick=self.tick,
            base=self.base,
            closing=self.final,
            grace_seconds=self.grace.seconds,
            slack_seconds=self.grace.slack,
            step_seconds=self.grace.step,
            quorum_average_seconds=self.grace.quorum,
            merge_average_seconds=self.grace.merge,
            broadcast_average_seconds=self.grace.broadcast,
            why=why,
        )

    def finished(
        self, now: float, verdict: Literal["merged", "abandoned"], reason: str
    ) -> RoundFinished:
        """The round's record for observers."""

        def since(instant: float | None) -> float | None:
            return None if instant is None else instant - self.opened_at

        return RoundFinished(
            round=self.number,
            fragment=self.fragment,
            tick=self.tick,
            version=self.version,
            verdict=verdict,
            reason=reason,
            participants=tuple(
                Participant(
                    learner=ask.learner,
                    state=ask.state,
                    steps=ask.steps,
                    tokens=ask.tokens,
                    asked_seconds=ask.asked_at - self.opened_at,
                    delivered_seconds=since(ask.delivered_at),
                    reason=ask.reason,
                )
                for ask in self.asks.values()
            ),
            quorum_seconds=since(self.quorum_at),
            grace_seconds=self.grace.seconds,
            closed_seconds=since(self.closed_at),
            uploaded_seconds=since(self.settled_at),
            finished_seconds=now - self.opened_at,
            step_seconds=self.grace.step,
            slack_seconds=self.grace.slack,
            why=self.close_reason,
            base=self.base,
            quorum_average_seconds=self.grace.quorum,
            merge_average_seconds=self.grace.merge,
            broadcast_average_seconds=self.grace.broadcast,
        )
