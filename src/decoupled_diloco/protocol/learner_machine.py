"""The state machine of one learner or observer: no I/O, clock, randomness or tensors.

Theory of operation. Between two step boundaries, the background thread may receive announcements of
published copies and fetch them; these copies are *staged*. At a boundary, the learner first applies
what is staged (rule 7). It then takes the snapshots that requests wait for or that will be due
before the next boundary (rule 4), and reports the step. A request is answered at once if a snapshot
for its tick exists, and otherwise at the next boundary. Nothing here ever waits, except ``Hold``
for the synchronous baselines.

``TRANSITIONS`` lists the states of one fragment at the learner. ``held`` is the version with which
the parameters were last aligned; ``steps`` counts the inner steps since.
"""

from __future__ import annotations

import copy
from typing import assert_never

from decoupled_diloco.protocol import copies as fragments
from decoupled_diloco.protocol import leaving, link_measurements, recovery, visits
from decoupled_diloco.protocol.copies import due_ahead
from decoupled_diloco.protocol.features import checkpoint as checkpoints
from decoupled_diloco.protocol.features import partitions as leases
from decoupled_diloco.protocol.features import state_transfer
from decoupled_diloco.protocol.learner_state import FragmentView, LearnerState, Sent, ShardView
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    NOTHING_NEW,
    Ahead,
    Asking,
    Began,
    BodyEncoded,
    CheckpointHeard,
    CheckpointOrdered,
    ChunkArrived,
    Connected,
    CopyDeclined,
    CopyState,
    CopyWanted,
    DataRefused,
    Decline,
    Done,
    DrainAsked,
    DrainRefused,
    Ending,
    EndTraining,
    Expelled,
    Failed,
    Fetch,
    FetchState,
    Finished,
    Gains,
    GainsMeasured,
    GivenUp,
    Hello,
    Hold,
    LearnerEffect,
    LearnerEvent,
    LeasesGiven,
    Lost,
    Made,
    Message,
    Note,
    Outcome,
    Paused,
    PlaceGiven,
    PlaceLost,
    PrivacySpent,
    Published,
    Pull,
    RandomDrawn,
    RandomNumbers,
    Receipt,
    Received,
    Refusal,
    RelayState,
    Release,
    Revision,
    Role,
    RunOver,
    SameData,
    Send,
    SendBody,
    SendCopy,
    Shifted,
    StateCopied,
    StepFinished,
    StepReport,
    SumStep,
    TakeCheckpoint,
    TakeStep,
    Tick,
    Upload,
    VisitEnded,
    Welcome,
    shard_of,
    shard_peer,
)
from decoupled_diloco.protocol.same_data import same_data

TRANSITIONS: tuple[tuple[str, str, str], ...] = (
    # state of the newest known version, event, consequence
    ("nothing held", "Published", "fetch the whole"),
    ("held = base", "Published", "fetch the difference"),
    ("held = base", "Published (renamed)", "relabel"),
    ("held ≠ base", "Published", "fetch the whole; rebase when applied, or drop if diverged"),
    ("fetching", "Published (newer)", "remember it; decide after the fetch"),
    ("fetching", "Done(Fetch)", "staged"),
    ("fetching", "Failed(Fetch)", "fetch the whole, later"),
    ("staged", "step boundary", "apply: held, counters by rule 7"),
    ("staged, pulled", "step boundary", "if not too late: send the payload first, then apply"),
    ("snapshot for the tick", "Pull of held", "send the payload"),
    ("no snapshot", "Pull of held", "snapshot and send at the next boundary with a step"),
    ("held < base", "Pull", "keep it until the copy is applied"),
    ("held > base", "Pull", "decline: behind"),
    ("held = base, diverged", "Pull", "decline: its training will be dropped"),
)

_MAY_BE_MERGED = "its outcome was lost with the connection: it may be merged"


UNFIT = (
    "nothing is merged from this learner until its weights are finite and of the usual size: look "
    "for NaN in its loss and optimizer state, lower the learning rate or clip gradients, and "
    "restart it"
)
DROPPED: dict[str, str] = {
    "unfit": "its training was too large or not finite",
    "discarded": "its contribution had weight 0",
}
"""Why the training in a refused contribution is dropped with the next copy, by verdict."""


DISCARDED = "'ddiloco status' shows since when and why"


REFUSED = "if this continues, 'ddiloco explain' shows the outcome of each contribution"


def is_worth_a_word(count: int, first: int) -> bool:
    """Return whether to log the count-th occurrence of an event, ever more rarely.

    >>> [count for count in range(1, 1000) if is_worth_a_word(count, 3)]
    [3, 30, 300]
    """
    while count > first and count % 10 == 0:
        count //= 10
    return count == first


class LearnerMachine:
    """The protocol of one learner; with ``role="observer"``, it only follows published copies."""

    def __init__(
        self, options: Options, learner: str, epoch: int, nonce: str, role: Role = "learner"
    ) -> None:
        self.options = self._settings = options
        self.learner = learner
        self.epoch = epoch
        self.nonce = nonce
        self.role: Role = role
        self.state = LearnerState(
            fragments=[FragmentView() for _ in range(options.fragments)],
            shards=[ShardView() for _ in range(options.shards)],
            place=0 if options.cohort is not None and role == "learner" else None,
        )

    def handle(self, now: float, event: LearnerEvent) -> list[LearnerEffect]:
        """Process one event; see `SyncerMachine.handle`."""
        effects = self._dispatch(now, event)
        if self.options.adapt is not None:
            link_measurements.fetches_begin(self.state, now, effects)
        if not self.state.ready:
            effects += recovery.ready_if_complete(self.state, self.options, now)
        return effects

    def _dispatch(self, now: float, event: LearnerEvent) -> list[LearnerEffect]:
        match event:
            case Tick():
                effects = fragments.retry(self.state, self.options, now)
                return effects + state_transfer.patience_over(self.state, now)
            case Began():
                return recovery.began(self.state, self.options, now, event)
            case StepFinished(tokens, batches):
                return self._stepped(now, tokens) + self._trained(batches)
            case Paused():
                return self._boundary(now) + self._hold_or_release()
            case DrainAsked(why):
                return leaving.stop_requested(self.state, self.options, why)
            case GainsMeasured(step, gains):
                return self._report_gains(Gains(step, gains))
            case VisitEnded():
                return visits.visit_ended(self.state)
            case RandomDrawn(states):
                return [Send(COORDINATOR, RandomNumbers(states), "to detect equal seeds")]
            case Connected(peer) | Received(peer) | Lost(peer) if peer == COORDINATOR:
                return self._of_coordinator(now, event)
            case Connected(peer):
                return self._linked(shard_of(peer))
            case Received(peer, message):
                return self._receive(now, shard_of(peer), message)
            case Lost(peer):
                return self._unlinked(shard_of(peer))
            case BodyEncoded(fragment, ask, digest):
                return self._encoded(fragment, ask, digest)
            case Done():
                return self._done(now, event)
            case Failed():
                return self._failed(now, event)
            case ChunkArrived():
                return state_transfer.chunk_arrived(self.state, now, event)
            case CheckpointHeard(number):
                return checkpoints.heard(self.state, number)
            case _:
                return leases.handle(self.state, event)

    def _done(self, now: float, event: Done) -> list[LearnerEffect]:
        match event:
            case Done(Fetch(fragment=fragment, version=version)):
                took = link_measurements.copy_arrived(
                    self.state, self.options, now, fragment, version
                )
                return took + fragments.fetched(self.state, self.options, fragment, version)
            case Done(TakeCheckpoint(number), Made(digest, nbytes)):
                return checkpoints.saved(number, digest, nbytes)
            case Done(CopyState(learner, attempt), StateCopied() as copy):
                return state_transfer.copied(self.state, learner, attempt, copy)
            case Done(FetchState(attempt=attempt)):
                return state_transfer.state_arrived(self.state, attempt)
            case _:
                raise AssertionError(f"unexpected answer at a learner: {event}")

    def _failed(self, now: float, event: Failed) -> list[LearnerEffect]:
        reason = event.reason
        match event.order:
            case Fetch(fragment=fragment, version=version):
                return fragments.fetch_failed(
                    self.state, self.options, now, fragment, version, reason
                )
            case SendBody(fragment=fragment, ask=ask):
                return self._upload_failed(fragment, ask, f"upload failed: {reason}")
            case TakeStep(_, fragment, ask, step):
                text = f"step {step!r} of a secure sum of fragment {fragment} fails"
                return [Note(text, reason, warns=True), *self._upload_failed(fragment, ask, reason)]
            case SendCopy(shard, fragment, attempt):
                return [Send(shard_peer(shard), CopyDeclined(fragment, attempt, reason), reason)]
            case TakeCheckpoint(number):
                return checkpoints.not_saved(number, reason)
            case CopyState(learner, attempt) | RelayState(learner, attempt):
                return state_transfer.not_copied(self.state, learner, attempt, reason)
            case FetchState(attempt=attempt):
                return state_transfer.state_failed(self.state, now, attempt, reason)
            case _:
                raise AssertionError(f"unexpected answer at a learner: {event}")

    def deadline(self) -> float | None:
        """Return when the next ``Tick`` is due, or ``None`` if none is needed."""
        instants = [self.state.fragments[index].retry_at for index in self.state.retrying]
        if not self.state.ready:
            instants.append(recovery.deadline(self.state))
        return min((instant for instant in instants if instant is not None), default=None)

    def snapshot(self) -> LearnerState:
        """Return a deep copy of the whole state."""
        return copy.deepcopy(self.state)

    def restore(self, state: LearnerState) -> None:
        """Continue from a snapshot."""
        self.state = copy.deepcopy(state)
        self.options = self._settings.revised(self.state.revision)

    @property
    def global_step(self) -> int:
        """The monotone maximum of the shards' clocks and this learner's run steps."""
        steps = [s.clock for s in self.state.shards]
        steps += [s.offset + self.state.step for s in self.state.shards if s.offset is not None]
        return max(steps)

    def check(self) -> None:
        """Assert every invariant that is visible in one state."""
        self.state.check_fragments()
        assert not self.state.holding or self.options.wait == "at_overlap"

    def _stepped(self, now: float, tokens: int) -> list[LearnerEffect]:
        state = self.state
        if state.stepped_at is not None:
            state.step_seconds.update(now - state.stepped_at)
        state.stepped_at = now
        state.step += 1
        state.tokens += tokens
        self._owe()
        # The boundary comes first: it may discard tokens, which the report then includes.
        effects = self._boundary(now)
        report = StepReport(
            state.step,
            state.tokens,
            state.step_seconds.value or 0.0,
            state.discarded_tokens,
            fresh=state.is_fresh,
        )
        for shard, link in enumerate(state.shards):
            if link.linked and link.offset is not None and self.role == "learner":
                effects.append(Send(shard_peer(shard), report, "a step is finished"))
        if state.state_requests:
            effects += state_transfer.at_boundary(state, now)
        return effects + self._hold_or_release()

    def _boundary(self, now: float) -> list[LearnerEffect]:
        """Return the orders of a boundary: a checkpoint part, or applying copies and snapshots."""
        while link_measurements.is_due(self.state, self.global_step):
            self.options = link_measurements.follow(self.state, self.options)
        state, options = self.state, self.options
        effects = checkpoints.at_boundary(state, self.role)
        if state.checkpoint_just_taken:
            return effects  # the shell sends `Paused` once the part is saved
        if state.ending and not state.ended:
            state.ended = True
            effects.append(EndTraining("the run's budget is reached"))
        for index in sorted(state.attention) if state.attention else ():
            view = state.fragments[index]
            if view.staged is not None and fragments.may_apply(state, options, view):
                # Once the copy is applied, a request against the old base cannot be answered.
                if fragments.answers_first(state, options, view):
                    effects += fragments.snapshot_if_due(state, options, index, view, None)
                effects += fragments.apply_staged(state, options, index, view)
        if options.devices:
            for index, view in enumerate(state.fragments):
                effects += fragments.start_again(state, options, index, view)
        if options.secure:
            for index, view in enumerate(state.fragments):
                effects += fragments.drop_burnt(state, options, index, view)
        ahead = due_ahead(self.state, self.options, now) if self.role == "learner" else {}
        if ahead or state.attention:
            for index in sorted(state.attention | ahead.keys()):
                view = state.fragments[index]
                if self.role == "learner":
                    effects += fragments.snapshot_if_due(
                        state, options, index, view, ahead.get(index)
                    )
            state.trim_attention()
        if self.role == "learner" and self._has_last_copies():
            effects += fragments.drop_unmerged(state, options)
        return effects + self._over_if_done()

    def _over_if_done(self) -> list[LearnerEffect]:
        """Report the end once every shard has finished and its last copies are held."""
        state = self.state
        if state.over or not self._has_last_copies():
            return []
        if self.role == "learner" and any(map(state.has_unmerged, state.fragments)):
            return []  # the next boundary drops the rest (`drop_unmerged`)
        state.over = True
        return [RunOver("every shard has finished")]

    def _has_last_copies(self) -> bool:
        state = self.state
        if not all(link.finished for link in state.shards):
            return False
        return all(
            view.latest is None
            or view.latest.version == view.held
            or not state.shards[self.options.owner(index)].linked
            for index, view in enumerate(state.fragments)
        )

    def _sent(self, fragment: int, ask: Asking) -> Sent | None:
        view = self.state.fragments[fragment]
        return view.sent if view.sent is not None and view.sent.ask == ask else view.late.get(ask)

    def _encoded(self, fragment: int, ask: Asking, digest: str) -> list[LearnerEffect]:
        sent = self._sent(fragment, ask)
        if sent is None:
            return []
        sent.digest = digest
        return [self._announce(fragment, sent)]

    def _announce(self, fragment: int, sent: Sent) -> LearnerEffect:
        taken = sent.taken
        upload = Upload(fragment, sent.ask, taken.base, taken.steps, taken.tokens, sent.digest)
        return Send(shard_peer(self.options.owner(fragment)), upload, "its upload has started")

    def _upload_failed(self, fragment: int, ask: Asking, why: str) -> list[LearnerEffect]:
        """Decline the request. The payload may have arrived anyway; the outcome decides."""
        sent = self._sent(fragment, ask)
        if sent is not None:
            sent.failed = True
        return [
            Send(shard_peer(self.options.owner(fragment)), Decline(fragment, ask, False, why), why)
        ]

    def _of_coordinator(
        self, now: float, event: Connected | Received | Lost
    ) -> list[LearnerEffect]:
        match event:
            case Connected():
                effects = state_transfer.reconnected(self.state, now)
                effects += visits.present(self.state, self.options)
                return effects + self._coordinated(linked=True)
            case Received(_, message):
                return self._receive_from_coordinator(now, message)
            case Lost():
                return self._coordinated(linked=False)
            case _:
                assert_never(event)

    def _receive_from_coordinator(self, now: float, message: Message) -> list[LearnerEffect]:
        state = self.state
        match message:
            case CheckpointOrdered():
                return checkpoints.ordered(state, message)
            case SameData():
                return self._same_data(message)
            case PlaceGiven() | PlaceLost():
                visits.placed(state, message)
                return self._fetch_missed()
            case LeasesGiven() | DataRefused():
                return [] if state.data is None else leases.answered(state.data, message)
            case _:
                return state_transfer.receive(state, now, message)

    def _coordinated(self, *, linked: bool) -> list[LearnerEffect]:
        state = self.state
        state.coordinated = linked
        return [] if state.data is None else leases.link(state.data, state.step, linked=linked)

    def _trained(self, batches: int) -> list[LearnerEffect]:
        step, data, period = self.state.step, self.state.data, self.options.period
        return [] if data is None else leases.stepped(data, step, batches, period)

    def _merged(self, view: FragmentView, step: int) -> list[LearnerEffect]:
        view.merged_step = max(view.merged_step, step)
        data = self.state.data
        return (
            []
            if data is None
            # break: batches-durable-too-early
            else leases.merged(data, self.state.step, leases.durable_step(self.state))
        )

    def _owe(self) -> None:
        """With ``wait``, mark what is due at this step: it must be back before step + τ ends."""
        if self.options.wait != "at_overlap":
            return
        for shard, link in enumerate(self.state.shards):
            if not link.linked or link.offset is None:
                continue
            for index in self.options.due(link.offset + self.state.step):
                view = self.state.fragments[index]
                if self.options.owner(index) == shard and view.held is not None:
                    view.owed_at = self.state.step

    def _hold_or_release(self) -> list[LearnerEffect]:
        if self.options.wait == "never":
            return []  # break: learner-waits-for-link
        owed = self._owed()
        if owed and not self.state.holding:
            self.state.holding = True
            return [Hold(f"fragments {owed} have not arrived yet")]
        return self._release_if_free("all fragments have arrived")

    def _align_run_steps(self, besides: int | None = None) -> list[LearnerEffect]:
        """If learners wait for one another, use the largest run step for all shards.

        A shard that was away counts from another step than the rest. Two learners, each ahead of
        the other at a different shard, would then wait for each other forever. A shard that has
        just shifted its learners (``besides``) also receives `Ahead`, because it may have shifted
        before it received the last one.
        """
        if not self.options.in_step or self.role != "learner":  # break: steps-counted-per-shard
            return []
        known = {n: link for n, link in enumerate(self.state.shards) if link.offset is not None}
        furthest = max(link.offset or 0 for link in known.values())
        effects: list[LearnerEffect] = []
        for shard, link in known.items():
            if link.offset != furthest or shard == besides:
                effects += self._move_up(shard, furthest)
        return effects

    def _move_up(self, shard: int, offset: int) -> list[LearnerEffect]:
        link = self.state.shards[shard]
        if link.offset != offset:
            link.offset = offset
            for view in self._fragments_of(shard):
                view.owed_at = None  # the run step has changed: what was due before is not now
        ahead = Ahead(offset + self.state.step)
        notice = Send(shard_peer(shard), ahead, "it is further ahead at another shard")
        return [notice] if link.linked else []

    def _owed(self) -> list[int]:
        if self.options.wait != "at_overlap" or self.state.ended:
            return []
        return [
            index
            for index, view in enumerate(self.state.fragments)
            if view.owed_at is not None and self.state.step >= view.owed_at + self.options.overlap
        ]

    def _release_if_free(self, why: str) -> list[LearnerEffect]:
        # At the end, stay held until the boundary has reported it: no step may follow.
        ends = self.state.ending and not self.state.ended
        if self.state.holding and not self._owed() and not ends:
            self.state.holding = False
            return [Release(why)]
        return []

    def _report_gains(self, message: Gains) -> list[LearnerEffect]:
        """Send measured gains to every shard; each decides about its own fragments."""
        linked = [shard for shard, link in enumerate(self.state.shards) if link.linked]
        return [Send(shard_peer(shard), message, "learners were scored") for shard in linked]

    def _linked(self, shard: int) -> list[LearnerEffect]:
        link = self.state.shards[shard]
        link.linked = True
        held = tuple(
            view.holding(index)
            for index, view in enumerate(self.state.fragments)
            if view.held is not None and self.options.owner(index) == shard
        )
        hello = Hello(
            learner=self.learner,
            epoch=self.epoch,
            nonce=self.nonce,
            role=self.role,
            step=self.state.step,
            clock=link.clock,
            run_step=None if link.offset is None else max(0, link.offset + self.state.step),
            held=held,
            # A failed upload is not listed, so that the shard closes its request.
            asks=tuple(sent.ask for _, sent in self._unresolved(shard) if not sent.failed),
            trained=visits.trained_fragments(self.state, self.options, shard),
            fresh=self.state.is_fresh,
        )
        return [Send(shard_peer(shard), hello, "a connection is open")]

    def _unlinked(self, shard: int) -> list[LearnerEffect]:
        self.state.shards[shard].linked = False
        for fragment in self._fragments_of(shard):
            fragment.pull = fragment.owed_at = None
        effects = self._release_if_free("the link to the shard is lost")
        return effects + self._over_if_done()

    def _unresolved(self, shard: int) -> list[tuple[int, Sent]]:
        """Return each contribution sent to a shard that has no outcome yet, with its fragment."""
        found = []
        for index in self.options.owned(shard):
            view = self.state.fragments[index]
            own = [] if view.sent is None or view.sent.version is not None else [view.sent]
            found += [(index, sent) for sent in (*view.late.values(), *own)]
        return found

    def _receive(self, now: float, shard: int, message: Message) -> list[LearnerEffect]:
        link = self.state.shards[shard]
        unheard_steps, link.last_message_step = (
            self.state.step - link.last_message_step,
            self.state.step,
        )
        match message:
            case Welcome():
                return self._welcomed(now, shard, message, unheard_steps)
            case DrainRefused():
                link.dismissed = True
                return []
            case Refusal(reason, final):
                if not final:
                    return [Note(f"shard {shard} refuses for now: {reason}", "retrying")]
                return [Expelled(reason, f"shard {shard} refuses for good")]
            case Pull():
                self._observe_clock(now, link, message.tick)
                return self._pulled(message)
            case SumStep(fragment, ask, step):
                sent = self._sent(fragment, ask)
                if sent is None or sent.failed or sent.burnt:
                    return []  # its outcome was abandoned meanwhile
                sent.opened |= step == "open"
                return [TakeStep(shard, fragment, ask, step, "its shard is ready for this step")]
            case Outcome():
                return self._outcome(message)
            case Receipt(fragment, ask):
                return self._kept(fragment, ask)
            case GivenUp(fragment, reason):
                self.state.fragments[fragment].owed_at = None  # break: abandoned-round-ignored
                return self._release_if_free(f"the round of fragment {fragment}: {reason}")
            case Published():
                self._observe_clock(now, link, message.clock)
                effects = fragments.published(self.state, self.options, message)
                if self.state.ready:
                    return effects
                return effects + state_transfer.request_if_known(self.state, now)
            case Shifted(by):
                if link.offset is None:
                    return []
                link.offset += by
                return [*self._align_run_steps(shard), *self._release_if_free("the clock shifts")]
            case Revision():
                link_measurements.record(self.state, message)
                return []
            case CopyWanted():
                return fragments.copy_wanted(self.state, self.options, shard, message)
            case PrivacySpent(fragment, reason):
                return self._privacy_spent(fragment, reason)
            case SameData():
                return self._same_data(message)
            case Ending():
                self.state.ending = True
                # A learner that holds ends at its present boundary, without a step.
                return self._fetch_missed()
            case Finished():
                link.finished = True
                return self._over_if_done()
            case _:
                raise AssertionError(f"unexpected message from a shard: {message}")

    def _kept(self, fragment: int, ask: Asking) -> list[LearnerEffect]:
        """Process that a contribution is folded. If rounds are synchronous, its outcome counts."""
        view, sent = self.state.fragments[fragment], self._sent(fragment, ask)
        if sent is None or self.options.late == "drop":
            return []
        visits.contributed(self.state, sent)
        if sent is view.sent:
            sent.kept = True
            return []
        del view.late[ask]  # its steps have left the parameters
        return fragments.settle(self.options, fragment, sent, "it is folded", gone=True)

    def _fetch_missed(self) -> list[LearnerEffect]:
        """Fetch what a device has not fetched so far, because it waited or trained alone."""
        if not self.options.devices:
            return []
        effects: list[LearnerEffect] = []
        for index in range(len(self.state.fragments)):
            effects += fragments.want(self.state, self.options, index)
        return effects

    def _same_data(self, message: SameData) -> list[LearnerEffect]:
        """Log the warning once per learner, although every shard may send it."""
        if message.other in self.state.twins:
            return []
        self.state.twins.add(message.other)
        return [same_data(self.learner, message.other, message.why)]

    def _privacy_spent(self, fragment: int, reason: str) -> list[LearnerEffect]:
        """Log the warning once per learner, although every fragment may send it."""
        if self.state.privacy_spent:
            return []
        self.state.privacy_spent = True
        text = "its privacy budget is spent, so its training is merged no longer"
        return [Note(text, f"{reason}: it may stop, or train on with the published copies", True)]

    def _observe_clock(self, now: float, link: ShardView, clock: int) -> None:
        if clock > link.clock:
            if link.clock_at is not None and link.clock > 0:
                link.tick_seconds.update((now - link.clock_at) / (clock - link.clock))
            link.clock, link.clock_at = clock, now
        elif link.clock_at is None:
            link.clock_at = now

    def _welcomed(
        self, now: float, shard: int, message: Welcome, unheard_steps: int
    ) -> list[LearnerEffect]:
        """Process a welcome. ``unheard_steps``: steps taken since the shard's last message."""
        link = self.state.shards[shard]
        link.offset, link.news = message.run_step - message.step, message.news
        self._observe_clock(now, link, message.clock)
        effects: list[LearnerEffect] = []
        for index, sent in self._unresolved(shard):
            view = self.state.fragments[index]
            if sent.ask in message.asks:
                effects += [self._announce(index, sent)] if sent.digest else []
            elif self.options.secure and not sent.digest:
                # It has not sent its masked contribution, so no version contains it.
                self._never_sent(view, sent)
            elif sent is view.sent:
                sent.lost = True  # merged or not: it must never be sent again
            else:
                # break: lost-outcome-sent-again
                effects += fragments.settle(self.options, index, sent, _MAY_BE_MERGED, gone=True)
                self._late_is_lost(view, sent)
        for view in self._fragments_of(shard):
            view.owed_at = None  # the run step has changed: what was due before is not now
            # break: apart-not-noticed, short-cut-drops-steps
            view.alone += min(unheard_steps, self.state.steps_of(view))
        effects += visits.report_alone(self.state, self.options, shard)
        effects += self._align_run_steps()
        effects += leaving.welcomed(self.state, self.options, shard)
        return effects + self._release_if_free("the shard counts from this step")

    def _never_sent(self, view: FragmentView, sent: Sent) -> None:
        """Keep the training of a contribution that is in no version, for the next one."""
        if sent is view.sent:
            view.sent, view.behind = None, True
        else:
            self._late_is_lost(view, sent)

    def _late_is_lost(self, view: FragmentView, sent: Sent) -> None:
        """Drop a late contribution that, as far as is known, is merged nowhere."""
        del view.late[sent.ask]
        self.state.discarded_tokens += sent.taken.tokens

    def _pulled(self, pull: Pull) -> list[LearnerEffect]:
        index = pull.fragment
        view = self.state.fragments[index]
        view.pull = pull
        self.state.attention.add(index)
        self.state.shards[self.options.owner(index)].upcoming = pull.coming
        idle = view.held is None or (self.options.devices and self.state.steps_of(view) == 0)
        if pull.final and idle and self.state.ending and not self.state.ready:
            # The run ends before this learner starts to train.
            return fragments.decline(self.options, index, view, NOTHING_NEW, nothing_new=True)
        if view.held is not None and pull.base < view.held:  # break: old-base-not-declined
            return fragments.decline(self.options, index, view, f"behind: it holds {view.held}")
        effects: list[LearnerEffect] = []
        if view.sent is not None and view.sent.opened and view.sent.version is None:
            view.sent.burnt = True  # the request is answered once its training has left
            return []
        if pull.base == view.held:
            if declined := fragments.decline_if_diverged(self.options, index, view):
                return declined
            if view.latest is None or view.latest.version == view.held:
                # A shard repeats a request for one base only if the earlier payload is lost.
                why = "its shard asks again: no version contains the earlier contribution"
                # break: repeated-request-drops-residual
                effects += fragments.settle(self.options, index, view.sent, why, gone=False)
                view.sent = None
            elif view.sent is not None or (view.restored and not self.options.devices):
                return fragments.decline(
                    self.options, index, view, f"my contribution from {view.held} is already sent"
                )
        taken = view.snapshot
        fits = (
            taken is not None
            and taken.base == pull.base
            and not pull.final  # the closing sweep also needs the steps after the snapshot
            and (taken.first_tick <= pull.tick <= taken.last_tick or taken.step == self.state.step)
        )
        if fits:
            effects += fragments.send(self.state, self.options, index, view, pull)
        return effects

    def _outcome(self, message: Outcome) -> list[LearnerEffect]:
        view, accepted = self.state.fragments[message.fragment], message.version
        sent = self._sent(message.fragment, message.ask)
        if view.pull is not None and view.pull.ask == message.ask:
            view.pull = None
        if message.verdict == "accepted" and accepted is not None:
            view.late.pop(message.ask, None)
            if sent is None:
                return []
            effects: list[LearnerEffect] = []
            # break: accepted-settled-early
            if sent is view.sent:  # its steps are in the parameters: settled with the next copy
                view.alone = 0
            else:
                why = f"it is in {accepted}"
                effects = fragments.settle(self.options, message.fragment, sent, why, gone=True)
            sent.version = accepted
            visits.contributed(self.state, sent)
            return effects + self._merged(view, sent.taken.step)
        why = message.verdict
        # break: refusal-drops-residual
        effects = fragments.settle(self.options, message.fragment, sent, why, gone=False)
        if sent is not None and sent is view.sent:
            if sent.opened:
                sent.burnt = True  # break: opened-training-sent-again
                self.state.attention.add(message.fragment)
            else:
                view.sent = None
        elif sent is not None:
            self._late_is_lost(view, sent)
        if sent is not None and message.verdict in DROPPED:
            view.dropped = DROPPED[message.verdict]
        masked_in_vain = self.options.secure and message.verdict == "abandoned"
        if message.verdict == "behind" or masked_in_vain:  # break: abandoned-sum-drops-training
            view.behind = True
        return effects if sent is None else effects + self._refused(message)

    def _refused(self, message: Outcome) -> list[LearnerEffect]:
        """Log a contribution that was not merged, ever more rarely."""
        counts, unfit = self.state.refusals, message.verdict == "unfit"
        advice = {"unfit": UNFIT, "discarded": DISCARDED}.get(message.verdict, REFUSED)
        counts[message.verdict] = count = counts.get(message.verdict, 0) + 1
        if not is_worth_a_word(count, first=1 if unfit else 3):
            return []
        text = f"it sent a contribution to fragment {message.fragment} that is not merged"
        text += f" ({count} so far)"
        return [Note(text, f"{message.reason}: {advice}", warns=True)]

    def _fragments_of(self, shard: int) -> list[FragmentView]:
        return [self.state.fragments[p] for p in self.options.owned(shard)]
