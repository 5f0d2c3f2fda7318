"""All that a shard's state machine remembers, as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from decoupled_diloco.protocol.events import DurableCopy
from decoupled_diloco.protocol.gate import Sample
from decoupled_diloco.protocol.grace import Timing
from decoupled_diloco.protocol.membership import Identity, Member
from decoupled_diloco.protocol.messages import Published, Version
from decoupled_diloco.protocol.rounds import Round

Phase = Literal[
    "starting", "empty", "seeding", "restoring", "ready", "running", "sweeping", "swept", "finished"
]


@dataclass(slots=True)
class FragmentState:
    """One owned fragment: its published version, and how learners fared in its last rounds.

    ``awaited``: who was connected and held the base when the version was published, and has not
    said yet that it holds it. They measure the broadcast; a joiner that fetches whole copies, or
    who was away, does not.
    """

    version: Version | None = None
    digest: str = ""
    published_at: float | None = None
    missed: dict[str, int] = field(default_factory=dict)
    base: Version | None = None
    renamed: bool = False
    sweep_tries: int = 0
    awaited: set[str] = field(default_factory=set)
    norms: list[Sample] = field(default_factory=list)

    def announcement(self, fragment: int, clock: int) -> Published:
        """The message that tells of the newest published copy."""
        assert self.version is not None
        base = self.base
        difference = (
            "" if base is None or self.renamed else f"/difference/{fragment}/{self.version}"
        )
        return Published(
            fragment=fragment,
            version=self.version,
            base=base,
            digest=self.digest,
            difference=difference,
            whole=f"/whole/{fragment}/{self.version}",
            clock=clock,
        )


@dataclass(frozen=True, slots=True)
class CopyAsk:
    """Who was asked for a whole fragment, in which asking: answers to earlier ones are void."""

    learner: str
    number: int
    path: str


@dataclass(slots=True)
class Fill:
    """How the owned fragments get their first copies: a seed, or what the learners still hold.

    ``tries``: how often the seed's copy of a fragment was no good; ``failure``: why it is given up.
    """

    attempt: int
    source: str = ""
    epoch: int = 0
    settle_at: float | None = None
    from_file: bool = False
    started_at: float = 0.0
    asked: dict[int, CopyAsk] = field(default_factory=dict)
    asked_version: dict[int, Version | None] = field(default_factory=dict)
    refused: dict[int, set[str]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    failure: str = ""


@dataclass(slots=True)
class SyncerState:
    """The state of one shard.

    ``cut``: the newest consistent cut of the run that it has heard of.

    ``queue``: the tick at which a fragment that waits was due. ``step_seconds``: ξ_step, that of
    the fastest live learner, found anew at every tick; 0 while unknown. ``members_stepping``: live
    learners that have reported a step. ``durable``: what this life has found on its disk;
    ``durable_is_exact``: nothing newer may take its place.
    """

    phase: Phase = "starting"
    term: int = 0
    clock: int = 0
    ticked_at: float = 0.0
    previous_tick_at: float = 0.0
    ahead: int = 0
    step_seconds: float = 0.0
    members: dict[str, Member] = field(default_factory=dict)
    members_stepping: int = 0
    observers: set[str] = field(default_factory=set)
    identities: dict[str, Identity] = field(default_factory=dict)
    tokens_retired: int = 0
    fragments: dict[int, FragmentState] = field(default_factory=dict)
    queue: dict[int, int] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    rounds: dict[int, Round] = field(default_factory=dict)
    rounds_opened: int = 0
    asks: int = 0
    timing: Timing = field(default_factory=Timing)
    durable: dict[int, DurableCopy] = field(default_factory=dict)
    durable_is_exact: bool = False
    fill: Fill | None = None
    closing: set[int] = field(default_factory=set)
    lease_check_at: float | None = None
    stop_at: float | None = None
    stopped: bool = False
    end_ordered: bool = False
    finish_ordered: bool = False
    deadline_told: float | None = None
    cut: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that were trained, as far as this shard knows."""
        return self.tokens_retired + sum(known.tokens for known in self.identities.values())

    @property
    def stepping(self) -> list[Member]:
        """Live learners that have reported a step."""
        return [member for member in self.members.values() if member.reported_at is not None]

    def is_stepping(self, learner: str) -> bool:
        """Whether a learner is live and has reported a step."""
        member = self.members.get(learner)
        return member is not None and member.reported_at is not None

    def hear_step_seconds(self, seconds: float) -> None:
        """A learner has reported how long its steps take; 0: it does not know yet."""
        if seconds > 0.0 and (self.step_seconds == 0.0 or seconds < self.step_seconds):
            self.step_seconds = seconds

    def find_step_seconds(self) -> None:
        """Finds ξ_step anew: the fastest learner may have gone, or become slower."""
        known = [m.step_seconds for m in self.members.values() if m.step_seconds > 0.0]
        self.step_seconds = min(known, default=0.0)

    def check_counts(self, round: Round) -> None:
        """Asserts that what is counted as it changes is what counting afresh finds."""
        asks = round.asks.values()
        asked = [ask for ask in asks if ask.state != "gone"]
        waiting = [ask for ask in asks if ask.state == "waiting"]
        stepping = [member.learner for member in self.stepping]
        assert +round.states == Counter(ask.state for ask in asks)
        assert round.asked_live == sum(ask.learner in self.members for ask in asked)
        assert round.asked_stepping == sum(ask.learner in stepping for ask in asked)
        assert self.members_stepping == len(stepping)
        assert round.hasty_waiting == sum(not ask.patient for ask in waiting)
        deadline = min((ask.deadline for ask in waiting), default=None)
        assert round.next_upload_deadline() == deadline
        fastest = min((m.step_seconds for m in self.members.values() if m.step_seconds), default=0)
        assert self.step_seconds <= fastest
