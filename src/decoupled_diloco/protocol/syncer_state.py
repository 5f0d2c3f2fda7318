"""All that a shard's state machine remembers, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from decoupled_diloco.protocol.events import DurableCopy
from decoupled_diloco.protocol.gate import Sample
from decoupled_diloco.protocol.grace import Timing
from decoupled_diloco.protocol.membership import TOKENS_FACTOR, Identity, Member
from decoupled_diloco.protocol.messages import Published
from decoupled_diloco.protocol.revisions import Revision
from decoupled_diloco.protocol.rounds import Ask, Round
from decoupled_diloco.protocol.same_data import Twin
from decoupled_diloco.protocol.versions import Version

Phase = Literal[
    "starting", "empty", "seeding", "restoring", "ready", "running", "sweeping", "swept", "finished"
]


def lower_median(values: Sequence[float]) -> float:
    """What at least half of the values reach, so that half of them must lie to raise it; 0: none.

    >>> lower_median([3, 1, 2**47]), lower_median([1, 2**47])
    (3, 1)
    """
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


@dataclass(slots=True)
class FragmentState:
    """One owned fragment: its published version, and the contributions to its next one.

    Attributes:
        missed: Who was live and stepping, and is not in its newest version.
        awaited: Who was connected and held the base when the version was published, and has not
            said yet that it holds it. They measure the broadcast; a joiner that fetches whole
            copies, or who was away, does not.
        asks: What is under way, by learner: one each.
        folded: What has been folded and is in no version yet.
        delivered: How many of those each learner has.
        present: How many of both each learner has.
        made: From which version each learner has made what was folded of it last.
        failures: How many merges in a row have failed; ``retry_at``: when the next may begin.
        sweep_tries: How many closing rounds have failed.
    """

    version: Version | None = None
    digest: str = ""
    published_at: float | None = None
    missed: set[str] = field(default_factory=set)
    base: Version | None = None
    renamed: bool = False
    sweep_tries: int = 0
    awaited: set[str] = field(default_factory=set)
    norms: list[Sample] = field(default_factory=list)
    asks: dict[str, Ask] = field(default_factory=dict)
    folded: list[Ask] = field(default_factory=list)
    delivered: Counter[str] = field(default_factory=Counter)
    present: Counter[str] = field(default_factory=Counter)
    made: dict[str, Version] = field(default_factory=dict)
    failures: int = 0
    retry_at: float | None = None

    def ask(self, ask: Ask) -> None:
        """A contribution is asked for."""
        assert ask.learner not in self.asks, "one is under way already"
        self.asks[ask.learner] = ask
        self.present[ask.learner] += 1

    def fold(self, ask: Ask) -> None:
        """A contribution has arrived, and is folded."""
        del self.asks[ask.learner]
        self.folded.append(ask)
        self.delivered[ask.learner] += 1
        self.made[ask.learner] = ask.base

    def lose(self, ask: Ask) -> None:
        """A contribution will not come."""
        del self.asks[ask.learner]
        self._one_less(ask.learner)

    def take_folded(self) -> list[Ask]:
        """What has been folded goes into a version."""
        taken, self.folded = self.folded, []
        self.delivered.clear()
        for ask in taken:
            self._one_less(ask.learner)
        return taken

    def _one_less(self, learner: str) -> None:
        self.present[learner] -= 1
        if not self.present[learner]:
            del self.present[learner]

    def has_since_version(self, learner: str) -> bool:
        """Whether something that a learner made from the newest version is folded already."""
        return self.made.get(learner) == self.version  # break: asked-twice-after-rejoin

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
    ``clocks``: where each learner says that the clock was.
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
    clocks: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class SyncerState:
    """The state of one shard.

    ``checkpoint``: the newest checkpoint of the run that it has heard of. ``step_tokens``: the
    (lower) median learner's tokens a step, found anew at every tick; 0 while unknown.

    ``looked_at``: when it was looked last whether a loop stands still.

    ``queue``: the tick at which a fragment that waits was due. ``again``: due at the next tick.
    ``asks``: how many contributions this life has asked for. ``step_seconds``: ξ_step, that of the
    fastest live learner, found anew at every tick; 0 while unknown. ``members_stepping``: live
    learners that have reported a step. ``revision``: of H and τ, that holds; ``next_revisions``:
    that will; ``slots_most``: the most rounds that could be open at once until now;
    ``late_rounds``: that have merged nothing that was in time, in a row. ``durable``: what this
    life has found on its disk; ``durable_is_exact``: nothing newer may take its place.
    ``twins``: learners that seem to train on another one's data.
    """

    phase: Phase = "starting"
    term: int = 0
    clock: int = 0
    ticked_at: float = 0.0
    previous_tick_at: float = 0.0
    looked_at: float = 0.0
    ahead: int = 0
    step_seconds: float = 0.0
    step_tokens: float = 0.0
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
    stop_by: float = 0.0
    stopped: bool = False
    end_ordered: bool = False
    finish_ordered: bool = False
    deadline_told: float | None = None
    checkpoint: int = 0
    revision: Revision | None = None
    next_revisions: tuple[Revision, ...] = ()
    slots_most: int = 1
    late_rounds: int = 0
    twins: dict[str, Twin] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that were trained, as far as this shard knows."""
        return self.tokens_retired + sum(map(self.tokens_of, self.identities.values()))

    def tokens_of(self, known: Identity) -> int:
        """What is believed of the tokens that a learner has reported (rule 13)."""
        return self.tokens_believed(known.tokens, known.steps)

    def tokens_believed(self, tokens: int, steps: int) -> int:
        """So many tokens in so many steps, or what a learner can have trained in them."""
        if self.step_tokens == 0.0 or steps == 0:
            return tokens
        return min(tokens, ceil(TOKENS_FACTOR * self.step_tokens * steps))

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

    def find_step_tokens(self) -> None:
        """Finds anew how many tokens a step has as a rule."""
        there = [self.identities[learner] for learner in self.members]
        self.step_tokens = lower_median([one.tokens / one.steps for one in there if one.steps])

    def check_counts(self) -> None:
        """Asserts that what is counted as it changes is what counting afresh finds."""
        stepping = {member.learner for member in self.stepping}
        assert self.members_stepping == len(stepping)
        for round in self.rounds.values():
            assert round.turned_live == len(round.turned & self.members.keys())
            assert round.turned_stepping == len(round.turned & stepping)
        for fragment in self.fragments.values():
            delivered = Counter(ask.learner for ask in fragment.folded)
            assert +fragment.delivered == delivered
            assert fragment.present == delivered + Counter(fragment.asks.keys())
        fastest = min((m.step_seconds for m in self.members.values() if m.step_seconds), default=0)
        assert self.step_seconds <= fastest
