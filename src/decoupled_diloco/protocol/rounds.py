"""One round of one fragment, and the contributions that are asked for: where each stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from decoupled_diloco.protocol.effects import Participant, RoundFinished, RoundOpened
from decoupled_diloco.protocol.grace import Grace
from decoupled_diloco.protocol.versions import Asking, Version

AskState = Literal["waiting", "folded", "declined", "refused", "gone"]


@dataclass(slots=True)
class Ask:
    """A contribution that was asked for: under way, delivered, or fallen out.

    ``round``: the number of the fragment's round at that moment; 0: there was none. ``final``: the
    learner answers when it has stopped stepping. ``base_at``: since when it holds the base.
    ``codec``: that was chosen for it; empty: the run's. ``announced_at``: when it has begun to
    answer. ``alike``: learners whose contributions are nearly parallel to it.
    """

    name: Asking
    fragment: int
    learner: str
    epoch: int
    path: str
    base: Version
    asked_at: float
    round: int
    final: bool
    state: AskState = "waiting"
    base_at: float | None = None
    codec: str = ""
    announced_at: float | None = None
    steps: int = 0
    tokens: int = 0
    age: int = 0
    delivered_at: float | None = None
    reason: str = ""
    alike: tuple[str, ...] = ()


@dataclass(slots=True)
class Round:
    """An open round. Instants are seconds of the shard's clock.

    Attributes:
        deliver_until: The end of its delivery window.
        delivery_over: That a tick has seen it pass.
        holds_slot: It counts among the rounds that may be open at once.
        leaver: For whose sake it was opened before its tick; then everybody is asked, and it waits
            for this one.
        turned: Who has had a turn: was asked, or could not be because of its link.
        turned_live: How many of them are live; ``turned_stepping``: and have reported a step. What
            every event looks at is counted as it changes, so that an event costs the same with four
            learners and with four thousand.
        awaited: Who was asked in it, and has not answered yet.
        fallen: What was asked for in it and will not come: the last of each learner.
        folded: What it merges, once that is settled.
        next_tick: The fragment was due again meanwhile.
    """

    number: int
    term: int
    fragment: int
    tick: int
    base: Version
    opened_at: float
    previous_tick_at: float
    grace: Grace
    deliver_until: float
    final: bool
    leaver: str = ""
    holds_slot: bool = True
    delivery_over: bool = False
    quorum_at: float | None = None
    quorum_learner: str = ""
    closed_at: float | None = None
    close_reason: str = ""
    settled_at: float | None = None
    version: Version | None = None
    turned: set[str] = field(default_factory=set)
    turned_live: int = 0
    turned_stepping: int = 0
    awaited: set[str] = field(default_factory=set)
    fallen: dict[str, Ask] = field(default_factory=dict)
    folded: list[Ask] = field(default_factory=list)
    next_tick: int | None = None

    def turn(self, learner: str, *, stepping: bool) -> None:
        """A live learner has its turn; ``stepping``: it has reported a step."""
        assert learner not in self.turned, "who has had a turn gets no other"
        self.turned.add(learner)
        self.turned_live += 1
        self.turned_stepping += stepping

    def turn_back(self, learner: str, *, live: bool, stepping: bool) -> None:
        """What a learner was asked is void: it may be asked anew."""
        if learner in self.turned:
            self.turned.discard(learner)
            self.turned_live -= live
            self.turned_stepping -= stepping

    def came(self, learner: str, *, stepping: bool) -> None:
        """A learner is live (again)."""
        if learner in self.turned:
            self.turned_live += 1
            self.turned_stepping += stepping

    def went(self, learner: str, *, stepping: bool) -> None:
        """A learner is about to be no longer live."""
        if learner in self.turned:
            self.turned_live -= 1
            self.turned_stepping -= stepping

    def first_step(self, learner: str) -> None:
        """A live learner has reported its first step."""
        self.turned_stepping += learner in self.turned

    @property
    def closes_at(self) -> float:
        """The end of the grace window."""
        return self.opened_at + self.grace.seconds

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
            term=self.term,
            delivery_seconds=self.deliver_until - self.opened_at,
        )

    def finished(
        self,
        now: float,
        verdict: Literal["merged", "abandoned"],
        reason: str,
        under_way: list[Ask],
    ) -> RoundFinished:
        """The round's record for observers; ``under_way``: what was asked for and is not here."""

        def since(instant: float | None) -> float | None:
            return None if instant is None else instant - self.opened_at

        def part(ask: Ask) -> Participant:
            return Participant(
                learner=ask.learner,
                state="late" if ask.state == "waiting" else ask.state,
                steps=ask.steps,
                tokens=ask.tokens,
                asked_seconds=ask.asked_at - self.opened_at,
                delivered_seconds=since(ask.delivered_at),
                reason=ask.reason,
                ask=ask.name,
                age=ask.age,
            )

        return RoundFinished(
            round=self.number,
            fragment=self.fragment,
            tick=self.tick,
            version=self.version,
            verdict=verdict,
            reason=reason,
            participants=tuple(map(part, (*self.folded, *self.fallen.values(), *under_way))),
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
            term=self.term,
        )
