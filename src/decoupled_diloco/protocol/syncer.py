"""The state machine of one syncer shard: no I/O, no clock, no randomness, no tensors.

Theory of operation. A shard owns some fragments. Learners report every inner step; the K-th
largest of their run steps is the shard's clock t (`clock`). At every unit of t the fragments that
are due open a round; a round pulls from each learner that qualifies, the moment it does, until its
window closes; what has been delivered is merged by a worker into a new published copy, and everyone
is told (`syncer_rounds`). Learners come and go by greetings, leases and epochs (`membership`).
Before all that, the shard's fragments need a first copy: the run's one named set of initial
weights, or, after a restart, the newest copies that the learners still hold (`syncer_fill`). When
the budget is spent, a closing sweep gives every fragment one last round.

``TRANSITIONS`` is the life of a shard. Every other event is legal in every phase and moves only
members, rounds or the fill.
"""

from __future__ import annotations

import copy
from typing import assert_never

from decoupled_diloco.protocol import (
    asking,
    draining,
    following,
    syncer_fill,
    syncer_members,
    syncer_rounds,
)
from decoupled_diloco.protocol.checkpoints.effects import ForgetCheckpoints, TakeCheckpoint
from decoupled_diloco.protocol.checkpoints.events import CheckpointHeard, PartWritten
from decoupled_diloco.protocol.checkpoints.messages import CheckpointOrdered, PartSaved
from decoupled_diloco.protocol.clock import advanced
from decoupled_diloco.protocol.effects import (
    Accept,
    Broadcast,
    ClockAdvanced,
    Reject,
    Send,
    Stop,
    SyncerEffect,
)
from decoupled_diloco.protocol.events import (
    BodyArrived,
    BodyCorrupt,
    Connected,
    CopyArrived,
    CopyCorrupt,
    DiskRead,
    Heard,
    Lost,
    Merged,
    MergeFailed,
    Received,
    Reported,
    SyncerEvent,
    Tick,
    WeightsLoaded,
)
from decoupled_diloco.protocol.membership import (
    credible,
    identity_problem,
)
from decoupled_diloco.protocol.messages import (
    Ahead,
    Begin,
    Copy,
    CopyDeclined,
    CopyTook,
    Decline,
    Draining,
    Ending,
    EndOrdered,
    Finished,
    FinishOrdered,
    Hello,
    LayoutSet,
    Leave,
    Message,
    Progress,
    SeedNamed,
    ShardAdmitted,
    StepReport,
    Swept,
    Upload,
    Welcome,
)
from decoupled_diloco.protocol.options import Options
from decoupled_diloco.protocol.peers import COORDINATOR, name_problem
from decoupled_diloco.protocol.revisions import Revision
from decoupled_diloco.protocol.syncer_memory import recall
from decoupled_diloco.protocol.syncer_state import FragmentState, SyncerState
from decoupled_diloco.protocol.versions import Holding

TRANSITIONS: tuple[tuple[str, str, str], ...] = (
    # phase, event, next phase
    ("starting", "ShardAdmitted (not begun)", "empty"),
    ("starting", "ShardAdmitted (begun)", "restoring"),
    ("empty", "SeedNamed", "seeding"),
    ("seeding", "SeedNamed", "seeding"),
    ("seeding", "the seed's copies are no good", "seeding; the coordinator is told"),
    ("ready", "SeedNamed", "seeding"),
    ("seeding", "every owned fragment copied", "ready"),
    ("ready", "Begin of this attempt", "running"),
    ("restoring", "every owned fragment copied", "running"),
    ("running", "EndOrdered", "sweeping"),
    ("restoring", "EndOrdered", "restoring"),
    ("sweeping", "every fragment closed", "swept"),
    ("swept", "FinishOrdered", "finished"),
)

LINGER_SECONDS = 20.0
"""How long a finished shard waits for learners and observers to take the last copies; for a learner
that still gets one after the other as long as for a copy in the closing sweep."""


STALLED_SECONDS = 1.0
"""A clock that has not moved for so long does not say whether the budget's tokens are trained."""


class SyncerMachine:
    """One shard. ``handle`` is told facts and answers with orders; ``check`` asserts invariants."""

    def __init__(self, options: Options, shard: int) -> None:
        self.options = self._settings = options
        self.shard = shard
        self.owned = options.owned(shard)
        self._owned_set = frozenset(self.owned)
        self.state = SyncerState(fragments={p: FragmentState() for p in self.owned})

    def handle(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        """Takes one fact in.

        Args:
            now: seconds of any clock that never goes back.
            event: what happened.

        Returns:
            What to do, in this order.
        """
        effects = self._dispatch(now, event)
        effects += self._move_on(now)
        told = None if isinstance(event, Tick) else self.state.deadline_told
        self.state.deadline_told = self._deadline_to_keep(now, told)
        return effects

    def deadline(self) -> float | None:
        """When to be woken by a ``Tick``; ``None``: the next event will do."""
        state = self.state
        instants = [state.lease_check_at, state.stop_at]
        instants.append(syncer_members.stands_looked_at(state, self.options))
        if state.fill is not None:
            instants.append(state.fill.settle_at)
        for round in state.rounds.values():
            instants.append(syncer_rounds.deadline(state, self.options, round))
        instants += [entry.retry_at for entry in state.fragments.values()]
        return min((instant for instant in instants if instant is not None), default=None)

    def _deadline_to_keep(self, now: float, told: float | None) -> float | None:
        """By which instant the next tick is on time.

        A deadline may lie in the past when it comes into being (a window of no length): then the
        tick is due now, and nothing was late.
        """
        deadline = self.deadline()
        if deadline is None or deadline >= now:
            return deadline
        return now if told is None else min(max(deadline, told), now)

    def snapshot(self) -> SyncerState:
        """A deep copy of the whole state."""
        return copy.deepcopy(self.state)

    def restore(self, state: SyncerState) -> None:
        """Goes on from a snapshot."""
        self.state = copy.deepcopy(state)
        self.options = self._settings.revised(self.state.revision)

    def check(self) -> None:
        """Asserts every invariant that can be seen in one state."""
        state, options = self.state, self.options
        slots = sum(round.holds_slot for round in state.rounds.values())
        slots_most = max(options.open_rounds_max, state.slots_most)
        assert slots <= slots_most, "more rounds hold slots than rule 2 allows"
        assert set(state.fragments) == set(self.owned)
        assert not state.queue.keys() & state.rounds.keys(), "an open round is queued as well"
        live = [member.run_step for member in state.members.values()]
        if state.phase == "running":
            assert advanced(state.clock, live, options.quorum) == state.clock, "a tick is missing"
            assert state.ahead == sum(step > state.clock for step in live)
        for fragment, round in state.rounds.items():
            assert round.fragment == fragment
            assert round.base == state.fragments[fragment].version
            assert round.version is None or round.version > round.base, "a version goes back"
            assert (
                round.settled_at is not None
                or round.awaited <= state.fragments[fragment].asks.keys()
            )
        state.check_counts()
        for learner, member in state.members.items():
            assert member.learner == learner
            assert state.identities[learner].epoch == member.epoch, "an old epoch is live"
            under_way = {p for p, entry in state.fragments.items() if learner in entry.asks}
            assert member.under_way == under_way
            hurried = state.phase == "sweeping" or member.leaving_with is not None
            assert hurried or len(under_way) <= slots_most, "too many are under way"
        for entry in state.fragments.values():
            for ask in entry.asks.values():
                assert state.members[ask.learner].epoch == ask.epoch, "who is gone is waited for"

    def _dispatch(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        state, options = self.state, self.options
        match event:
            case Tick():
                return syncer_members.ticked(state, options, now)
            case DiskRead(copies, memory, exact):
                state.durable = {c.fragment: c for c in copies if c.fragment in self._owned_set}
                state.durable_is_exact = exact
                if memory is not None:
                    recall(state, memory)
                return []
            case Connected(_, hello, connection):
                assert isinstance(hello, Hello)
                return self._greeted(now, connection, hello)
            case Received(peer, message) if peer == COORDINATOR:
                return self._ordered(now, message)
            case Received(learner, message):
                syncer_members.renew(state, now, learner)
                return self._said(now, learner, message)
            case Heard(learners):
                for learner in learners:
                    syncer_members.renew(state, now, learner)
                return []
            case Reported(reports):
                return syncer_members.reported_together(state, options, now, reports)
            case Lost(learner):
                return syncer_members.disconnected(state, now, learner)
            case BodyArrived():
                syncer_members.renew(state, now, event.learner)
                return syncer_rounds.body_arrived(state, options, now, event)
            case BodyCorrupt():
                return syncer_rounds.body_corrupt(state, options, now, event)
            case CopyArrived():
                return syncer_fill.copy_arrived(state, event)
            case CopyCorrupt():
                return syncer_fill.copy_corrupt(state, now, event)
            case WeightsLoaded(digests):
                return syncer_fill.weights_loaded(state, digests)
            case Merged(number, fragment, digest):
                return self._merged(now, number, fragment, digest)
            case MergeFailed(number, fragment, reason):
                return syncer_rounds.merge_failed(
                    state, self.options, now, number, fragment, reason
                )
            case CheckpointHeard(number):
                return self._take_checkpoint(number, "a message is of it")
            case PartWritten(number, digest, nbytes, problem):
                kept = PartSaved(number, digest, nbytes, problem)
                return [Send(COORDINATOR, kept, problem or "its part is on the disk")]
            case _:
                assert_never(event)

    def _take_checkpoint(self, number: int, why: str) -> list[SyncerEffect]:
        """Its part of a checkpoint; before and after rounds it has none."""
        if number <= self.state.checkpoint:
            return []
        self.state.checkpoint = number
        return [TakeCheckpoint(number, why)] if self.state.phase == "running" else []

    def _ordered(self, now: float, message: Message) -> list[SyncerEffect]:
        state = self.state
        match message:
            case ShardAdmitted():
                if state.phase == "swept":
                    return [Send(COORDINATOR, Swept(), "the coordinator may not have heard it")]
                return syncer_fill.term_granted(state, self.owned, now, message)
            case LayoutSet():
                return []
            case SeedNamed():
                return syncer_fill.seed_named(state, self.owned, message)
            case Begin(attempt):
                if state.phase != "ready" or state.fill is None or state.fill.attempt != attempt:
                    return []
                return self._run(now, "every shard holds its share of the initial weights")
            case CheckpointOrdered(number, keep):
                forget = ForgetCheckpoints(keep, number, "newer ones are complete")
                return [forget, *self._take_checkpoint(number, "the coordinator orders it")]
            case Revision():
                return following.pass_on(state, message)
            case EndOrdered():
                if self.state.end_ordered:
                    return []
                self.state.end_ordered = True
                return [] if state.phase != "running" else self._sweep(now, "the budget is spent")
            case FinishOrdered():
                self.state.finish_ordered = True
                syncer_fill.all_are_swept(state, self.owned, now)
                if state.phase != "finished" and state.stop_at is None:
                    state.stop_at = now + LINGER_SECONDS
                    state.stop_by = now + syncer_rounds.COPY_SECONDS
                return []
            case _:
                raise AssertionError(f"the coordinator does not say this to a shard: {message}")

    def _greeted(self, now: float, connection: int, hello: Hello) -> list[SyncerEffect]:
        state = self.state
        unnamed = name_problem(hello.learner)
        if unnamed:
            return [Reject(connection, unnamed, True, unnamed)]
        if hello.role == "observer":
            state.observers.add(hello.learner)
            why = "an observer counts for nothing"
            return [Accept(connection, hello.learner, 0, why), *self._welcome(hello, 0, 0, why)]
        known = state.identities.get(hello.learner)
        problem = identity_problem(known, hello.epoch, hello.nonce)
        problem = problem or syncer_members.steps_problem(state, hello)
        if problem is not None:
            return [Reject(connection, f"{hello.learner}: {problem}", True, problem)]
        effects: list[SyncerEffect] = []
        member = state.members.get(hello.learner)
        why = "reconnected within its lease"
        if member is not None and member.epoch == hello.epoch:
            # Pulls may have gone with the old connection; what it sends goes on.
            why_void = "it connected anew"
            member.connected = False  # until it is accepted, nothing may be sent to it
            effects += syncer_rounds.forget_asks(
                state, self.options, now, hello.learner, why_void, hello.asks
            )
            # break: reconnected-holder-not-asked
            effects += syncer_fill.member_gone(state, hello.learner, why_void)
        if member is not None and member.epoch < hello.epoch:  # break: earlier-epoch-stays
            why_gone = "a newer epoch has joined"
            gone = {hello.learner: why_gone}
            effects += syncer_members.remove(state, self.options, now, gone, evict=False)
            member = None
        if state.fill is not None and state.phase == "restoring":
            state.fill.clocks[hello.learner] = hello.clock
        if member is None:
            why = "joined" if hello.step == 0 else "came back"
            member = syncer_members.admit(state, self.options, now, hello)
        member.connected = True
        member.held = credible(hello.held, self._owned_set)
        since = member.step
        syncer_members.advance_step(state, member, now, hello.step)
        syncer_members.renew(state, now, hello.learner)
        effects.append(Accept(connection, hello.learner, hello.epoch, why))
        effects += self._welcome(hello, member.step, member.run_step, why)
        effects += syncer_fill.member_connected(state, self.owned, now, member)
        for round in state.rounds.values():
            effects += asking.ask_if_qualified(state, self.options, now, round, member)
        effects += asking.due_by_own_steps(state, self.options, now, member, since)
        return effects + asking.serve(state, self.options, now, member)

    def _welcome(self, hello: Hello, step: int, run_step: int, why: str) -> list[SyncerEffect]:
        state = self.state
        held = credible(hello.held, self._owned_set)
        news: list[SyncerEffect] = []
        if state.phase in ("running", "sweeping", "swept", "finished"):
            for fragment, entry in state.fragments.items():
                if entry.version is not None and held.get(fragment) != entry.version:
                    news.append(Send(hello.learner, entry.announcement(fragment, state.clock), why))
        asks = syncer_rounds.open_asks(state, hello.learner)
        welcome = Welcome(self.shard, state.term, state.clock, step, run_step, len(news), asks)
        effects: list[SyncerEffect] = [Send(hello.learner, welcome, why), *news]
        effects += following.welcome(state, hello.learner)
        if self.state.end_ordered:
            effects.append(Send(hello.learner, Ending(), why))
        if state.phase == "finished":
            effects.append(Send(hello.learner, Finished(), why))
        return effects

    def _said(self, now: float, learner: str, message: Message) -> list[SyncerEffect]:
        state = self.state
        member = state.members.get(learner)
        if member is None:
            return []
        match message:
            case StepReport():
                return syncer_members.reported(state, self.options, now, member, message)
            case Upload(fragment, ask):
                syncer_rounds.announced(state, now, learner, fragment, ask)
                return []  # the shell joins it with its body
            case Copy():
                return []
            case CopyTook():
                return following.copy_took(member, message)
            case CopyDeclined(fragment, attempt, reason):
                spoiled = CopyCorrupt(learner, fragment, attempt, reason)
                return syncer_fill.copy_corrupt(state, now, spoiled)
            case Decline():
                return syncer_rounds.declined(state, self.options, now, learner, message)
            case Holding():
                return syncer_members.holding(state, self.options, now, member, message)
            case Ahead(run_step):
                return syncer_members.ahead(state, self.options, now, member, run_step)
            case Draining():
                effects = draining.leaving(state, self.options, self.owned, member, message)
                return effects + asking.ask_leaver(state, self.options, now, member)
            case Leave(reason):
                gone = {learner: f"left: {reason}"}
                return syncer_members.remove(state, self.options, now, gone, evict=True)
            case _:
                raise AssertionError(f"a learner does not say this to a shard: {message}")

    def _merged(self, now: float, number: int, fragment: int, digest: str) -> list[SyncerEffect]:
        effects = syncer_rounds.merged(self.state, now, number, fragment, digest)
        if effects:
            announcement = self.state.fragments[fragment].announcement(fragment, self.state.clock)
            effects.append(Broadcast(announcement, f"round {number} is merged"))
        return effects

    def _run(self, now: float, why: str) -> list[SyncerEffect]:
        state = self.state
        if state.fill is not None:
            state.clock = max(state.clock, syncer_fill.agreed_clock(state.fill))
        state.phase, state.fill = "running", None
        state.ticked_at = state.previous_tick_at = now
        effects: list[SyncerEffect] = []
        syncer_members.restore_clock(state, self.options)
        for member in state.members.values():
            here = Welcome(self.shard, state.term, state.clock, member.step, member.run_step)
            effects.append(Send(member.learner, here, why))
        for fragment, entry in state.fragments.items():
            effects.append(Broadcast(entry.announcement(fragment, state.clock), why))
        if state.finish_ordered and syncer_fill.has_last_versions(state, self.owned):
            state.phase = "swept"  # in an earlier life
            effects.append(Broadcast(Ending(), "every shard is swept"))
        elif state.end_ordered:
            effects += self._sweep(now, "the budget was spent before")
        return effects

    def _sweep(self, now: float, why: str) -> list[SyncerEffect]:
        state = self.state
        state.phase = "sweeping"
        state.queue.clear()
        state.again.clear()
        state.closing = set(self.owned)
        return [Broadcast(Ending(), why), *syncer_rounds.begin_sweep(state, now)]

    def _move_on(self, now: float) -> list[SyncerEffect]:
        """Everything that follows from the state alone, after any event."""
        state, options = self.state, self.options
        effects: list[SyncerEffect] = []
        if state.fill is not None:
            effects += syncer_fill.progress(state, self.owned, now)
            if state.phase == "restoring" and syncer_fill.complete(state, self.owned):
                effects += self._run(now, "every fragment is restored from what learners hold")
        if state.phase == "running":
            effects += self._advance_clock(now)
        if state.phase in ("running", "sweeping"):
            effects += syncer_rounds.progress(state, options, now)
            opened = -1
            while opened != state.rounds_opened:  # a round may be over as soon as it is open
                opened = state.rounds_opened
                effects += syncer_rounds.open_due(state, options, now)
                effects += syncer_rounds.progress(state, options, now)
        if state.phase == "sweeping" and not state.closing and not state.rounds:
            state.phase = "swept"
            effects.append(Send(COORDINATOR, Swept(), "every fragment had its closing round"))
        if state.phase == "swept" and self.state.finish_ordered:
            state.phase = "finished"
            effects.append(Broadcast(Finished(), "every shard is swept"))
        return effects + self._stop_if_over(now)

    def _stop_if_over(self, now: float) -> list[SyncerEffect]:
        """Finished and nobody is left; or started again when there was nothing to do any more."""
        state = self.state
        overdue = state.stop_at is not None and now >= state.stop_at
        if overdue and now < state.stop_by and self._somebody_fetches(now):
            state.stop_at, overdue = min(now + LINGER_SECONDS, state.stop_by), False
        alone = state.phase == "finished" and not (state.members or state.observers)
        if state.stopped or not (overdue or alone):
            return []
        state.stopped, state.stop_at = True, None
        return [Stop("the run is finished" + (" and everybody has gone" if alone else ""))]

    def _somebody_fetches(self, now: float) -> bool:
        """Whether a learner lacks last copies, and has got one a moment ago."""
        newest = {p: entry.version for p, entry in self.state.fragments.items()}
        return any(
            member.connected
            and now - member.held_at < syncer_rounds.CLOSING_SECONDS
            and any(member.held.get(p) != version for p, version in newest.items())
            for member in self.state.members.values()
        )

    def _advance_clock(self, now: float) -> list[SyncerEffect]:
        """Ticks that come at once (somebody is back, far ahead) are one instant, and said once."""
        state, quorum = self.state, self.options.quorum
        if state.ahead < quorum:
            return self._spent_without_a_tick(now)
        since, steps = state.clock, [member.run_step for member in state.members.values()]
        state.clock = advanced(state.clock, steps, quorum)  # break: clock-goes-back
        state.previous_tick_at, state.ticked_at = state.ticked_at, now
        state.ahead = sum(step > state.clock for step in steps)
        state.find_step_seconds()
        state.find_step_tokens()
        self._note_due(since)
        why = f"{quorum} learners have reached step {state.clock}"
        return [
            ClockAdvanced(state.clock, len(state.members), why),
            Send(COORDINATOR, Progress(state.clock, state.tokens), why),
            *following.tell_demand(state, self.options, now),
            *asking.serve_idle(state, self.options, now),
        ]

    def _spent_without_a_tick(self, now: float) -> list[SyncerEffect]:
        """The budget's last tokens may be of learners that do not move the clock, and then wait.

        Counting them costs as much as there are learners, so only while the clock stalls.
        """
        state, budget = self.state, self.options.budget_tokens
        pause = max(STALLED_SECONDS, 2 * state.step_seconds)
        if budget is None or now - state.ticked_at < pause or state.tokens < budget:
            return []
        why = "the tokens of the budget are trained, and the clock stalls"
        return [Send(COORDINATOR, Progress(state.clock, state.tokens), why)]

    def _note_due(self, since: int) -> None:
        """What the ticks since then have made due, each by the plan that holds at it."""
        state = self.state
        while following.is_due(state, state.clock):
            until = max(since, state.next_revisions[0].tick - 1)
            syncer_rounds.note_due(state, self.options, self._owned_set, since, until)
            state.slots_most = max(state.slots_most, self.options.open_rounds_max)
            self.options, since = following.follow(state, self.options), until
        syncer_rounds.note_due(state, self.options, self._owned_set, since, state.clock)
