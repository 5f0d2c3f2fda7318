"""What makes a contribution due: the shard's clock, or the learner's own steps.

`ByClock` is the method (rules 2 to 4): a tick opens a fragment's round, and the round sends a
request to each learner that qualifies. `ByOwnSteps` is Async Local-SGD (rule 21, ``participants =
"own"``): every H own steps, a learner alone receives a request, and its payload opens a round that
merges at once. With a quorum of K, the round opens when the payloads of K learners have arrived:
the buffer of FedBuff (arXiv 2106.06639).

These classes contain all differences between the two. `rounds`, `leaving` and `copies` take each
such decision from `participation`, so that the rules are written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import NamedTuple

from decoupled_diloco.errors import ConfigError, MethodError, a_kind
from decoupled_diloco.protocol.learner_state import LearnerState, ShardView
from decoupled_diloco.protocol.machine_options import Candidate, Options, RoundView, Rule
from decoupled_diloco.protocol.syncer_state import FragmentState, Member, Round, SyncerState

TICKS_MARGIN = 0.5
"""Assumed error of the learner's prediction of the shard's clock, in ticks.

An extra fragment is occasionally snapshotted in vain. A missing one delays its round by up to a
step.
"""


def everyone(learner: Candidate, round: RoundView) -> bool | str:
    """Include all live learners."""
    return "every live learner takes part"


def active(learner: Candidate, round: RoundView) -> bool | str:
    """Include learners that have stepped since the previous tick (rule 3)."""
    if learner.step >= round.tick:
        return f"its step {learner.step} has reached the round's tick {round.tick}"
    if learner.has_stepped:
        return "it reported a step after the previous tick"
    # A learner whose steps take an exact multiple of the fastest learner's would otherwise always
    # meet the same fragments, and never the others.
    return "it missed this fragment's last round" if learner.missed else False


RULES: dict[str, Rule] = {"reported": active, "all": everyone}
"""The shipped participation rules, by ``participants``."""


class TriedRound(NamedTuple):
    """A round without a shard, for the trial of a rule; see `RoundView`."""

    fragment: int
    number: int
    tick: int
    learners: Sequence[Candidate]


class SeenRound:
    """An open round of a shard, with its learners on demand; see `RoundView`."""

    def __init__(self, state: SyncerState, round: Round) -> None:
        self._state, self._round = state, round
        self.fragment, self.number, self.tick = round.fragment, round.number, round.tick

    @property
    def learners(self) -> Sequence[Candidate]:
        members = sorted(self._state.stepping, key=lambda member: member.learner)
        return tuple(map(self.candidate, members))

    def candidate(self, member: Member) -> Candidate:
        """Return a learner that has reported a step, as a rule sees it."""
        assert member.reported_at is not None
        since = self._round.previous_tick_at
        return Candidate(
            member.learner,
            member.run_step,
            member.run_step >= self.tick or member.reported_at > since,
            member.learner in self._state.fragments[self.fragment].missed,
            member.step_seconds,
        )


def why_included(rule: Rule, learner: Candidate, round: RoundView) -> str | None:
    """Return why a rule includes a learner; `None`: it does not.

    Raises:
        MethodError: The rule raises, or returns something else than a bool or a text.
    """
    try:
        found = rule(learner, round)
    except ConfigError:
        raise  # it is not loaded
    except Exception as error:
        raise MethodError(f"participation rule raises {error!r} for {learner.name}") from error
    if not isinstance(found, bool | str):
        raise MethodError(
            f"participation rule returned {a_kind(found)} for {learner.name}: return True or "
            "False, or the reason as a text"
        )
    if found is True:
        return "the participation rule includes it"
    return found or None


class ByClock:
    """The shard's clock makes fragments due; all qualified learners take part."""

    asks_during_merge = False
    """Whether a fragment is requested during its merge, although the answer would be late."""

    def due(self, options: Options, since: int, step: int) -> Sequence[tuple[int, int]] | None:
        """Return which own steps after ``since`` make which fragments due; `None`: none can."""
        return None

    def may_open(self, options: Options, entry: FragmentState) -> bool:
        """Return whether a queued fragment's round may open."""
        return True

    def why_open(self, fragment: int, tick: int) -> str:
        """Return why a round opens."""
        return f"fragment {fragment} is due since step {tick}"

    def why_closed(self, options: Options, reason: str) -> str:
        """Return why a round's window is over, given the window's own reason."""
        return reason

    def why_asked(
        self, options: Options, state: SyncerState, round: Round, member: Member
    ) -> str | None:
        """Return why a learner that has reported a step qualifies for a round (rule 3).

        Raises:
            MethodError: The participation rule fails.
        """
        if member.leaving_with is not None and round.fragment in member.leaving_with:
            return "it is about to leave"
        if round.leaver:
            return f"{round.leaver} is about to leave, so all learners take part"
        rule, seen = options.rule or RULES[options.participants], SeenRound(state, round)
        return why_included(rule, seen.candidate(member), seen)

    def tick(self, state: SyncerState, member: Member, round: Round | None) -> int:
        """Return the step for which a learner receives a request."""
        return state.clock if round is None else round.tick

    def due_soon(self, options: Options, clock: int) -> set[int]:
        """Return the fragments that are due within τ·S ticks, for a learner with a backlog.

        On average, a shard has as many of them as all shards have within τ ticks.
        """
        if options.wait != "never":
            return set()  # a synchronous contribution has exactly H steps
        ticks = range(clock + 1, clock + 1 + options.overlap * options.shards)
        return {fragment for tick in ticks for fragment in options.due(tick)}

    def folded(self, state: SyncerState, fragment: int) -> None:
        """Do nothing: a folded contribution waits for the fragment's round."""

    def keeps_turn(self, member: Member) -> bool:
        """Return whether a learner that declined with a newer version is asked again."""
        return member.pressed

    def lost(self, member: Member, fragment: int) -> None:
        """Do nothing: the fragment's round repeats a request that was lost with its connection."""

    def is_late(self, round: Round) -> bool:
        """Return whether a round merges only late contributions."""
        return all(ask.age for ask in round.folded) and not round.final

    def leaves(self, state: SyncerState, member: Member) -> None:
        """Make the unmerged fragments of a leaving learner due first (rule 17)."""
        first = [p for p in sorted(member.leaving_with or ()) if p not in state.rounds]
        rest = {p: tick for p, tick in state.queue.items() if p not in first}
        state.queue = dict.fromkeys(first, state.clock) | rest
        state.again -= set(first)

    def leaver_of(self, state: SyncerState, fragment: int) -> str:
        """Return the leaving learner for which a fragment's round opens; empty: there is none."""
        for member in state.members.values():
            if member.leaving_with is not None and fragment in member.leaving_with:
                return member.learner
        return ""

    def drains_at_once(self, member: Member) -> bool:
        """Return whether a leaving learner gets requests for all fragments, outside of rounds."""
        return False

    def ticks_ahead(
        self, options: Options, state: LearnerState, link: ShardView, now: float
    ) -> tuple[int, int]:
        """Return the first and last tick before the learner's next boundary."""
        assert link.offset is not None
        own = link.offset + state.step
        tick_seconds = link.tick_seconds.value or 0.0
        if options.wait == "at_overlap":
            return (own, own)  # all learners are at the same step: exactly the one that is due
        if link.clock_at is None or tick_seconds <= 0:
            return (own, own)
        clock = link.clock + (now - link.clock_at) / tick_seconds
        if options.quorum == 1:
            # With K = 1, this step's own report moves the clock to at least ``own``.
            clock = clock if clock > own else float(own)
        ahead = (state.step_seconds.value or 0.0) / tick_seconds
        first = floor(clock - TICKS_MARGIN)
        last = floor(clock + ahead + TICKS_MARGIN)
        return (first, min(last, first + options.period - 1))

    def differences_are_free(self, link: ShardView) -> bool:
        """Return whether a learner fetches differences without waiting for a slot."""
        return False


class ByOwnSteps(ByClock):
    """Each learner's own steps make its fragments due, for itself alone."""

    # A merge in progress makes nothing late here: each contribution has its own round.
    asks_during_merge = True

    def due(self, options: Options, since: int, step: int) -> Sequence[tuple[int, int]] | None:
        found: list[tuple[int, int]] = []
        # break: own-steps-never-due
        for own in range(max(since, step - options.period) + 1, step + 1):
            found += [(own, p) for p in options.due(own)]  # break: asked-at-every-step
        return found

    def may_open(self, options: Options, entry: FragmentState) -> bool:
        # The buffer of FedBuff: a round opens once K contributions have arrived.
        return len(entry.delivered) >= options.quorum  # break: empty-round-opened

    def why_open(self, fragment: int, tick: int) -> str:
        return "a contribution has arrived"

    def why_closed(self, options: Options, reason: str) -> str:
        if options.quorum > 1:
            return f"contributions of {options.quorum} learners have arrived"
        return "a contribution is merged on arrival"

    def why_asked(
        self, options: Options, state: SyncerState, round: Round, member: Member
    ) -> str | None:
        return None  # its own steps determine its requests

    def tick(self, state: SyncerState, member: Member, round: Round | None) -> int:
        return round.tick if round is not None and round.final else member.step

    def due_soon(self, options: Options, clock: int) -> set[int]:
        return set()  # no clock makes them due

    def folded(self, state: SyncerState, fragment: int) -> None:
        if state.phase != "running":
            return
        round = state.rounds.get(fragment)
        if round is None:
            state.queue[fragment] = state.clock  # break: arrival-opens-no-round
        else:  # the open round merges only earlier arrivals
            round.next_tick = state.clock  # break: arrival-during-merge-waits

    def keeps_turn(self, member: Member) -> bool:
        return True  # no other round would repeat the request

    def lost(self, member: Member, fragment: int) -> None:
        member.backlog.add(fragment)  # break: broken-link-not-asked-again

    def is_late(self, round: Round) -> bool:
        return False  # with own rounds, being behind other learners' versions is normal

    def leaves(self, state: SyncerState, member: Member) -> None:
        member.backlog |= member.leaving_with or frozenset()

    def leaver_of(self, state: SyncerState, fragment: int) -> str:
        return ""

    def drains_at_once(self, member: Member) -> bool:
        return member.leaving_with is not None

    def ticks_ahead(
        self, options: Options, state: LearnerState, link: ShardView, now: float
    ) -> tuple[int, int]:
        return (state.step, state.step)

    def differences_are_free(self, link: ShardView) -> bool:
        return not link.crowded


_PARTICIPATION = {"reported": ByClock(), "all": ByClock(), "own": ByOwnSteps()}


def participation(options: Options) -> ByClock:
    """Return the rules for how contributions become due in this run."""
    return _PARTICIPATION[options.participants]
