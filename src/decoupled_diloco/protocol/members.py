"""Live learners at a shard: admission, leases and removal (rules 1, 10 and 13).

Functions of its state. A greeting admits a learner, every report moves its run step, and any
received byte renews its lease. An expired lease, a goodbye or a newer incarnation removes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from decoupled_diloco.protocol import first_copies, rounds
from decoupled_diloco.protocol.clock import advanced, shift_after_leave
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Broadcast,
    Evict,
    Hello,
    Holding,
    Note,
    Send,
    Shifted,
    StepReport,
    SyncerEffect,
)
from decoupled_diloco.protocol.syncer_state import (
    CLOCK_MAX,
    LEASE_SECONDS,
    RECONNECT_SECONDS,
    STANDS_OWN_STEPS,
    STANDS_SECONDS,
    STANDS_STEPS,
    Identity,
    Member,
    Pace,
    SyncerState,
    credible,
    lower_median,
    report_problem,
)

LATENESS_SECONDS_MIN = 0.5
"""A tick that is later than this was delayed by a pause of the process, not by the scheduler."""


CLOCKLESS = ("starting", "restoring")
"""Phases of a shard that does not have a clock yet."""


def steps_problem(state: SyncerState, hello: Hello) -> str | None:
    """Return why the steps in a greeting cannot be true, as far as this process can judge."""
    member, run_step = state.members.get(hello.learner), hello.run_step or 0
    if member is not None and member.epoch == hello.epoch:
        return report_problem(member.step, hello.step, 0, 0)
    if state.phase in CLOCKLESS:
        return None if run_step <= CLOCK_MAX else f"run step {run_step} is out of reach"
    return report_problem(state.clock, run_step, 0, 0)


def admit(state: SyncerState, options: Options, now: float, hello: Hello) -> Member:
    """Make the learner that greeted live."""
    known = state.identities.get(hello.learner)
    if known is None or known.epoch < hello.epoch:
        known = _new_identity(state, options, hello, known)
    run_step = _run_step(state, options, now, hello, known)
    known.pace = Pace(now) if known.pace is None else known.pace
    step = hello.step
    if options.devices:  # its steps alone are limited by the time that it was away
        step = min(step, known.pace.allows(now))
        if step:
            known.pace.observe(now, step)
    member = Member(
        learner=hello.learner,
        epoch=hello.epoch,
        offset=run_step - step,
        step=step,
        lease_until=now + LEASE_SECONDS,
        reported_at=now if hello.step > 0 else None,  # a returning learner is stepping already
        is_new=hello.run_step is None and state.phase in CLOCKLESS,
    )
    state.members[hello.learner] = member
    state.members_stepping += member.reported_at is not None
    for round in state.rounds.values():
        round.came(hello.learner, stepping=member.reported_at is not None)
    state.ahead += member.run_step > state.clock
    return member


def _new_identity(
    state: SyncerState, options: Options, hello: Hello, before: Identity | None
) -> Identity:
    new = state.identities[hello.learner] = Identity(hello.epoch, hello.nonce)
    if before is not None:
        state.tokens_retired += state.tokens_of(before)  # they still count for the budget
        new.earlier_tokens = before.earlier_tokens + before.tokens
        if options.devices:
            new.pace, new.sizes = before.pace, before.sizes
    return new


def _run_step(
    state: SyncerState, options: Options, now: float, hello: Hello, known: Identity
) -> int:
    """Return the run step of an admitted learner: as claimed, within what can be true (rule 13)."""
    if hello.run_step is None:
        return state.clock
    if state.phase in CLOCKLESS:
        return min(hello.run_step, CLOCK_MAX)  # `restore_clock` checks it once all have connected
    if known.run_step is None or known.pace is None:
        forgotten = state.term > 1  # an earlier process of the shard may have known it
        steps = [hello.run_step, *(member.run_step for member in state.members.values())]
        limit = _steps_limit(state, options, steps) if forgotten else state.clock
        return min(hello.run_step, limit)
    return min(hello.run_step, max(state.clock, known.run_step + known.pace.allows(now)))


def restore_clock(state: SyncerState, options: Options) -> None:
    """Set a lost clock by the learners. Ticks that were missed meanwhile are not made up for.

    No learner may be more than one period ahead of the median. A new learner has no steps that
    could contribute to the clock.
    """
    known = [member for member in state.members.values() if not member.is_new]
    limit = _steps_limit(state, options, (member.run_step for member in known))
    for member in known:
        member.offset = min(member.offset, limit - member.step)  # break: restored-learner-far-ahead
    # New learners are placed at the clock below, so each counts toward the quorum.
    quorum = max(1, options.clock_quorum - (len(state.members) - len(known)))
    state.clock = advanced(state.clock, (member.run_step for member in known), quorum)
    for member in state.members.values():
        member.offset, member.is_new = max(member.offset, state.clock - member.step), False
    state.ahead = sum(member.run_step > state.clock for member in state.members.values())


def _steps_limit(state: SyncerState, options: Options, run_steps: Iterable[int]) -> int:
    return max(state.clock, int(lower_median(list(run_steps)))) + options.period


def holding(
    state: SyncerState, options: Options, now: float, member: Member, message: Holding
) -> list[SyncerEffect]:
    """Record a held version. It also measures the broadcast of the newest one."""
    held = credible((message,), state.fragments)
    if not held:
        return []
    member.held |= held
    member.again[message.fragment] = message.again
    member.held_at = now
    fragment = message.fragment
    member.held_step[fragment] = member.step
    entry = state.fragments[fragment]
    if entry.version == message.version and member.learner in entry.awaited:
        assert entry.published_at is not None
        entry.awaited.discard(member.learner)
        state.timing.broadcast.update(now - entry.published_at)
    if state.phase not in ("running", "sweeping"):
        return []
    return rounds.held_more(state, options, now, member, fragment)


def reported_together(
    state: SyncerState, options: Options, now: float, reports: tuple[tuple[str, StepReport], ...]
) -> list[SyncerEffect]:
    """Process reports that arrived together."""
    effects: list[SyncerEffect] = []
    until = now + LEASE_SECONDS
    _check_leases_by(state, until)  # once for all: thousands of reports may arrive together
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
    """Process a learner's report of a step. A learner that reports the impossible is removed."""
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
    member.is_fresh = report.fresh
    advance_step(state, member, now, report.step)
    effects = _steps_again(state, member) if member.stalled else []
    known.tokens, known.steps = max(known.tokens, report.tokens), max(known.steps, member.step)
    assert known.pace is not None
    if report.seconds > 0.0:  # a first step has no duration yet
        member.step_seconds = known.pace.believes(report.seconds, state.step_seconds)
        state.add_step_seconds(member.step_seconds)
    for round in state.rounds.values():
        effects += rounds.ask_if_qualified(state, options, now, round, member)
    return effects + rounds.due_by_own_steps(state, options, now, member, since)


def _steps_again(state: SyncerState, member: Member) -> list[SyncerEffect]:
    """Move a stalled learner that steps again to the present clock, like one that joins."""
    member.stalled = False
    by = state.clock - member.run_step
    if by <= 0:
        return []
    member.offset += by
    return [Send(member.learner, Shifted(by), "the clock advanced while its loop was stalled")]


def advance_step(state: SyncerState, member: Member, now: float, step: int) -> None:
    """Advance a learner's own step count within its pace. Old reports change nothing."""
    pace = state.identities[member.learner].pace
    assert pace is not None
    steps = min(step - member.step, pace.allows(now))
    if steps <= 0:
        return
    pace.observe(now, steps)
    before = member.run_step
    member.step += steps
    if before <= state.clock < member.run_step:
        state.ahead += 1


def ahead(
    state: SyncerState, options: Options, now: float, member: Member, run_step: int
) -> list[SyncerEffect]:
    """Move up a learner that is further ahead at another shard, if learners wait for one another.

    No pace limits this. The clock requires K > 1 learners, so it advances no further than another
    learner is.
    """
    by = min(run_step, CLOCK_MAX) - member.run_step
    if by <= 0 or not options.in_step:
        return []
    state.ahead += member.run_step <= state.clock < member.run_step + by
    member.offset += by
    effects: list[SyncerEffect] = []
    for round in state.rounds.values():
        effects += rounds.ask_if_qualified(state, options, now, round, member)
    return effects


def renew(state: SyncerState, now: float, learner: str) -> None:
    """Renew a learner's lease, because something arrived from it."""
    member = state.members.get(learner)
    if member is not None and member.connected:  # break: lease-not-renewed
        if member.lease_until < now + LEASE_SECONDS:
            member.lease_until = now + LEASE_SECONDS
        _check_leases_by(state, member.lease_until)


def _check_leases_by(state: SyncerState, instant: float) -> None:
    """Check leases at this instant at the latest. Renewals do not move the check back."""
    if state.lease_check_at is None or instant < state.lease_check_at:
        state.lease_check_at = instant


def stall_check_at(state: SyncerState, options: Options) -> float | None:
    """Return when to check whether the clock waits for a stalled loop (rule 1)."""
    if options.wait != "never" or state.phase != "running" or state.step_seconds == 0.0:
        return None
    if state.members_stepping <= options.clock_quorum:
        return None  # without it, the quorum would be incomplete
    return max(state.ticked_at, state.stall_checked_at) + _patience(state)


def _patience(state: SyncerState) -> float:
    return max(STANDS_SECONDS, STANDS_STEPS * state.step_seconds)


def pass_stalled(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Advance the clock without stalled loops, as if they had left (rule 1)."""
    at = stall_check_at(state, options)
    if at is None or now < at:
        return []
    state.stall_checked_at = now
    for member in state.stepping:
        longest = max(_patience(state), STANDS_OWN_STEPS * member.step_seconds)
        assert member.reported_at is not None
        member.stalled |= now - member.reported_at >= longest
    return _shift(state, options, "a loop that was ahead has stalled")


def _shift(state: SyncerState, options: Options, why: str) -> list[SyncerEffect]:
    """Move up the stepping learners, so that the clock neither stalls nor goes back."""
    rest = [member for member in state.members.values() if not member.stalled]
    by = shift_after_leave(state.clock, [member.run_step for member in rest], options.clock_quorum)
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
    """Shorten the lease of a learner whose connection broke: it has a moment to reconnect."""
    state.observers.discard(learner)
    member = state.members.get(learner)
    if member is None:
        return []
    member.connected = False
    for entry in state.fragments.values():
        entry.awaited.discard(learner)  # its outage is not part of the broadcast time
    member.lease_until = min(member.lease_until, now + RECONNECT_SECONDS)
    _check_leases_by(state, member.lease_until)
    return first_copies.member_gone(state, learner, "its connection broke")


def ticked(state: SyncerState, options: Options, now: float) -> list[SyncerEffect]:
    """Check leases and windows. A late tick extends all leases by its lateness."""
    due_at = state.tick_due_at
    lateness = 0.0 if due_at is None else now - due_at
    if lateness > LATENESS_SECONDS_MIN:
        # After a pause of this process, messages of the others may still be in transit.
        longer = lateness + RECONNECT_SECONDS
        for member in state.members.values():
            member.lease_until += longer  # break: late-tick-connected-only
    gone = {
        learner: f"{'no data arrived' if member.connected else 'its connection broke'} "
        "and its lease ran out"
        for learner, member in state.members.items()
        if now >= member.lease_until
    }
    effects = remove(state, options, now, gone, evict=True)
    state.lease_check_at = min(
        (member.lease_until for member in state.members.values()), default=None
    )
    if lateness > LATENESS_SECONDS_MIN:
        state.stall_checked_at = now  # reports may be queued: no loop counts as stalled yet
    else:
        effects += pass_stalled(state, options, now)
    return effects + rounds.pass_windows(state, options, now)


def remove(
    state: SyncerState, options: Options, now: float, gone: Mapping[str, str], *, evict: bool
) -> list[SyncerEffect]:
    """Remove learners that are no longer live. The clock neither stalls nor goes back (rule 1).

    Args:
        state: The shard's.
        options: The run's.
        now: The present instant.
        gone: The reason, by learner. Work that concerns the remaining learners is done only once.
        evict: Whether their connections are to be closed.
    """
    effects: list[SyncerEffect] = []
    for learner, reason in gone.items():
        effects += _remove(state, options, now, learner, reason, evict=evict)
    if not gone:
        return effects
    state.find_step_seconds()  # the fastest learner may have left
    if state.phase in ("swept", "finished"):
        return effects  # no more steps follow, so the clock may stop
    leavers = next(iter(gone)) if len(gone) == 1 else f"one of {len(gone)} learners"
    return effects + _shift(state, options, f"{leavers} was ahead and left")


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
    effects.append(Note(f"{learner} (incarnation {member.epoch}) is no longer live", reason))
    effects += rounds.forget_asks(state, options, now, learner, reason)
    for fragment in state.fragments.values():
        fragment.missed.discard(learner)
        fragment.awaited.discard(learner)
    return effects + first_copies.member_gone(state, learner, reason)
