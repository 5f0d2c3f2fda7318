"""One round of one fragment: who was asked, who delivered, and where it stands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

from decoupled_diloco.protocol.effects import Participant, RoundFinished, RoundOpened
from decoupled_diloco.protocol.grace import Grace
from decoupled_diloco.protocol.messages import Version

AskState = Literal["waiting", "folded", "declined", "refused", "late", "gone"]


@dataclass(slots=True)
class Ask:
    """One learner that was asked for its fragment; what answers another ``number`` is void.

    ``patient``: it was late too often lately, so only its own deadline counts, not the round's.
    """

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
    patient: bool = False


@dataclass(slots=True)
class Round:
    """An open round. Instants are seconds of the shard's clock.

    What every event looks at is counted as asks come and change (`add`, `move`, `came`, `went`,
    `first_step`), so that an event costs the same with four learners and with four thousand.
    ``leaver``: for whose sake it was opened before its tick; then everybody is asked.
    ``asked_live`` and ``asked_stepping``: live learners, and those of them that have stepped, that
    were asked and are not gone.
    """

    number: int
    fragment: int
    tick: int
    base: Version
    opened_at: float
    previous_tick_at: float
    grace: Grace
    final: bool
    leaver: str = ""
    quorum_at: float | None = None
    quorum_learner: str = ""
    closed_at: float | None = None
    close_reason: str = ""
    settled_at: float | None = None
    quorum_delivered_at: float | None = None
    paused_seconds: float = 0.0
    version: Version | None = None
    asks: dict[str, Ask] = field(default_factory=dict)
    states: Counter[AskState] = field(default_factory=Counter)
    asked_live: int = 0
    asked_stepping: int = 0
    hasty_waiting: int = 0
    deadlines: list[tuple[float, int, str]] = field(default_factory=list)

    def count(self, *states: AskState) -> int:
        """How many asks are in one of these states."""
        return sum(self.states[state] for state in states)

    @property
    def qualified(self) -> int:
        """Learners that were asked and have not fallen out."""
        return self.states["waiting"] + self.states["folded"]

    def add(self, ask: Ask, *, stepping: bool) -> None:
        """A live learner is asked, perhaps anew; ``stepping``: it has reported a step."""
        before = self.asks.get(ask.learner)
        assert before is None or before.state == "gone", "who is in is not asked again"
        if before is not None:
            self.states["gone"] -= 1
        self.asks[ask.learner] = ask
        self.states["waiting"] += 1
        self.hasty_waiting += not ask.patient
        self.asked_live += 1
        self.asked_stepping += stepping
        heappush(self.deadlines, (ask.deadline, ask.number, ask.learner))

    def move(self, ask: Ask, state: AskState, *, live: bool, stepping: bool) -> None:
        """An ask changes its state; ``live`` and ``stepping`` say where its learner stands."""
        assert ask.state != "gone", "who is gone can only be asked anew"
        self.states[ask.state] -= 1
        self.states[state] += 1
        self.hasty_waiting -= ask.state == "waiting" and not ask.patient
        if state == "gone":
            self.asked_live -= live
            self.asked_stepping -= stepping
        ask.state = state

    def came(self, learner: str, *, stepping: bool) -> None:
        """A learner is live (again)."""
        if self.is_asked(learner):
            self.asked_live += 1
            self.asked_stepping += stepping

    def went(self, learner: str, *, stepping: bool) -> None:
        """A learner is about to be no longer live."""
        if self.is_asked(learner):
            self.asked_live -= 1
            self.asked_stepping -= stepping

    def first_step(self, learner: str) -> None:
        """A live learner has reported its first step."""
        self.asked_stepping += self.is_asked(learner)

    def is_asked(self, learner: str) -> bool:
        """Whether a learner was asked and is not gone."""
        ask = self.asks.get(learner)
        return ask is not None and ask.state != "gone"

    def next_upload_deadline(self) -> float | None:
        """The earliest deadline of an upload that is waited for, the round's own left aside."""
        while self.deadlines:
            deadline, number, learner = self.deadlines[0]
            ask = self.asks[learner]
            if ask.number == number and ask.state == "waiting":
                return deadline
            heappop(self.deadlines)
        return None

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
        self.deadlines = [(d + seconds, number, learner) for d, number, learner in self.deadlines]
        heapify(self.deadlines)

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
            quorum_learner=self.quorum_learner,
        )
