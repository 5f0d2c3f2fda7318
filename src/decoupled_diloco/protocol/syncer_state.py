"""The whole state of a shard's machine, as plain data.

*Members* (rules 10 and 13). Any byte from a learner renews its lease. A lease expires only in a
tick, and a late tick extends every lease by its lateness, so that a paused shard does not evict all
learners.

*Memory*. Besides its copies, a shard keeps on its disk what its next process would otherwise lose.
This is the clock, so that learning rate schedules and budgets continue; the counted tokens of each
learner, so that none are counted twice; and the norms for the norm gate. It is written with every
merge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import median
from typing import Literal

from decoupled_diloco.protocol.adapt import Needs, Uplink
from decoupled_diloco.protocol.clock import Grace, MovingAverage, Timing
from decoupled_diloco.protocol.messages import (
    Asking,
    DurableCopy,
    Holding,
    KnownLearner,
    KnownMerges,
    KnownNorms,
    KnownScore,
    Participant,
    Published,
    Revision,
    RoundFinished,
    RoundOpened,
    ShardMemory,
    Version,
)

LEASE_SECONDS = 10.0
"""Ten of the transport's one-second pings: nine in a row may be lost."""


RECONNECT_SECONDS = 3.0
"""How long a disconnected learner stays live: a second, and two retries with backoff."""


STANDS_SECONDS = 1.0


STANDS_STEPS = 10.0


STANDS_OWN_STEPS = 3.0
"""A loop is stalled after all three times without a step.

They are in seconds, in steps of the fastest learner, and in its own steps.
"""


VERSION_MAX = 2**48
"""Versions from here on are not valid: the next ones must still fit into a message (2^53)."""


STEPS_AHEAD_MAX = 10**6
"""No honest learner makes more steps between two reports, or while it is away."""


TOKENS_AHEAD_MAX = 10**12
"""No honest learner trains more tokens meanwhile."""


CLOCK_MAX = 2**48
"""Largest clock that a restoring shard accepts from learners; it must stay below 2^53."""


STEPS_BURST = 100.0
"""Steps by which a learner may be ahead of its pace."""


STEPS_PER_SECOND = (10.0, 2000.0)
"""Steps per second that are always believed, and the most that ever are."""


PACE_FACTOR = 4.0
"""Factor by which a learner may have become faster between two reports."""


PACE_SMOOTHING = 0.3
"""Weight of the newest report: a learner that becomes faster is believed soon."""


DRAIN_SECONDS = 1.0
"""Reports that queued for a paused shard arrive within this time."""


TOKENS_FACTOR = 32
"""A learner's tokens per step are believed up to this multiple of the (lower) median learner's."""


@dataclass(slots=True)
class Pace:
    """A learner's steps as the shard has observed them, by the arrival of its reports (rule 13).

    ``credit`` is the number of steps that were believable at ``at`` and not yet reported.
    ``seconds`` is the time per step. It is known from the second report on, because the first step
    may have waited or compiled.
    """

    at: float
    reported: bool = False
    credit: float = STEPS_BURST
    seconds: MovingAverage = field(default_factory=MovingAverage)

    def allows(self, now: float) -> int:
        """Return how many more steps can be true at this instant."""
        least, most = STEPS_PER_SECOND
        seen, passed = self.seconds.value, now - self.at
        rate = least if not seen else min(most, max(least, PACE_FACTOR / seen))
        # Reports that queued during a pause arrive together: the whole credit counts for them.
        kept = self.credit if passed <= DRAIN_SECONDS else min(self.credit, STEPS_BURST)
        return int(kept + passed * rate)

    def observe(self, now: float, steps: int) -> None:
        """Record believed steps."""
        self.credit = float(self.allows(now) - steps)
        if self.reported and now > self.at:
            self.seconds.update((now - self.at) / steps, PACE_SMOOTHING)
        self.at, self.reported = now, True

    def believes(self, seconds: float, fastest: float) -> float:
        """Return the believed step time: as claimed, but not below what the reports allow.

        After only one report, a learner is not believed to be faster than the fastest other one.
        """
        seen = self.seconds.value
        return max(seconds, fastest if seen is None else seen / 2)  # half: arrivals jitter


@dataclass(slots=True)
class Member:
    """A live learner, as one shard sees it.

    Attributes:
        held_at: When it last reported a held version.
        held_step: Its step when it reported the held version of each fragment.
        stalled: Its loop is stalled, and the clock advances without it.
        leaving_with: It is about to leave, with unmerged training of these fragments.
        under_way: Fragments with a request that it has not answered yet.
        backlog: Fragments to request once its link is free, because others were in progress or
            their round lacks its quorum.
        pressed: It had a backlog at its last delivery, so it sends one payload at a time.
        uploads: How often each fragment has arrived, also if it was discarded or refused.
        drained: Fragments that received its training after it announced its departure.
        uplink: Measurements of its uplink.
        needs: The needs of its link, if H and τ follow the links.
        departures: How often it has announced its departure.
        relay: The relay through which it is connected; empty: there is none.
        again: The contributions that it has made from the held version of each fragment, as it
            reports them.
        is_new: It came while the clock was being restored, so its steps start at the restored
            clock.
        is_fresh: It joined a run in progress with a fresh inner optimizer.
    """

    learner: str
    epoch: int
    offset: int
    step: int
    lease_until: float
    connected: bool = True
    reported_at: float | None = None
    step_seconds: float = 0.0
    held: dict[int, Version] = field(default_factory=dict)
    held_at: float = 0.0
    held_step: dict[int, int] = field(default_factory=dict)
    stalled: bool = False
    leaving_with: frozenset[int] | None = None
    under_way: set[int] = field(default_factory=set)
    backlog: set[int] = field(default_factory=set)
    pressed: bool = False
    uploads: Counter[int] = field(default_factory=Counter)
    drained: set[int] = field(default_factory=set)
    uplink: Uplink = field(default_factory=Uplink)
    needs: Needs = field(default_factory=Needs)
    departures: int = 0
    again: dict[int, int] = field(default_factory=dict)
    is_new: bool = False
    is_fresh: bool = False
    relay: str = ""

    @property
    def run_step(self) -> int:
        """s_m: the clock that the shard assigned at join, plus its own steps since."""
        return self.offset + self.step


def credible(holdings: Iterable[Holding], owned: Container[int]) -> dict[int, Version]:
    """Return the versions in these holdings that can be this shard's.

    >>> credible([Holding(0, Version(1, 7)), Holding(9, Version(1, 7))], [0, 1])
    {0: Version(term=1, counter=7)}
    """
    return {
        holding.fragment: holding.version
        for holding in holdings
        if holding.fragment in owned
        and max(holding.version.term, holding.version.counter) < VERSION_MAX
    }


@dataclass(slots=True)
class Identity:
    """The newest incarnation of a learner name that a shard has met, live or not.

    ``steps`` and ``tokens`` are as reported; ``earlier_tokens`` are those of earlier incarnations.
    ``run_step`` is the last believed one of this incarnation. ``sizes`` are those of its last
    contributions, in usual norms of their fragments; see `norm_gate`.
    """

    epoch: int
    nonce: str
    tokens: int = 0
    steps: int = 0
    earlier_tokens: int = 0
    run_step: int | None = None
    pace: Pace | None = None
    sizes: list[float] = field(default_factory=list)


def report_problem(step_known: int, step: int, tokens_known: int, tokens: int) -> str | None:
    """Return why a report cannot be true, or ``None`` if it can.

    >>> report_problem(3, 4, 30, 40), report_problem(3, 2**50, 30, 40)
    (None, 'step 1125899906842624 after step 3')
    """
    if step > step_known + STEPS_AHEAD_MAX:
        return f"step {step} after step {step_known}"
    if tokens > tokens_known + TOKENS_AHEAD_MAX:
        return f"{tokens} tokens after {tokens_known}"
    return None


def identity_problem(known: Identity | None, epoch: int, nonce: str) -> str | None:
    """Return why a hello with this incarnation and nonce is refused, or ``None`` if it is not.

    >>> identity_problem(Identity(3, "a"), 2, "b")
    'incarnation 2 is older than incarnation 3: another process has joined under this name'
    """
    if known is None or epoch > known.epoch:
        return None
    if epoch < known.epoch:
        return (
            f"incarnation {epoch} is older than incarnation {known.epoch}: "
            "another process has joined under this name"
        )
    if nonce != known.nonce:
        return f"two processes claim incarnation {epoch}: give each learner a different name"
    return None


# A round, and the requests for contributions


AskState = Literal["waiting", "relayed", "folded", "declined", "refused", "discarded", "gone"]


@dataclass(slots=True)
class Ask:
    """A request for a contribution: waiting, delivered (here or to a relay), or failed.

    ``round`` is the number of the fragment's round at the request, or 0 if there was none.
    ``final``: the learner answers after it has stopped stepping. ``base_at`` is when it got the
    base. ``codec`` is the chosen one, or empty for the run's. ``announced_at`` is when it started
    to answer. ``alike`` lists learners whose contributions are nearly parallel to it. ``relay`` is
    the relay that has, or will have, the contribution. ``sums`` lists the sums that hold it, each
    as its relay and number. ``nbytes`` is its share of what arrived at that relay. ``weight`` is
    that of the folded contribution in its merge, and ``party`` that of the learner if the shares of
    parties are limited. ``weightless``: its learner had weight 0 at the request, so it counts for
    no quorum.
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
    relay: str = ""
    relayed_at: float | None = None
    sums: tuple[tuple[str, int], ...] = ()
    nbytes: int = 0
    weight: float = 0.0
    party: str = ""
    weightless: bool = False


@dataclass(slots=True)
class SiteTraffic:
    """What the relay of a site has sent, for observers.

    Attributes:
        sums: Sums that were accepted.
        refused: Sums that were refused, or did not arrive whole.
        contributions: The contributions in the accepted sums.
        sent_bytes: Size of the sums that arrived.
        relayed_bytes: Size of these contributions, as they arrived at the relay.
    """

    sums: int = 0
    refused: int = 0
    contributions: int = 0
    sent_bytes: int = 0
    relayed_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """By how much the sums were smaller; negative if refused ones outweigh that."""
        return self.relayed_bytes - self.sent_bytes

    def accept(self, nbytes: int, contributions: Sequence[int]) -> None:
        """Count an accepted sum; ``contributions`` are the sizes of those in it."""
        self.sums += 1
        self.contributions += len(contributions)
        self.sent_bytes += nbytes
        self.relayed_bytes += sum(contributions)

    def refuse(self, nbytes: int = 0) -> None:
        """Count a sum that was refused after this number of bytes."""
        self.refused += 1
        self.sent_bytes += nbytes


SecureStage = Literal["claims", "shares", "masks", "opening"]


@dataclass(slots=True)
class SecureSum:
    """How far the secure sum of a round is; see `secure_rounds`.

    Attributes:
        until: The end of the patience with learners that have not answered in this stage.
        is_patient: Whether no tick has found that end yet.
        answered: The learners that have answered in this stage.
        members: The number of learners in the cohort.
    """

    until: float
    stage: SecureStage = "claims"
    is_patient: bool = True
    answered: set[str] = field(default_factory=set)
    members: int = 0


@dataclass(slots=True)
class Round:
    """An open round. Instants are seconds of the shard's clock.

    Attributes:
        deliver_until: The end of its delivery window.
        delivery_over: Whether a tick has found that window over.
        holds_slot: Whether it counts among the rounds that may be open at once.
        leaver: The leaving learner for which it was opened before its tick. All learners then
            receive a request, and it waits for this one.
        turned: Learners that had their turn: they received a request, or could not because of their
            link.
        turned_live: How many of them are live. Values that every event reads are maintained
            incrementally, so that an event costs the same with four learners and with four
            thousand.
        turned_stepping: How many of them have also reported a step.
        awaited: Learners with a request from this round and no answer yet.
        fallen: Requests of this round that failed: the last of each learner.
        folded: The contributions that it merges, once that is decided.
        next_tick: The tick at which the fragment became due again meanwhile.
        collecting: The relays that were notified that it collects, and not yet that it has ended.
        gathering: The relays that keep what they have until a quorum has delivered.
        secure: Its secure sum, in a run with secure sums.
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
    collecting: tuple[str, ...] = ()
    gathering: tuple[str, ...] = ()
    secure: SecureSum | None = None

    @property
    def takes_requests(self) -> bool:
        """Whether a learner may still be asked to contribute to it."""
        return self.secure is None or self.secure.stage == "claims"

    def turn(self, learner: str, *, stepping: bool) -> None:
        """Give a live learner its turn; ``stepping``: it has reported a step."""
        assert learner not in self.turned, f"{learner} has already had its turn"
        self.turned.add(learner)
        self.turned_live += 1
        self.turned_stepping += stepping

    def turn_back(self, learner: str, *, live: bool, stepping: bool) -> None:
        """Void a learner's turn, so that it may receive another request."""
        if learner in self.turned:
            self.turned.discard(learner)
            self.turned_live -= live
            self.turned_stepping -= stepping

    def came(self, learner: str, *, stepping: bool) -> None:
        """Count a learner that has become live (again)."""
        if learner in self.turned:
            self.turned_live += 1
            self.turned_stepping += stepping

    def went(self, learner: str, *, stepping: bool) -> None:
        """Count a learner that is about to be removed."""
        if learner in self.turned:
            self.turned_live -= 1
            self.turned_stepping -= stepping

    def first_step(self, learner: str) -> None:
        """Count a live learner that has reported its first step."""
        self.turned_stepping += learner in self.turned

    @property
    def closes_at(self) -> float:
        """The end of the grace window."""
        return self.opened_at + self.grace.seconds

    def opened(self, why: str) -> RoundOpened:
        """Return the opening's record for observers."""
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
        """Return the round's record for observers; ``under_way`` as in `FragmentState`."""

        def since(instant: float | None) -> float | None:
            return None if instant is None else instant - self.opened_at

        def part(ask: Ask) -> Participant:
            return Participant(
                learner=ask.learner,
                state="late" if ask.state in ("waiting", "relayed") else ask.state,
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


Sample = tuple[float, int]
"""Norm and steps of a contribution."""


@dataclass(slots=True)
class Twin:
    """A learner whose contributions are nearly parallel to another one's.

    Attributes:
        other: The other learner.
        rounds: Number of such rounds in a row.
        since: The tick of the first of them.
        is_reported: Whether the warning was logged.
    """

    other: str
    rounds: int
    since: int
    is_reported: bool = False


@dataclass(slots=True)
class Score:
    """What a learner's own contributions have done to the held-out loss; see `weighing`.

    Attributes:
        samples: Its last gains, in gains of the median learner, the oldest first.
        excluded: Whether its contributions have weight 0.
    """

    samples: list[float] = field(default_factory=list)
    excluded: bool = False

    @property
    def score(self) -> float:
        """The median of the samples, so that a single one does not decide."""
        return median(self.samples)


# A shard


Phase = Literal[
    "starting", "empty", "seeding", "restoring", "ready", "running", "sweeping", "swept", "finished"
]


def lower_median(values: Sequence[float]) -> float:
    """Return the lower median, or 0 without values: raising it takes half of the values.

    >>> lower_median([3, 1, 2**47]), lower_median([1, 2**47])
    (3, 1)
    """
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0


@dataclass(slots=True)
class FragmentState:
    """One owned fragment: its published version, and the contributions to the next one.

    Attributes:
        missed: Learners that were live and stepping and are not in its newest version.
        awaited: Learners that were connected and held the base at publication, and have not
            reported the version yet. They measure the broadcast. Learners that were away or join
            fetch whole copies, so they do not.
        asks: Open requests, by learner: one each.
        relayed: Contributions that a relay has folded and not sent yet.
        folded: Contributions that are folded here and in no version yet.
        delivered: Number of the latter, by learner.
        present: Number of all three, by learner.
        weightless: Learners with an open request whose contribution will have weight 0.
        made: The base of each learner's last folded contribution.
        made_times: How many contributions of each learner from that base are folded.
        merges: With differential privacy, the merges in which each learner took part (rule 25).
        merges_unknown: Earlier merges whose learners are not known. They count for every learner.
        chain: The newest announcements, each of a difference to the one before it; only in a run of
            devices.
        failures: Failed merges in a row.
        retry_at: When the next merge may begin after a failure.
        sweep_tries: Failed closing rounds.
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
    relayed: list[Ask] = field(default_factory=list)
    folded: list[Ask] = field(default_factory=list)
    delivered: Counter[str] = field(default_factory=Counter)
    present: Counter[str] = field(default_factory=Counter)
    weightless: set[str] = field(default_factory=set)
    made: dict[str, Version] = field(default_factory=dict)
    made_times: dict[str, int] = field(default_factory=dict)
    merges: dict[str, int] = field(default_factory=dict)
    merges_unknown: int = 0
    chain: tuple[Published, ...] = ()
    failures: int = 0
    retry_at: float | None = None

    def ask(self, ask: Ask) -> None:
        """Open a request."""
        assert ask.learner not in self.asks, f"{ask.learner} already has a request"
        self.asks[ask.learner] = ask
        self.present[ask.learner] += 1
        if ask.weightless:
            self.weightless.add(ask.learner)

    def fold(self, ask: Ask) -> None:
        """Move a delivered contribution from the requests to the folded or relayed ones."""
        del self.asks[ask.learner]
        before = self.made_times.get(ask.learner, 0)
        self.made_times[ask.learner] = 1 + before * (self.made.get(ask.learner) == ask.base)
        self.made[ask.learner] = ask.base
        if ask.relay:
            self.relayed.append(ask)
            return
        self.folded.append(ask)
        self.delivered[ask.learner] += 1

    def arrive(self, ask: Ask) -> None:
        """Move a relayed contribution to the folded ones: its sum is here."""
        self.relayed.remove(ask)
        self.folded.append(ask)
        self.delivered[ask.learner] += 1

    def void(self, ask: Ask) -> None:
        """Forget a relayed contribution that will not arrive; its base may be requested again."""
        self.relayed.remove(ask)
        self._one_less(ask.learner)
        if self.made.get(ask.learner) == ask.base:
            self.forget(ask.learner)

    def forget(self, learner: str) -> None:
        """Forget from which version a learner has contributed."""
        del self.made[learner]
        del self.made_times[learner]

    def lose(self, ask: Ask) -> None:
        """Close a request that failed."""
        del self.asks[ask.learner]
        self.weightless.discard(ask.learner)
        self._one_less(ask.learner)

    @property
    def counted(self) -> int:
        """The number of learners whose contribution is here or on its way, and has a weight."""
        return len(self.present) - len(self.weightless)  # break: probation-counts-for-quorum

    @property
    def under_way(self) -> list[Ask]:
        """The requests that are open, and the contributions that a relay has."""
        return [*self.asks.values(), *self.relayed]

    def take_folded(self) -> list[Ask]:
        """Return and remove the folded contributions, which go into a version."""
        taken, self.folded = self.folded, []
        self.delivered.clear()
        for ask in taken:
            self._one_less(ask.learner)
        return taken

    def _one_less(self, learner: str) -> None:
        self.present[learner] -= 1
        if not self.present[learner]:
            del self.present[learner]

    def owes(self, learner: str) -> bool:
        """Return whether a contribution of a learner is requested, or is at a relay."""
        return self.present[learner] > self.delivered[learner]

    def is_relayed(self, learner: str) -> bool:
        """Return whether a contribution of a learner is at a relay."""
        return self.present[learner] > self.delivered[learner] + (learner in self.asks)

    def has_since_version(self, learner: str) -> bool:
        """Return whether a contribution that a learner made from the newest version is folded."""
        return self.made.get(learner) == self.version  # break: asked-twice-after-rejoin

    def merges_of(self, learner: str) -> int:
        """Return the merges of this fragment that count for a learner."""
        return self.merges.get(learner, 0) + self.merges_unknown

    def extend_chain(self, fragment: int, clock: int, length: int) -> None:
        """Add the newest version to the chain of differences, which may start again with it."""
        newest = replace(self.announcement(fragment, clock), whole="")
        joins = bool(self.chain) and self.chain[-1].version == newest.base
        chain = (*self.chain, newest) if joins else (newest,)
        self.chain = chain[-length:] if newest.difference else ()

    def announcement(self, fragment: int, clock: int) -> Published:
        """Return the message that announces the newest published copy."""
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
    """The open request for a whole fragment. Answers to requests with other numbers are void."""

    learner: str
    number: int
    path: str


@dataclass(slots=True)
class Fill:
    """How the owned fragments get their first copies: from a seed, or from the learners.

    ``tries`` counts the seed's failed deliveries per fragment; ``failure`` is why the seed is
    abandoned. ``clocks`` holds the clock that each learner reported.
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

    ``queue`` holds the tick at which each waiting fragment was due; ``again`` lists those due at
    the next tick. ``asks`` counts this process's requests. ``step_seconds`` is ξ_step, that of the
    fastest live learner, and ``step_tokens`` the (lower) median learner's tokens per step. Both are
    recomputed at every tick and are 0 while unknown. ``members_stepping`` counts live learners that
    have reported a step. ``stall_checked_at`` is when stalled loops were last checked.
    ``tick_due_at`` is the instant after which the next tick counts as late.

    ``checkpoint`` is the newest checkpoint of the run that the shard received. ``durable`` holds
    the copies found on its disk; ``durable_is_exact``: no newer copy may replace them. ``revision``
    is the schedule revision that applies, ``next_revisions`` those that follow; ``slots_most`` is
    the largest number of slots so far. ``late_rounds`` counts consecutive rounds that merged only
    late contributions. ``rule_failed``: the participation rule has failed. ``twins`` lists learners
    that seem to train on another learner's data.
    ``relays`` are the connected relays, each with the one that it is behind, or an empty text.
    ``sites`` has every relay that has connected. ``scores`` has the learners that were scored.
    """

    phase: Phase = "starting"
    term: int = 0
    clock: int = 0
    ticked_at: float = 0.0
    previous_tick_at: float = 0.0
    stall_checked_at: float = 0.0
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
    tick_due_at: float | None = None
    checkpoint: int = 0
    revision: Revision | None = None
    next_revisions: tuple[Revision, ...] = ()
    slots_most: int = 1
    late_rounds: int = 0
    rule_failed: bool = False
    twins: dict[str, Twin] = field(default_factory=dict)
    relays: dict[str, str] = field(default_factory=dict)
    sites: dict[str, SiteTraffic] = field(default_factory=dict)
    scores: dict[str, Score] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Trained tokens, as far as this shard has received and believed reports."""
        return self.tokens_retired + sum(map(self.tokens_of, self.identities.values()))

    def tokens_of(self, known: Identity) -> int:
        """Return the believed part of a learner's reported tokens (rule 13)."""
        return self.tokens_believed(known.tokens, known.steps)

    def tokens_believed(self, tokens: int, steps: int) -> int:
        """Return ``tokens``, or less if a learner cannot have trained them in these steps."""
        if self.step_tokens == 0.0 or steps == 0:
            return tokens
        return min(tokens, ceil(TOKENS_FACTOR * self.step_tokens * steps))

    @property
    def stepping(self) -> list[Member]:
        """Live learners that have reported a step."""
        return [member for member in self.members.values() if member.reported_at is not None]

    def site(self, relay: str) -> SiteTraffic:
        """Return the traffic of a relay, which is counted from now on if it is a new one."""
        return self.sites.setdefault(relay, SiteTraffic())

    def is_stepping(self, learner: str) -> bool:
        """Return whether a learner is live and has reported a step."""
        member = self.members.get(learner)
        return member is not None and member.reported_at is not None

    def add_step_seconds(self, seconds: float) -> None:
        """Add a learner's step time; 0: it does not have one yet."""
        if seconds > 0.0 and (self.step_seconds == 0.0 or seconds < self.step_seconds):
            self.step_seconds = seconds

    def find_step_seconds(self) -> None:
        """Recompute ξ_step: the fastest learner may have left, or become slower."""
        known = [m.step_seconds for m in self.members.values() if m.step_seconds > 0.0]
        self.step_seconds = min(known, default=0.0)

    def find_step_tokens(self) -> None:
        """Recompute the usual number of tokens per step."""
        there = [self.identities[learner] for learner in self.members]
        self.step_tokens = lower_median([one.tokens / one.steps for one in there if one.steps])

    def check_counts(self) -> None:
        """Assert that the incremental counts equal fresh ones."""
        stepping = {member.learner for member in self.stepping}
        assert self.members_stepping == len(stepping)
        for round in self.rounds.values():
            assert round.turned_live == len(round.turned & self.members.keys())
            assert round.turned_stepping == len(round.turned & stepping)
        for fragment in self.fragments.values():
            delivered = Counter(ask.learner for ask in fragment.folded)
            assert +fragment.delivered == delivered
            relayed = Counter(ask.learner for ask in fragment.relayed)
            assert fragment.present == delivered + relayed + Counter(fragment.asks.keys())
            weightless = {ask.learner for ask in fragment.asks.values() if ask.weightless}
            assert fragment.weightless == weightless
        fastest = min((m.step_seconds for m in self.members.values() if m.step_seconds), default=0)
        assert self.step_seconds <= fastest


# What the shard's next process restores


def remembered(state: SyncerState) -> ShardMemory:
    """Return what goes to the disk."""
    return ShardMemory(
        state.clock,
        state.tokens_retired,
        tuple(
            KnownLearner(name, known.epoch, known.nonce, state.tokens_of(known))
            for name, known in state.identities.items()
        ),
        tuple(
            KnownNorms(fragment, tuple(entry.norms))
            for fragment, entry in state.fragments.items()
            if entry.norms
        ),
        merges_remembered(state),
        tuple(
            KnownScore(name, tuple(each.samples), each.excluded)
            for name, each in state.scores.items()
        ),
    )


def merges_remembered(state: SyncerState) -> tuple[KnownMerges, ...]:
    """Return the account of merges; it is on the disk before a merge in it is published."""
    return tuple(
        KnownMerges(fragment, tuple(entry.merges.items()), entry.merges_unknown)
        for fragment, entry in state.fragments.items()
        if entry.merges or entry.merges_unknown
    )


def recall(state: SyncerState, memory: ShardMemory) -> None:
    """Restore an earlier process's memory. Whatever this process already received is newer."""
    state.clock = max(state.clock, memory.clock)
    state.tokens_retired += memory.tokens_retired
    for known in memory.learners:
        newer = state.identities.get(known.learner)
        if newer is None:
            state.identities[known.learner] = Identity(known.epoch, known.nonce, known.tokens)
        elif newer.epoch > known.epoch:
            state.tokens_retired += known.tokens
    for norms in memory.norms:
        if norms.fragment in state.fragments:
            state.fragments[norms.fragment].norms = list(norms.samples)
    for known_merges in memory.merges:
        entry = state.fragments.get(known_merges.fragment)
        if entry is not None:
            # break: account-forgotten
            entry.merges, entry.merges_unknown = dict(known_merges.merges), known_merges.unknown
    for known_score in memory.scores:
        standing = Score(list(known_score.samples), known_score.excluded)
        state.scores.setdefault(known_score.learner, standing)  # break: scores-forgotten
