"""The configuration that the state machines need: plain numbers and choices, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Literal, NamedTuple, Protocol

from decoupled_diloco.protocol.adapt import AdaptLimits, Ladder, Schedule
from decoupled_diloco.protocol.messages import Alignment, Revision
from decoupled_diloco.protocol.quotas import Quota, Weighting

Participants = Literal["reported", "all", "own"]
Missed = Literal["overwrite", "rebase"]
ApplyAt = Literal["on_arrival", "at_tau"]
Wait = Literal["never", "at_overlap"]
Oversized = Literal["refuse", "clip"]
Late = Literal["next", "drop"]
Discount = float | Literal["polynomial"]
DiscountOf = Literal["weight", "change"]
Draw = Literal["fair", "uniform"]
Trust = Literal["off", "show", "weigh", "exclude"]


class Candidate(NamedTuple):
    """A live learner, as a participation rule sees it.

    Attributes:
        name: Its name.
        step: Its step, on the clock of the run.
        has_stepped: It has reached the round's tick, or finished a step since the tick before.
        missed: It did not take part in the fragment's last merged round.
        step_seconds: The time of one step; 0 while unknown.
    """

    name: str
    step: int
    has_stepped: bool
    missed: bool
    step_seconds: float


class RoundView(Protocol):
    """A round whose window is open, as a participation rule sees it."""

    @property
    def fragment(self) -> int:
        """The number of the fragment, 0 to P - 1."""

    @property
    def number(self) -> int:
        """The number of the round at its shard, from 1."""

    @property
    def tick(self) -> int:
        """The step at which the fragment was due."""

    @property
    def learners(self) -> Sequence[Candidate]:
        """All live learners that have finished a step, in the order of their names."""


Rule = Callable[[Candidate, RoundView], bool | str]
"""A participation rule: returns whether a learner takes part in a round, or the reason why."""


def least_survivors(threshold: int, members: int) -> int:
    """Return how many contributions of a cohort are needed to open their secure sum (rule 24).

    They are more than half of the cohort. Otherwise a shard could request a learner's two secrets
    from two halves of it.

    >>> least_survivors(3, 8), least_survivors(6, 8)
    (5, 6)
    """
    return max(threshold, members // 2 + 1)  # break: half-opens-a-sum


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of the method, one field per symbol (see ``docs/reference/glossary.md``).

    Attributes:
        fragments: P, disjoint parts of the parameters, synchronized one at a time.
        period: H, steps between two syncs of the same fragment.
        overlap: τ, steps between sending a fragment and applying the merged one.
        quorum: K, learners that must take part before a round may merge.
        shards: S, syncer processes; fragment p belongs to shard p mod S.
        grace_margin: γ in [0, 1), the share of the slack of the overlap that a round may use to
            wait for stragglers. 0: it does not wait.
        phases: t_p of each fragment, 0 to H - 1: it is due when the step mod H equals it. Empty:
            ⌊p·H/P⌋, evenly spread.
        participants: Which learners qualify for a round: ``"reported"`` (paper) or ``"all"``. With
            ``"own"``, each learner opens its own rounds, which merge its payloads on arrival.
        alignment: How a contributor applies the merged fragment.
        missed: How a live learner that did not take part applies it. With ``"overwrite"``, a
            learner whose link was down for more steps than may count drops what it trained alone.
        apply: As soon as it has arrived, or exactly τ steps after the snapshot.
        wait: ``"at_overlap"`` blocks the step until the merged fragment has arrived (synchronous
            baselines only).
        late: What happens to an upload that was in progress when its round merged: it is folded
            into the fragment's ``"next"`` round, or ``"drop"``.
        late_rounds_max: A contribution that is late by more versions is refused.
        late_discount: A late contribution is multiplied by this once per version.
            ``"polynomial"``: by (1+s)^-1/2 for a contribution that is s versions late (FedBuff).
        discount_of: What is multiplied: its weight in the merge, or its values.
        probation_periods: Number of H steps for which a learner that joined with a fresh optimizer
            has weight 0 (rule 26).
        trust: What a low score does: nothing (``"show"``), lower the learner's weight
            (``"weigh"``), or exclude its contributions (``"exclude"``). ``"off"``: no scores.
        score_limit: The score below which a learner is excluded. Below twice the limit, its weight
            is lower.
        counter_cap_periods: Counters are capped at this many H, so that one long-absent learner
            cannot dominate a merge.
        norm_gate: k of the norm gate; 0: no gate.
        oversized: What happens to a contribution above its limit: ``"refuse"`` or ``"clip"``.
        uplink_codec: Name of the wire format of contributions.
        ladder: Codecs and their bits per element, the most exact first. Each learner's codec is
            chosen from it by its link (rule 20). Empty: always uplink_codec.
        threshold: The least number of contributions in a secure sum (rule 24); 0: no secure sums.
        chain: Number of differences that a learner fetches one after the other instead of a whole
            copy. Together they have fewer bits.
        adapt: The limits within which H and τ follow the links (rule 20); ``None``: they are fixed.
        schedule: A user's function for H; only the coordinator calls it. ``None``: there is none.
        rule: A participation rule, instead of that of ``participants``; only shards call it.
        error_feedback: Add what a codec leaves out to the next contribution (rule 19).
        history: How many versions the base of a contribution may be behind in a run of devices, and
            how long a shard remembers what it has merged of a device that is away (rule 23);
            ``None``: the run has no devices.
        cohort: The most devices that hold a place to train at a time; ``None``: no limit.
        draw: Which waiting device gets a place: any of them (``"uniform"``), or one of those with
            the fewest places so far (``"fair"``).
        visit_seconds: Time after which a device loses its place.
        merges_max: The most merges of each fragment in which a learner takes part, once in each
            (rule 25); ``None``: the run has no differential privacy.
        seed: Seed of the draws among waiting devices.
        max_steps: The run ends when the slowest shard's clock reaches it; ``None``: no limit.
        max_tokens: The run ends when this many tokens were trained; ``None``: no limit.
        checkpoint_every_seconds: Interval of the run's checkpoints; 0: only on demand.
        weighting: What a contribution weighs in a merge.
        quotas: Limits of each party's share of a merge. Empty: no party has a limit.
    """

    fragments: int = 24
    period: int = 24
    overlap: int = 2
    quorum: int = 1
    shards: int = 1
    grace_margin: float = 0.8
    phases: tuple[int, ...] = ()
    participants: Participants = "reported"
    alignment: Alignment = "overwrite"
    missed: Missed = "overwrite"
    apply: ApplyAt = "on_arrival"
    wait: Wait = "never"
    late: Late = "next"
    late_rounds_max: int = 32
    late_discount: Discount = 1.0
    discount_of: DiscountOf = "weight"
    probation_periods: int = 0
    trust: Trust = "off"
    score_limit: float = 0.25
    counter_cap_periods: int = 4
    norm_gate: float = 0.0
    oversized: Oversized = "clip"
    uplink_codec: str = "bf16"
    error_feedback: bool = False
    ladder: Ladder = ()
    chain: int = 1
    threshold: int = 0
    adapt: AdaptLimits | None = None
    schedule: Schedule | None = None
    rule: Rule | None = None
    history: int | None = None
    cohort: int | None = None
    draw: Draw = "fair"
    visit_seconds: float = 3600.0
    merges_max: int | None = None
    seed: int = 0
    max_steps: int | None = None
    max_tokens: int | None = None
    checkpoint_every_seconds: float = 0.0
    weighting: Weighting = "tokens"
    quotas: tuple[Quota, ...] = ()

    def owned(self, shard: int) -> tuple[int, ...]:
        """Return the fragments of one shard."""
        return tuple(p for p in range(self.fragments) if p % self.shards == shard)

    def owner(self, fragment: int) -> int:
        """Return the shard of one fragment."""
        return fragment % self.shards

    @property
    def secure(self) -> bool:
        """Whether a shard learns only the sums of contributions (rule 24)."""
        return self.threshold > 0

    @property
    def mergeable_versions(self) -> int:
        """How many versions a contribution's base may be behind the newest one and still be merged.

        It includes the version that is about to become the newest.
        """
        return 1 + (self.age_max if self.late == "next" else 0)

    @property
    def age_max(self) -> int:
        """The most versions by which a contribution may be late."""
        return self.late_rounds_max if self.history is None else self.history

    def discount(self, age: int) -> float:
        """Return the factor on a contribution that is late by this many versions.

        >>> Options(late_discount=0.5).discount(2), Options(late_discount="polynomial").discount(3)
        (0.25, 0.5)
        """
        if self.late_discount == "polynomial":
            # a = 0.5, as in FedBuff (arXiv 2106.06639).
            return float((1 + age) ** -0.5)  # break: polynomial-discount-ignored
        return float(self.late_discount**age)

    @property
    def devices(self) -> bool:
        """Whether learners may be devices, which are disconnected most of the time (rule 23)."""
        return self.history is not None

    @property
    def clock_quorum(self) -> int:
        """The number of learners whose steps move the clock (rule 1).

        If learners open their rounds by themselves, the quorum is the number of contributions that
        a fragment collects, and no learner waits for the clock: the furthest one moves it.
        """
        return 1 if self.participants == "own" else self.quorum

    @property
    def open_rounds_max(self) -> int:
        """The most fragments that are due within τ steps, ⌈τ·P/H⌉ if evenly spread; at least 1.

        It is a shard's number of slots for rounds (rule 2), and the most contributions that a
        learner may have in progress at each shard (rule 4).
        """
        if not self.phases:
            return max(1, ceil(self.overlap * self.fragments / self.period))
        counts = [len(due) for due in self.due_by_phase] * 2
        windows = (sum(counts[t : t + self.overlap]) for t in range(self.period))
        return max(1, *windows)

    @property
    def steps_counted(self) -> int:
        """The most steps of one contribution that count (rule 6)."""
        return self.counter_cap_periods * self.period

    @property
    def probation_steps(self) -> int:
        """The own steps for which a learner is on probation."""
        return self.probation_periods * self.period

    def revised(self, revision: Revision | None) -> Options:
        """Return the settings under a schedule revision; ``None``: unchanged."""
        if revision is None:
            return self
        return replace(self, period=revision.period, overlap=revision.overlap)

    @property
    def rungs(self) -> Ladder:
        """The learners' codecs and their bits. With a single codec, its bits have no meaning."""
        return self.ladder or ((self.uplink_codec, 1.0),)

    @property
    def periods(self) -> tuple[int, int]:
        """The least and the greatest H of the run."""
        return (self.period, self.period) if self.adapt is None else self.adapt.period

    @property
    def overlaps(self) -> tuple[int, int]:
        """The least and the greatest τ of the run."""
        return (self.overlap, self.overlap) if self.adapt is None else self.adapt.overlap

    @property
    def open_rounds_least(self) -> int:
        """The fewest slots for rounds that a shard may ever have."""
        fewest = replace(self, period=self.periods[1], overlap=self.overlaps[0], adapt=None)
        return fewest.open_rounds_max

    @property
    def in_step(self) -> bool:
        """Whether learners wait for one another."""
        return self.wait == "at_overlap" and self.quorum > 1

    def phase(self, fragment: int) -> int:
        """Return t_p: the fragment is due when t mod H equals it."""
        return self.phases[fragment] if self.phases else fragment * self.period // self.fragments

    def due(self, step: int) -> tuple[int, ...]:
        """Return the fragments that are due at a global step."""
        return self.due_by_phase[step % self.period]

    @property
    def due_by_phase(self) -> tuple[tuple[int, ...], ...]:
        """The fragments that are due at each phase of the period."""
        return _due(self.fragments, self.period, self.phases)


@cache
def _due(fragments: int, period: int, phases: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    spread = phases or [p * period // fragments for p in range(fragments)]
    due: list[list[int]] = [[] for _ in range(period)]
    for fragment, phase in enumerate(spread):
        due[phase].append(fragment)
    return tuple(map(tuple, due))
