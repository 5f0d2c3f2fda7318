"""The state machine of one syncer shard: no I/O, clock, randomness or tensors.

Theory of operation. A shard owns some of the fragments. Learners report every inner step; the K-th
largest of their run steps is the shard's clock t (`clock`). At every unit of t, the fragments that
are due open a round. A round sends a request to each learner, the moment it qualifies, until its
window closes. A worker merges the delivered contributions into a new published copy, which is
announced to all learners (`rounds`). Learners come and go by greetings, leases and incarnations
(`members`). Before the first round, the fragments need a first copy: the run's one named set of
initial weights, or, after a restart, the newest copies that the learners still hold
(`first_copies`). When the budget is reached, a closing sweep gives every fragment one last round.

``TRANSITIONS`` lists the phases of a shard. Every other event is legal in every phase and changes
only members, rounds or the fill.
"""

from __future__ import annotations

import copy
from typing import assert_never

from decoupled_diloco.protocol import (
    first_copies,
    leaving,
    link_measurements,
    members,
    relayed,
    rounds,
    secure_rounds,
    visits,
    weighing,
)
from decoupled_diloco.protocol.clock import advanced
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    Accept,
    Ahead,
    Begin,
    BodyArrived,
    BodyCorrupt,
    Broadcast,
    CheckpointHeard,
    CheckpointOrdered,
    ClockAdvanced,
    Connected,
    Copy,
    CopyArrived,
    CopyCorrupt,
    CopyDeclined,
    CopyTook,
    Decline,
    DiskRead,
    Done,
    Draining,
    Ending,
    EndOrdered,
    Failed,
    Finished,
    FinishOrdered,
    ForgetCheckpoints,
    Gains,
    Heard,
    Hello,
    Holding,
    LayoutSet,
    Leave,
    LoadWeights,
    Lost,
    Made,
    Merge,
    Message,
    PartSaved,
    Progress,
    Received,
    Reject,
    RelayHello,
    Reported,
    Revision,
    SeedNamed,
    Send,
    ShardAdmitted,
    StepReport,
    Stop,
    SumArrived,
    SumClaim,
    SumCorrupt,
    SumOpening,
    SumShares,
    Swept,
    SyncerEffect,
    SyncerEvent,
    TakeCheckpoint,
    Tick,
    Upload,
    WeightsLoaded,
    Welcome,
    name_problem,
    relay_of,
)
from decoupled_diloco.protocol.syncer_state import (
    FragmentState,
    SyncerState,
    credible,
    identity_problem,
    recall,
)

TRANSITIONS: tuple[tuple[str, str, str], ...] = (
    # phase, event, next phase
    ("starting", "ShardAdmitted (not begun)", "empty"),
    ("starting", "ShardAdmitted (begun)", "restoring"),
    ("empty", "SeedNamed", "seeding"),
    ("seeding", "SeedNamed", "seeding"),
    ("seeding", "the seed's copies are invalid", "seeding; reported to the coordinator"),
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
"""Time for which a finished shard waits for learners and observers to fetch the last copies.

For a learner that still receives one after the other, it waits as long as in the closing sweep.
"""


STALLED_SECONDS = 1.0
"""After this time without a tick, the shard reports the tokens of the budget without one."""


class SyncerMachine:
    """The machine of one shard. ``handle`` maps facts to orders; ``check`` asserts invariants."""

    def __init__(self, options: Options, shard: int) -> None:
        self.options = self._settings = options
        self.shard = shard
        self.owned = options.owned(shard)
        self._owned_set = frozenset(self.owned)
        self.state = SyncerState(fragments={p: FragmentState() for p in self.owned})

    def handle(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        """Process one event.

        Args:
            now: Seconds of any clock that never goes back.
            event: What happened.

        Returns:
            The orders, to be executed in this sequence.
        """
        effects = self._dispatch(now, event)
        effects += self._move_on(now)
        due_at = None if isinstance(event, Tick) else self.state.tick_due_at
        self.state.tick_due_at = self._tick_due_at(now, due_at)
        return effects

    def deadline(self) -> float | None:
        """Return when the next ``Tick`` is due; ``None``: the next event suffices."""
        state = self.state
        instants = [state.lease_check_at, state.stop_at]
        instants.append(members.stall_check_at(state, self.options))
        if state.fill is not None:
            instants.append(state.fill.settle_at)
        for round in state.rounds.values():
            instants.append(rounds.deadline(state, self.options, round))
            instants.append(secure_rounds.deadline(round))
        instants += [entry.retry_at for entry in state.fragments.values()]
        return min((instant for instant in instants if instant is not None), default=None)

    def _tick_due_at(self, now: float, due_at: float | None) -> float | None:
        """Return the instant after which the next tick counts as late.

        A deadline may be in the past when it is created (a window of length zero). The tick is then
        due now, and is not late.
        """
        deadline = self.deadline()
        if deadline is None or deadline >= now:
            return deadline
        return now if due_at is None else min(max(deadline, due_at), now)

    def snapshot(self) -> SyncerState:
        """Return a deep copy of the whole state."""
        return copy.deepcopy(self.state)

    def restore(self, state: SyncerState) -> None:
        """Continue from a snapshot."""
        self.state = copy.deepcopy(state)
        self.options = self._settings.revised(self.state.revision)

    def check(self) -> None:
        """Assert every invariant that is visible in one state."""
        state, options = self.state, self.options
        slots = sum(round.holds_slot for round in state.rounds.values())
        slots_most = max(options.open_rounds_max, state.slots_most)
        assert slots <= slots_most, "more rounds hold slots than rule 2 allows"
        assert set(state.fragments) == set(self.owned)
        assert not state.queue.keys() & state.rounds.keys(), "an open round is also queued"
        live = [member.run_step for member in state.members.values()]
        if state.phase == "running":
            assert advanced(state.clock, live, options.clock_quorum) == state.clock, (
                "a tick is missing"
            )
            assert state.ahead == sum(step > state.clock for step in live)
        for fragment, round in state.rounds.items():
            assert round.fragment == fragment
            assert round.base == state.fragments[fragment].version
            assert round.version is None or round.version > round.base, "a version goes back"
            owes = state.fragments[fragment].owes
            assert round.settled_at is not None or all(map(owes, round.awaited))
        state.check_counts()
        for learner, member in state.members.items():
            assert member.learner == learner
            assert state.identities[learner].epoch == member.epoch, "an old incarnation is live"
            under_way = {p for p, entry in state.fragments.items() if learner in entry.asks}
            assert member.under_way == under_way
            hurried = state.phase == "sweeping" or member.leaving_with is not None
            hurried |= options.devices  # all that a device has trained alone is requested at once
            assert hurried or len(under_way) <= slots_most, "too many requests are in progress"
        for entry in state.fragments.values():
            if options.merges_max is not None:
                assert max(entry.delivered.values(), default=0) <= 1, "a learner is merged twice"
                assert max(entry.merges.values(), default=0) <= options.merges_max
            for ask in entry.asks.values():
                assert state.members[ask.learner].epoch == ask.epoch, "an old request is open"

    def _dispatch(self, now: float, event: SyncerEvent) -> list[SyncerEffect]:
        state, options = self.state, self.options
        match event:
            case Tick():
                return members.ticked(state, options, now)
            case DiskRead(copies, memory, exact):
                state.durable = {c.fragment: c for c in copies if c.fragment in self._owned_set}
                state.durable_is_exact = exact
                if memory is not None:
                    recall(state, memory)
                return []
            case Connected(_, RelayHello(relay), _, upstream):
                state.relays[relay] = upstream
                state.site(relay)
                return []
            case Connected(_, hello, connection, relay):
                assert isinstance(hello, Hello)
                return self._greeted(now, connection, hello, relay)
            case Received(peer, message) if peer == COORDINATOR:
                return self._ordered(now, message)
            case Received(learner, message):
                members.renew(state, now, learner)
                return self._receive(now, learner, message)
            case Heard(learners):
                for learner in learners:
                    members.renew(state, now, learner)
                return []
            case Reported(reports):
                return members.reported_together(state, options, now, reports)
            case Lost(peer) if relay_of(peer):
                return relayed.lost(state, options, now, relay_of(peer))
            case Lost(learner):
                return members.disconnected(state, now, learner)
            case BodyArrived():
                members.renew(state, now, event.learner)
                return rounds.body_arrived(state, options, now, event)
            case BodyCorrupt():
                return rounds.body_corrupt(state, options, now, event)
            case SumArrived():
                return relayed.sum_arrived(state, options, now, event)
            case SumCorrupt():
                return relayed.sum_corrupt(state, options, now, event)
            case CopyArrived():
                return first_copies.copy_arrived(state, event)
            case CopyCorrupt():
                return first_copies.copy_corrupt(state, now, event)
            case CheckpointHeard(number):
                return self._take_checkpoint(number, "a message carries its number")
            case Done() | Failed():
                return self._answered(now, event)
            case _:
                assert_never(event)

    def _answered(self, now: float, event: Done | Failed) -> list[SyncerEffect]:
        state = self.state
        match event:
            case Done(Merge(number, fragment), Made(digest)):
                return self._merged(now, number, fragment, digest)
            case Failed(Merge(number, fragment), reason):
                return rounds.merge_failed(state, self.options, now, number, fragment, reason)
            case Done(LoadWeights(), WeightsLoaded(digests)):
                return first_copies.weights_loaded(state, digests)
            case Done(TakeCheckpoint(number), Made(digest, nbytes)):
                saved = PartSaved(number, digest, nbytes)
                return [Send(COORDINATOR, saved, "its part is on the disk")]
            case Failed(TakeCheckpoint(number), reason):
                return [Send(COORDINATOR, PartSaved(number, "", 0, reason), reason)]
            case _:
                raise AssertionError(f"unexpected answer at a shard: {event}")

    def _take_checkpoint(self, number: int, why: str) -> list[SyncerEffect]:
        """Save its part of a checkpoint. Before and after the rounds, a shard has none."""
        if number <= self.state.checkpoint:
            return []
        self.state.checkpoint = number
        return [TakeCheckpoint(number, why)] if self.state.phase == "running" else []

    def _ordered(self, now: float, message: Message) -> list[SyncerEffect]:
        state = self.state
        match message:
            case ShardAdmitted():
                if state.phase == "swept":
                    return [Send(COORDINATOR, Swept(), "the coordinator may not have received it")]
                return first_copies.term_granted(state, self.owned, now, message)
            case LayoutSet():
                return []
            case SeedNamed():
                return first_copies.seed_named(state, self.owned, message)
            case Begin(attempt):
                if state.phase != "ready" or state.fill is None or state.fill.attempt != attempt:
                    return []
                return self._run(now, "every shard holds its share of the initial weights")
            case CheckpointOrdered(number, keep):
                forget = ForgetCheckpoints(keep, number, "newer ones are complete")
                return [forget, *self._take_checkpoint(number, "the coordinator orders it")]
            case Revision():
                return link_measurements.pass_on(state, message)
            case EndOrdered():
                if self.state.end_ordered:
                    return []
                self.state.end_ordered = True
                return [] if state.phase != "running" else self._sweep(now, "the budget is reached")
            case FinishOrdered():
                self.state.finish_ordered = True
                first_copies.all_are_swept(state, self.owned, now)
                if state.phase != "finished" and state.stop_at is None:
                    state.stop_at = now + LINGER_SECONDS
                    state.stop_by = now + rounds.COPY_SECONDS
                return []
            case _:
                raise AssertionError(f"unexpected message from the coordinator: {message}")

    def _greeted(self, now: float, connection: int, hello: Hello, relay: str) -> list[SyncerEffect]:
        state = self.state
        unnamed = name_problem(hello.learner)
        if unnamed:
            return [Reject(connection, unnamed, True, unnamed)]
        if hello.role == "observer":
            state.observers.add(hello.learner)
            why = "an observer is not counted"
            return [Accept(connection, hello.learner, 0, why), *self._welcome(hello, 0, 0, why)]
        known = state.identities.get(hello.learner)
        problem = identity_problem(known, hello.epoch, hello.nonce)
        problem = problem or members.steps_problem(state, hello)
        if problem is not None:
            return [Reject(connection, f"{hello.learner}: {problem}", True, problem)]
        effects: list[SyncerEffect] = []
        member = state.members.get(hello.learner)
        why = "reconnected within its lease"
        if member is not None and member.epoch == hello.epoch:
            # Requests may be lost with the old connection; uploads in progress continue.
            why_void = "it reconnected"
            member.connected = False  # nothing may be sent before it is accepted
            void = relayed.rerouted(state, member, relay)
            valid = tuple(name for name in hello.asks if name not in void)
            effects += rounds.forget_asks(state, self.options, now, hello.learner, why_void, valid)
            # break: reconnected-holder-not-asked
            effects += first_copies.member_gone(state, hello.learner, why_void)
        if member is not None and member.epoch < hello.epoch:  # break: earlier-epoch-stays
            why_gone = "a newer incarnation has joined"
            gone = {hello.learner: why_gone}
            # No eviction: `Accept` closes the old connection of this name.
            effects += members.remove(state, self.options, now, gone, evict=False)
            member = None
        if state.fill is not None and state.phase == "restoring":
            state.fill.clocks[hello.learner] = hello.clock
        if member is None:
            why = "joined" if hello.step == 0 else "came back"
            member = members.admit(state, self.options, now, hello)
        member.connected, member.relay = True, relay
        member.held = credible(hello.held, self._owned_set)
        member.again = {each.fragment: each.again for each in hello.held}
        member.is_fresh = hello.fresh
        since = member.step
        members.advance_step(state, member, now, hello.step)
        members.renew(state, now, hello.learner)
        # The welcome precedes all other messages: it gives the learner its run step.
        effects.append(Accept(connection, hello.learner, hello.epoch, why))
        welcome, *news = self._welcome(hello, member.step, member.run_step, why)
        # Before the news: a device answers from the version that it holds (rule 23).
        trained = visits.trained(self.options, hello, self._owned_set)
        asked = rounds.ask_returned(state, self.options, now, member, trained)
        effects += [welcome, *asked, *news]
        effects += first_copies.member_connected(state, self.owned, now, member)
        for round in state.rounds.values():
            effects += rounds.ask_if_qualified(state, self.options, now, round, member)
        effects += rounds.due_by_own_steps(state, self.options, now, member, since)
        return effects + rounds.serve(state, self.options, now, member)

    def _welcome(self, hello: Hello, step: int, run_step: int, why: str) -> list[SyncerEffect]:
        state = self.state
        held = credible(hello.held, self._owned_set)
        news: list[SyncerEffect] = []
        if state.phase in ("running", "sweeping", "swept", "finished"):
            for fragment, entry in state.fragments.items():
                if entry.version is not None and held.get(fragment) != entry.version:
                    missed = visits.missed(
                        self.options, fragment, entry, held.get(fragment), state.clock
                    )
                    news += [Send(hello.learner, each, why) for each in missed]
        asks = rounds.open_asks(state, hello.learner)
        welcome = Welcome(self.shard, state.term, state.clock, step, run_step, len(news), asks)
        effects: list[SyncerEffect] = [Send(hello.learner, welcome, why), *news]
        effects += link_measurements.welcome(state, hello.learner)
        if self.state.end_ordered:
            effects.append(Send(hello.learner, Ending(), why))
        if state.phase == "finished":
            effects.append(Send(hello.learner, Finished(), why))
        return effects

    def _receive(self, now: float, learner: str, message: Message) -> list[SyncerEffect]:
        state = self.state
        if isinstance(message, Gains):
            return weighing.scored(state, self.options, learner, message)
        member = state.members.get(learner)
        if member is None:
            return []
        match message:
            case StepReport():
                return members.reported(state, self.options, now, member, message)
            case Upload(fragment, ask):
                rounds.announced(state, now, learner, fragment, ask)
                return []  # the shell combines it with the payload into `BodyArrived`
            case Copy():
                return []
            case CopyTook():
                return link_measurements.copy_took(member, message)
            case CopyDeclined(fragment, attempt, reason):
                corrupt = CopyCorrupt(learner, fragment, attempt, reason)
                return first_copies.copy_corrupt(state, now, corrupt)
            case SumClaim() | SumShares() | SumOpening():
                return secure_rounds.answered(state, self.options, now, learner, message)
            case Decline():
                return rounds.declined(state, self.options, now, learner, message)
            case Holding():
                return members.holding(state, self.options, now, member, message)
            case Ahead(run_step):
                return members.ahead(state, self.options, now, member, run_step)
            case Draining():
                effects = leaving.leaving(state, self.options, self.owned, member, message)
                return effects + rounds.ask_leaver(state, self.options, now, member)
            case Leave(reason):
                gone = {learner: f"left: {reason}"}
                return members.remove(state, self.options, now, gone, evict=True)
            case _:
                raise AssertionError(f"unexpected message from a learner: {message}")

    def _merged(self, now: float, number: int, fragment: int, digest: str) -> list[SyncerEffect]:
        effects = rounds.merged(self.state, self.options, now, number, fragment, digest)
        if effects:
            announcement = self.state.fragments[fragment].announcement(fragment, self.state.clock)
            effects.append(Broadcast(announcement, f"round {number} is merged"))
        return effects

    def _run(self, now: float, why: str) -> list[SyncerEffect]:
        state = self.state
        if state.fill is not None:
            state.clock = max(state.clock, first_copies.agreed_clock(state.fill))
        state.phase, state.fill = "running", None
        state.ticked_at = state.previous_tick_at = now
        effects: list[SyncerEffect] = []
        members.restore_clock(state, self.options)
        for member in state.members.values():  # the restored clock may have moved run steps
            here = Welcome(self.shard, state.term, state.clock, member.step, member.run_step)
            effects.append(Send(member.learner, here, why))
        for fragment, entry in state.fragments.items():
            effects.append(Broadcast(entry.announcement(fragment, state.clock), why))
        if state.finish_ordered and first_copies.has_last_versions(state, self.owned):
            state.phase = "swept"  # an earlier process of this shard finished the sweep
            effects.append(Broadcast(Ending(), "every shard has been swept"))
        elif state.end_ordered:
            effects += self._sweep(now, "the budget was reached before")
        return effects

    def _sweep(self, now: float, why: str) -> list[SyncerEffect]:
        state = self.state
        state.phase = "sweeping"
        state.queue.clear()
        state.again.clear()
        state.closing = set(self.owned)
        return [Broadcast(Ending(), why), *rounds.begin_sweep(state, self.options, now)]

    def _move_on(self, now: float) -> list[SyncerEffect]:
        """Execute everything that follows from the state alone, after any event."""
        state, options = self.state, self.options
        effects: list[SyncerEffect] = []
        if state.fill is not None:
            effects += first_copies.progress(state, self.owned, now)
            if state.phase == "restoring" and first_copies.complete(state, self.owned):
                effects += self._run(now, "every fragment is restored")
        if state.phase == "running":
            effects += self._advance_clock(now)
        if state.phase in ("running", "sweeping"):
            progress = secure_rounds.progress if options.secure else rounds.progress
            effects += progress(state, options, now)
            opened = -1
            while opened != state.rounds_opened:  # a round may end at once and free its slot
                opened = state.rounds_opened
                effects += rounds.open_due(state, options, now)
                effects += progress(state, options, now)
        if state.phase == "sweeping" and not state.closing and not state.rounds:
            state.phase = "swept"
            effects.append(Send(COORDINATOR, Swept(), "every fragment has had its closing round"))
        if state.phase == "swept" and self.state.finish_ordered:
            state.phase = "finished"
            effects.append(Broadcast(Finished(), "every shard has been swept"))
        return effects + self._stop_if_over(now)

    def _stop_if_over(self, now: float) -> list[SyncerEffect]:
        """Stop once finished and alone, or once a restarted shard has nothing left to do."""
        state = self.state
        overdue = state.stop_at is not None and now >= state.stop_at
        if overdue and now < state.stop_by and self._is_fetched_from(now):
            state.stop_at, overdue = min(now + LINGER_SECONDS, state.stop_by), False
        alone = state.phase == "finished" and not (state.members or state.observers)
        if state.stopped or not (overdue or alone):
            return []
        state.stopped, state.stop_at = True, None
        return [Stop("the run is finished" + (" and all learners have left" if alone else ""))]

    def _is_fetched_from(self, now: float) -> bool:
        """Return whether a learner lacks last copies and has just received one."""
        newest = {p: entry.version for p, entry in self.state.fragments.items()}
        return any(
            member.connected
            and now - member.held_at < rounds.CLOSING_SECONDS
            and any(member.held.get(p) != version for p, version in newest.items())
            for member in self.state.members.values()
        )

    def _advance_clock(self, now: float) -> list[SyncerEffect]:
        """Advance the clock; several ticks at once count as one advance.

        This happens when a learner that is far ahead comes back.
        """
        state, quorum = self.state, self.options.clock_quorum
        # `ahead` is counted incrementally, so that most reports cost constant time here.
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
            *link_measurements.report_demand(state, self.options, now),
            *rounds.serve_idle(state, self.options, now),
        ]

    def _spent_without_a_tick(self, now: float) -> list[SyncerEffect]:
        """Report a spent token budget while the clock is stalled.

        The last tokens of the budget may be from learners that do not move the clock and then wait.
        Counting tokens costs time proportional to the learners, so it is done only while the clock
        stalls.
        """
        state, budget = self.state, self.options.max_tokens
        pause = max(STALLED_SECONDS, 2 * state.step_seconds)
        if budget is None or now - state.ticked_at < pause or state.tokens < budget:
            return []
        why = "the token budget is reached while the clock is stalled"
        return [Send(COORDINATOR, Progress(state.clock, state.tokens), why)]

    def _note_due(self, since: int) -> None:
        """Queue what the ticks since then made due, each by the revision that applies at it."""
        state = self.state
        while link_measurements.is_due(state, state.clock):
            until = max(since, state.next_revisions[0].tick - 1)
            rounds.note_due(state, self.options, self._owned_set, since, until)
            state.slots_most = max(state.slots_most, self.options.open_rounds_max)
            self.options, since = link_measurements.follow(state, self.options), until
        rounds.note_due(state, self.options, self._owned_set, since, state.clock)
