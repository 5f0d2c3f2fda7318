"""How learners come to be live at a shard, stay so and cease to be (rules 1, 10 and 13).

Functions of its state. A greeting admits, every report moves a run step, whatever is heard
renews a lease, and a lease that runs out, a goodbye or a newer epoch removes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decoupled_diloco.protocol import asking, syncer_fill, syncer_rounds
from decoupled_diloco.protocol.clock import advanced, shift_after_leave
from decoupled_diloco.protocol.effects import Broadcast, Evict, Note, Send, SyncerEffect
from decoupled_diloco.protocol.membership import (
    CLOCK_MAX,
    LEASE_SECONDS,
    RECONNECT_SECONDS,
    STANDS_OWN_STEPS,
    STANDS_SECONDS,
    STANDS_STEPS,
    Identity,
    Member,
    Pace,
    credible,
    report_problem,
)
from decoupled_diloco.protocol.messages import Hello, Shifted, StepReport
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.syncer_state import SyncerState, lower_median
from decoupled_diloco.protocol.versions import Holding

LATENESS_SECONDS_MIN = 0.5
"""A tick later than this was held up by a pause of the process, not by the scheduler."""

CLOCKLESS = ("starting", "restoring")
"""Phases of a shard that has to hear first where the clock is."""


def steps_problem(state: SyncerState, hello: Hello) -> str | None:
    """Why the steps that a greeting names cannot be true, as far as this life knows."""
    member, run_step = state.members.get(hello.learner), hello.run_step or 0
    if member is not None and member.epoch == hello.epoch:
        return report_problem(member.step, hello.step, 0, 0)
    if state.phase in CLOCKLESS:
        return None if run_step <= CLOCK_MAX else f"run step {run_step} is out of reach"
    return report_problem(state.clock, run_step, 0, 0)


def admit(state: SyncerState, options: Options, now: float, hello: Hello) -> Member:
    """Makes who has greeted live."""
    known = state.identities.get(hello.learner)
    if known is None or known.epoch < hello.epoch:
        known = _new_identity(state, hello, known)
    run_step = _run_step(state, options, now, hello, known)
    known.pace = Pace(now) if known.pace is None else known.pace
    member = Member(
        learner=hello.learner,
        epoch=hello.epoch,
        offset=run_step - hello.step,
        step=hello.step,
        lease_until=now + LEASE_SECONDS,
        reported_at=now if hello.step > 0 else None,  # it came back: its steps count
        is_new=hello.run_step is None and state.phase in CLOCKLESS,
    )
    state.members[hello.learner] = member
    state.members_stepping += member.reported_at is not None
    for round in state.rounds.values():
        round.came(hello.learner, stepping=member.reported_at is not None)
    state.ahead += member.run_step > state.clock
    return member


def _new_identity(state: SyncerState, hello: Hello, before: Identity | None) -> Identity:
    new = state.identities[hello.learner] = Identity(hello.epoch, hello.nonce)
    if before is not None:
        state.tokens_retired += state.tokens_of(before)
        new.earlier_tokens = before.earlier_tokens + before.tokens
    return new


def _run_step(
    state: SyncerState, options: Options, now: float, hello: Hello, known: Identity
) -> int:
    """The run step of who is admitted: as it says, as far as that can be true (rule 13)."""
    if hello.run_step is None:
        return state.clock
    if state.phase in CLOCKLESS:
        return min(hello.run_step, CLOCK_MAX)  # looked at once all have spoken
    if known.run_step is None or known.pace is None:
        forgotten = state.term > 1  # by a life before this one
        steps = [hello.run_step, *(member.run_step for member in state.members.values())]
        limit = _steps_limit(state, options, steps) if forgotten else state.clock
        return min(hello.run_step, limit)
    return min(hello.run_step, max(state.clock, known.run_step + known.pace.allows(now)))


def restore_clock(state: SyncerState, options: Options) -> None:
    """A clock that was lost is where the learners are; what it has missed is not made up for.

    Nobody is further ahead of most than one period. Who is new has no steps to tell it by.
    """
    known = [member for member in state.members.values() if not member.is_new]
    limit = _steps_limit(state, options, (member.run_step for member in known))
    for member in known:
        member.offset = min(member.offset, limit - member.step)  # break: restored-learner-far-ahead
    quorum = max(1, options.quorum - (len(state.members) - len(known)))
    state.clock = advanced(state.clock, (member.run_step for member in known), quorum)
    for member in state.members.values():
        member.offset, member.is_new = max(member.offset, state.clock - member.step), False
    state.ahead = sum(member.run_step > state.clock for member in state.members.values())


def _steps_limit(state: SyncerState, options: Options, run_steps: Iterable[int]) -> int:
    return max(state.clock, int(lower_median(list(run_steps)))) + options.period


def holding(
    state: SyncerState, options: Options, now: float, member: Member, message: Holding
) -> list[SyncerEffect]:
    """A learner holds a version: the broadcast of the newest one is measured by it."""
    held = credible((message,), state.fragments)
    if not held:
        return []
    member.held |= held
    member.held_at = now
    fragment = message.fragment
    entry = state.fragments[fragment]
    if entry.version == message.version and member.learner in entry.awaited:
        assert entry.published_at is not None
        entry.awaited.discard(member.learner)
        state.timing.broadcast.update(now - entry.published_at)
    if state.phase not in ("running", "sweeping"):
        return []
    return asking.held_more(state, options, now, member, fragment)


def reported_together(
    state: SyncerState, options: Options, now: float, reports: tuple[tuple[str, StepReport], ...]
) -> list[SyncerEffect]:
    """Reports that were looked at in one go."""
    effects: list[SyncerEffect] = []
    until = now + LEASE_SECONDS
    _look_at_leases(state, until)
    for learner, report in reports:
        member = state.members.get(learner)
        if member is None:
            continue
        if member.connected and member.lease_until < until:
            member.lease_until = until
        effects += reported(state, options, now, member, report)
    return effects


def reported(
    state: SyncerState, options: Options, now: float, member: Member, report: StepReport
) -> list[SyncerEffect]:
    """A learner has finished a step; one that reports the impossible is removed."""
    known = state.identities[member.learner]
    problem = report_problem(member.step, report.step, known.tokens, report.tokens)
    if problem is not None:
        gone = {member.learner: f"it reported {problem}"}
        return remove(state, options, now, gone, evict=True)
    if member.reported_at is None:
        state.members_stepping += 1
        for round in state.rounds.values():
            round.first_step(member.learner)
    member.reported_at, since = now, member.step
    advance_step(state, member, now, report.step)
    effects = _steps_again(state, member) if member.stands else []
    known.tokens, known.steps = max(known.tokens, report.tokens), max(known.steps, member.step)
    assert known.pace is not None
    if report.seconds > 0.0:  # nothing is known after a first step
        member.step_seconds = known.pace.believes(report.seconds, state.step_seconds)
        state.hear_step_seconds(member.step_seconds)
    for round in state.rounds.values():
        effects += asking.ask_if_qualified(state, options, now, round, member)
    return effects + asking.due_by_own_steps(state, options, now, member, since)


def _steps_again(state: SyncerState, member: Member) -> list[SyncerEffect]:
    """A loop that stood steps again: it is where the clock is, as one that joins."""
    member.stands = False
    by = state.clock - member.run_step
    if by <= 0:
        return []
    member.offset += by
    return [Send(member.learner, Shifted(by), "the clock went on while its loop stood still")]


def advance_step(state: SyncerState, member: Member, now: float, step: int) -> None:
    """A learner's own step count grows, as far as that can be true; old reports change nothing."""
    pace = state.identities[member.learner].pace
    assert pace is not None
    steps = min(step - member.step, pace.allows(now))
    if steps <= 0:
        return
    pace.saw(now, steps)
    before = member.run_step
    member.step += steps
    if before <= state.clock < member.run_step:
        state.ahead += 1


def ahead(
    state: SyncerState, options: Options, now: float, member: Member, run_step: int
) -> list[SyncerEffect]:
    """A learner is further at another shard, and where learners wait for one another, here too.

    No pace bounds it: a clock that goes by K > 1 learners goes no further than another one is.
    """
    by = min(run_step, CLOCK_MAX) - member.run_step
    if by <= 0 or not options.in_step:
        return []
    state.ahead += member.run_step <= state.clock < member.run_step + by
    member.offset += by
    effects: list[SyncerEffect] = []
    for round in state.rounds.values():
        effects += asking.ask_if_qualified(state, options, now, round, member)
    return effects


def renew(state: SyncerState, now: float, learner: str) -> None:
    """Something was heard of a learner."""
    member = state.members.get(learner)
    if member is not None and member.connected:  # break: lease-not-renewed
        if member.lease_until < now + LEASE_SECONDS:
            member.lease_until = now + LEASE_SECONDS
        _look_at_leases(state, member.lease_until)


def _look_at_leases(state: SyncerState, instant: float) -> None:
    """Leases are looked at no later than this; renewals do not move the instant back."""
    if state.lease_check_at is None or instant < state.lease_check_at:
        state.lease_check_at = instant


def stands_looked_at(state: SyncerState, options: Options) -> float | None:
    """When to look whether it is a loop that stands still for which the clock waits (rule 1)."""
    if options.wait != "never" or state.phase != "running" or state.step_seconds == 0.0:
        return None
    if state.members_stepping <= options.quorum:
        return None  # nobody is there in its place
    return max(state.ticked_at, state.looked_at) + _patience(state)


def _patience(state: SyncerState) -> float:
    return max(STANDS_SECONDS, STANDS_STEPS * state.step_seconds)


def pass_standing(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """The clock goes on without loops that stand still, as if they had gone (rule 1)."""
    at = stands_looked_at(state, options)
    if at is None or now < at:
        return []
    state.looked_at = now
    for member in state.stepping:
        longest = max(_patience(state), STANDS_OWN_STEPS * member.step_seconds)
        assert member.reported_at is not None
        member.stands |= now - member.reported_at >= longest
    return _shift(state, options, "a loop that was ahead stands still")


def _shift(state: SyncerState, options: Options, why: str) -> list[SyncerEffect]:
    """Whoever steps is moved up, so that the clock neither stalls nor goes back."""
    rest = [member for member in state.members.values() if not member.stands]
    by = shift_after_leave(state.clock, [member.run_step for member in rest], options.quorum)
    effects: list[SyncerEffect] = []
    if by and len(rest) == len(state.members):
        effects.append(Broadcast(Shifted(by), why))
    elif by:
        effects += [Send(member.learner, Shifted(by), why) for member in rest]
    for member in rest:
        member.offset += by
    state.ahead = sum(member.run_step > state.clock for member in state.members.values())
    return effects


def disconnected(state: SyncerState, now: float, learner: str) -> list[SyncerEffect]:
    """A learner's connection broke: it has a moment to come back."""
    state.observers.discard(learner)
    member = state.members.get(learner)
    if member is None:
        return []
    member.connected = False
    for entry in state.fragments.values():
        entry.awaited.discard(learner)
    member.lease_until = min(member.lease_until, now + RECONNECT_SECONDS)
    _look_at_leases(state, member.lease_until)
    return syncer_fill.member_gone(state, learner, "its connection broke")


def ticked(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Leases and the rounds' windows are looked at; a late tick is nobody's fault."""
    told = state.deadline_told
    lateness = 0.0 if told is None else now - told
    if lateness > LATENESS_SECONDS_MIN:
        # And a little more: what others sent meanwhile may still be on its way.
        longer = lateness + RECONNECT_SECONDS
        for member in state.members.values():
            member.lease_until += longer  # break: late-tick-connected-only
    gone = {
        learner: f"{'nothing was heard' if member.connected else 'its connection broke'} "
        "and its lease ran out"
        for learner, member in state.members.items()
        if now >= member.lease_until
    }
    effects = remove(state, options, now, gone, evict=True)
    state.lease_check_at = min(
        (member.lease_until for member in state.members.values()), default=None
    )
    if lateness > LATENESS_SECONDS_MIN:
        state.looked_at = now
    else:
        effects += pass_standing(state, options, now)
    return effects + syncer_rounds.pass_windows(state, options, now)


def remove(
    state: SyncerState, options: Options, now: float, gone: Mapping[str, str], *, evict: bool
) -> list[SyncerEffect]:
    """Learners are no longer live; the clock neither stalls nor goes back (rule 1).

    Args:
        state: The shard's.
        options: The run's.
        now: This instant.
        gone: Why, by learner. What concerns all that are left is done once, not for each.
        evict: Whether their connections are to be closed.
    """
    effects: list[SyncerEffect] = []
    for learner, reason in gone.items():
        effects += _remove(state, options, now, learner, reason, evict=evict)
    if not gone:
        return effects
    state.find_step_seconds()  # even if it has become slower since: nobody else may be known
    if state.phase in ("swept", "finished"):
        return effects  # all steps are made: the clock stands
    who = next(iter(gone)) if len(gone) == 1 else f"one of {len(gone)} learners"
    return effects + _shift(state, options, f"{who} was ahead and has gone")


def _remove(
    state: SyncerState, options: Options, now: float, learner: str, reason: str, *, evict: bool
) -> list[SyncerEffect]:
    member = state.members[learner]
    stepping = member.reported_at is not None
    for round in state.rounds.values():
        round.went(learner, stepping=stepping)
    del state.members[learner]
    state.members_stepping -= stepping
    state.identities[learner].run_step = member.run_step
    effects: list[SyncerEffect] = [Evict(learner, reason, reason)] if evict else []
    effects.append(Note(f"{learner} (epoch {member.epoch}) is no longer live", reason))
    effects += syncer_rounds.forget_asks(state, options, now, learner, reason)
    for fragment in state.fragments.values():
        fragment.missed.discard(learner)
        fragment.awaited.discard(learner)
    return effects + syncer_fill.member_gone(state, learner, reason)
