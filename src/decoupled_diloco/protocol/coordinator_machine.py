"""The state machine of the coordinator: the run-wide decisions (rules 10 to 12).

Theory of operation. The coordinator admits learners and shards, and assigns incarnations and terms.
Each is durable before any process receives it. The first learner's layout becomes the run's. The
initial weights come from the run's file or from one learner. The run begins when every shard holds
its whole share of them. When the budget is reached, the coordinator orders the closing sweep, and
when all shards have finished the sweep, the end. Its absence stops only joins and the end; rounds
continue.

A shard may have several processes over time, and through a fault two at once. The term belongs to
the process that greeted last or has the newest claim (see `protocol.lease_machine`). An earlier
process that comes back is rejected, and anything that it still publishes carries an older term.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from decoupled_diloco.errors import MethodError
from decoupled_diloco.protocol import same_data
from decoupled_diloco.protocol.adapt import Reviser, scheduled
from decoupled_diloco.protocol.coordinator_state import CoordinatorState, Enrolled, Stopped, copied
from decoupled_diloco.protocol.features import checkpoint as checkpoints
from decoupled_diloco.protocol.features import partitions as leases
from decoupled_diloco.protocol.features.checkpoint import Checkpoints
from decoupled_diloco.protocol.features.partitions import Absences
from decoupled_diloco.protocol.features.places import PlaceBook
from decoupled_diloco.protocol.features.state_transfer import Transfers
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.protocol.messages import (
    Admit,
    AdmitShard,
    AdoptLayout,
    Begin,
    CheckpointWanted,
    Connected,
    CoordinatorEffect,
    CoordinatorEvent,
    DataReport,
    Demand,
    Deny,
    DenyShard,
    EndOrdered,
    FinishOrdered,
    Joining,
    Lost,
    Message,
    Note,
    PartSaved,
    Persist,
    PlaceReturned,
    PlaceWanted,
    Progress,
    RandomNumbers,
    Received,
    Revision,
    SeedFailed,
    SeedNamed,
    Send,
    ShardHello,
    ShardReady,
    StopWanted,
    Swept,
    Tick,
    is_shard_peer,
    name_problem,
    shard_of,
    shard_peer,
)

TRANSITIONS: tuple[tuple[str, str, str], ...] = (
    # phase, event, next phase
    ("gathering", "Connected (a learner, the first layout)", "seeding"),
    ("seeding", "Lost (the seed)", "seeding with the next learner, if any; otherwise gathering"),
    ("seeding", "SeedFailed", "seeding with the next learner, or the same again"),
    ("seeding", "every shard ready", "running"),
    ("running", "budget reached, or StopWanted", "ending"),
    ("ending", "every shard swept", "finished"),
)

SCHEDULE_FAILED = "the schedule has failed; H stays as it is"


FORMER_KEPT = 16
"""Number of former processes per shard whose nonces are remembered, in case they come back."""


class CoordinatorMachine:
    """The coordinator of one run."""

    def __init__(self, options: Options, *, weights_from_file: bool = False) -> None:
        self.options = options
        self.weights_from_file = weights_from_file
        self.state = CoordinatorState()
        self.transfers = Transfers()
        self.places = PlaceBook()
        self._present_shards: set[int] = set()
        self._absences = Absences()
        self._checkpoints = Checkpoints()
        self._reviser = Reviser()
        self._schedule_has_failed = False
        self._indexes: set[int] = set()
        self._drawn: dict[str, str] = {}

    def handle(self, now: float, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        """Process one event; see `SyncerMachine.handle`."""
        self._absences.noticed(now, self.state.data)
        effects, options = self._dispatch(now, event), self.options
        every = options.checkpoint_every_seconds
        return effects + self._checkpoints.begin_if_due(
            self.state, now, every, self._present_shards, options.shards
        )

    def _dispatch(self, now: float, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        match event:
            case Tick():
                effects = self._absences.over(now, self.state.data)
                return effects + self.places.over(self.options, now, self.state.learners)
            case Connected(learner, Joining() as joining, connection):
                return self._join_requested(connection, learner, joining)
            case Connected(_, hello):
                assert isinstance(hello, ShardHello)
                return self._shard_greeted(hello)
            case Received(peer, message) if is_shard_peer(peer):
                return self._receive_from_shard(shard_of(peer), message)
            case Received(learner, message, nonce):
                return self._receive_from_member(now, learner, nonce, message)
            case Lost(peer) if is_shard_peer(peer):
                self._present_shards.discard(shard_of(peer))
                return self._checkpoints.abandon(f"{peer} has disconnected")
            case Lost(learner, nonce):
                return self._learner_gone(now, learner, nonce)
            case CheckpointWanted():
                return self._checkpoints.wanted(
                    self.state, self._present_shards, self.options.shards
                )
            case StopWanted(by):
                return self._stopped(by)
            case _:
                assert_never(event)

    def deadline(self) -> float | None:
        """Return when a departed learner's leases end, or the next checkpoint is due."""
        instants = (self._absences.deadline, self._checkpoints.due_at, self.places.deadline)
        return min((instant for instant in instants if instant is not None), default=None)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoint in progress and the last one that was abandoned; read-only."""
        return self._checkpoints

    @property
    def why_no_checkpoint(self) -> str:
        """Why no checkpoint can begin now, or an empty text if one can."""
        return checkpoints.why_not_now(self.state, self._present_shards, self.options.shards)

    @property
    def why_no_stop(self) -> str:
        """Why the run cannot be ended now, or an empty text if it can be, or has been."""
        begun = self.state.phase not in ("gathering", "seeding")
        return "" if begun else "the run has not begun: stop its processes instead"

    def snapshot(self) -> CoordinatorState:
        """Return a copy of the whole state, which ``Persist`` writes."""
        return copied(self.state)

    def restore(self, state: CoordinatorState) -> None:
        """Continue from a snapshot in a new process, without connections.

        A seed that was named may never come back, and no message would report that. Another one is
        therefore named.
        """
        self.state = copied(state)
        if self.state.phase == "seeding":
            self.state.phase = "gathering"
        if self.state.phase in ("ending", "finished") and not self._spent():
            self.state.phase = "running"  # the budget was raised, so the run continues
            self.state.swept.clear()
            self.state.stopped = None
        self._restore_learners()
        self._present_shards.clear()
        self.transfers = Transfers()
        self.places = PlaceBook()
        self._absences = Absences(unnoticed=True)
        self._checkpoints = Checkpoints()
        self._reviser = Reviser()

    def _restore_learners(self) -> None:
        learners = self.state.learners
        self._indexes = {known.index for known in learners.values()}
        for name, known in learners.items():
            learners[name] = replace(known, present=False)

    def check(self) -> None:
        """Assert every invariant that is visible in one state."""
        state = self.state
        assert state.phase == "gathering" or state.fingerprint or self.weights_from_file
        assert all(enrolled.epoch >= 1 for enrolled in state.learners.values())
        indexes = {enrolled.index for enrolled in state.learners.values()}
        assert len(indexes) == len(state.learners)
        assert min(indexes, default=0) >= 0
        assert state.phase != "running" or len(state.ready) == self.options.shards
        assert state.phase != "finished" or len(state.swept) == self.options.shards
        leases.check(state.data)
        self.places.check(self.options)

    def _join_requested(
        self, connection: int, learner: str, joining: Joining
    ) -> list[CoordinatorEffect]:
        state = self.state
        unnamed = name_problem(learner)
        if unnamed:
            return [Deny(connection, unnamed, False, unnamed)]
        if joining.role == "observer":
            return self._observer(connection, learner, joining)
        known = state.learners.get(learner)
        if known is not None and known.present and known.nonce != joining.nonce:
            reason = (
                f"name={learner} is already connected (incarnation {known.epoch}): choose another "
                "learner name, or stop the other process first"
            )
            return [Deny(connection, reason, True, reason)]
        if joining.difference:
            return [Deny(connection, joining.difference, False, joining.difference)]
        effects: list[CoordinatorEffect] = []
        only = learner if state.fingerprint else ""
        if not state.fingerprint:
            state.fingerprint = joining.fingerprint
            why = f"{learner} is the first learner"
            effects.append(AdoptLayout(connection, joining.fingerprint, why))
        if known is None or known.nonce != joining.nonce:
            index = known.index if known else self._free_index()
            # break: epoch-used-again
            known = Enrolled((known.epoch if known else 0) + 1, joining.nonce, True, index)
        state.learners[learner] = replace(known, present=True)
        why = f"incarnation {known.epoch}"
        # Durable before the answer: an incarnation must never be issued twice.
        effects.append(Persist(why, only))
        self._absences.ended(learner)
        newer = f"a newer process has joined as {learner}"
        effects += leases.take_back(state.data, learner, newer, before_epoch=known.epoch)
        count = max(self._indexes) + 1
        effects.append(Admit(connection, learner, known.epoch, why, known.index, count))
        return effects + self._name_seed()

    def _free_index(self) -> int:
        """Take the lowest unused number. A name keeps its number while it is away."""
        index = len(self._indexes)
        if max(self._indexes, default=-1) >= index:  # a lost record has left a gap
            index = next(number for number in range(index) if number not in self._indexes)
        self._indexes.add(index)
        return index

    def _observer(self, connection: int, learner: str, joining: Joining) -> list[CoordinatorEffect]:
        if joining.difference:
            return [Deny(connection, joining.difference, False, joining.difference)]
        if not self.state.fingerprint:
            reason = "no learner has joined yet, so the run has no layout"
            return [Deny(connection, reason, True, reason)]
        return [Admit(connection, learner, 0, "an observer has no incarnation")]

    @property
    def _present(self) -> set[str]:
        return {name for name, each in self.state.learners.items() if each.present}

    def _receive_from_member(
        self, now: float, learner: str, nonce: str, message: Message
    ) -> list[CoordinatorEffect]:
        known = self.state.learners.get(learner)
        if known is None or known.nonce != nonce:  # break: older-process-heard
            return []  # another process has this name by now
        match message:
            case PartSaved():
                return self._checkpoints.learner_kept(self.state, learner, message)
            case DataReport():
                return leases.report(self.state.data, learner, known.epoch, message)
            case RandomNumbers(states):
                return same_data.drawn(self._drawn, self._present, learner, states)
            case PlaceWanted() | PlaceReturned():
                first = self.state.seed if self.state.phase == "seeding" else ""
                return self.places.receive(self.options, now, learner, message, first)
            case _:
                present = {name: each.present for name, each in self.state.learners.items()}
                clock = max(self.state.clocks.values(), default=0)
                return self.transfers.receive(learner, message, present, clock)

    def _learner_gone(self, now: float, learner: str, nonce: str) -> list[CoordinatorEffect]:
        state = self.state
        known = state.learners.get(learner)
        if known is None or known.nonce != nonce:
            return []
        state.learners[learner] = replace(known, present=False)
        effects = self.transfers.gone(learner)
        self.places.gone(learner)
        self._absences.began(now, learner, state.data)
        if state.phase != "seeding" or state.seed != learner:
            return [*effects, *self._checkpoints.learner_gone(state, learner)]
        state.phase, state.seed = "gathering", ""
        note = Note(f"{learner}, the seed of the initial weights, left", "its connection broke")
        return [*effects, note, *self._name_seed()]

    def _name_seed(self, after: str = "") -> list[CoordinatorEffect]:
        """Name the first learner, in the order of names, or the next one ``after``."""
        state = self.state
        if state.phase != "gathering" or not state.fingerprint:
            return []
        present = sorted(self._present)
        if not self.weights_from_file and not present:
            return []
        following = [name for name in present if name > after] or present
        state.seed = "" if self.weights_from_file else following[0]
        state.phase = "seeding"
        state.attempt += 1
        state.ready.clear()
        effects: list[CoordinatorEffect] = [Persist(f"attempt {state.attempt} to begin")]
        for shard in sorted(self._present_shards):
            effects.append(Send(shard_peer(shard), self._seed_message(), "a seed is named"))
        return effects

    def _seed_message(self) -> SeedNamed:
        state = self.state
        epoch = state.learners[state.seed].epoch if state.seed else 0
        return SeedNamed(state.seed, epoch, state.attempt)

    def _shard_greeted(self, hello: ShardHello) -> list[CoordinatorEffect]:
        state, shard = self.state, hello.shard
        superseded = self._superseded(hello)
        if superseded:  # break: replaced-process-admitted
            return [DenyShard(shard, hello.nonce, superseded, "a newer process acts for it")]
        self._present_shards.add(shard)
        effects: list[CoordinatorEffect] = []
        if state.nonces.get(shard) != hello.nonce:
            effects += self._checkpoints.abandon(f"shard-{shard} has restarted")
            self._new_process(hello)
            effects.append(Persist(f"shard {shard} has term {state.terms[shard]}"))
        begun = state.phase in ("running", "ending", "finished")
        if begun:
            state.ready.add(shard)
        why = "the run is in progress" if begun else "the run has not begun"
        effects.append(AdmitShard(shard, state.terms[shard], begun, why))
        if state.phase == "seeding" and shard not in state.ready:
            effects.append(Send(shard_peer(shard), self._seed_message(), "a seed is named"))
        if begun:
            effects.append(Send(shard_peer(shard), self._seed_message(), "the run's first seed"))
            effects.append(Send(shard_peer(shard), Begin(state.attempt), why))
        if state.revision is not None:  # break: restarted-shard-lacks-revision
            effects.append(Send(shard_peer(shard), state.revision, "H and τ were revised"))
        if state.phase in ("ending", "finished"):
            ended = "the budget is reached" if state.stopped is None else "a user has stopped it"
            effects.append(Send(shard_peer(shard), EndOrdered(), ended))
        if state.phase == "finished":
            effects.append(Send(shard_peer(shard), FinishOrdered(), "every shard has been swept"))
        return effects

    def _superseded(self, hello: ShardHello) -> str:
        """Return why a process may no longer act for its shard; empty: it may."""
        state, shard = self.state, hello.shard
        newest = state.claims.get(shard, 0)
        if 0 < hello.claim < newest:  # 0: the run continues without standbys
            return f"shard {shard}: claim {hello.claim} is older than claim {newest}"
        if hello.nonce in state.former.get(shard, ()):
            return f"shard {shard}: another process has replaced this one"
        return ""

    def _new_process(self, hello: ShardHello) -> None:
        state, shard = self.state, hello.shard
        before = state.nonces.get(shard)
        if before is not None:
            state.former[shard] = (*state.former.get(shard, ()), before)[-FORMER_KEPT:]
        state.nonces[shard] = hello.nonce
        state.claims[shard] = max(hello.claim, state.claims.get(shard, 0))
        state.terms[shard] = state.terms.get(shard, 0) + 1  # break: term-used-again
        state.ready.discard(shard)  # the new process holds no weights yet
        if state.phase != "finished":
            state.swept.discard(shard)

    def _receive_from_shard(self, shard: int, message: Message) -> list[CoordinatorEffect]:
        match message:
            case ShardReady(attempt):
                return self._shard_ready(shard, attempt)
            case SeedFailed(attempt, reason):
                return self._seed_failed(attempt, reason)
            case Progress(clock, tokens):
                return self._progressed(shard, clock, tokens)
            case Demand():
                self._reviser.record(shard, message)
                return []
            case Swept():
                return self._shard_swept(shard)
            case PartSaved():
                return self._checkpoints.shard_kept(self.state, shard, message)
            case _:
                raise AssertionError(f"unexpected message from a shard: {message}")

    def _seed_failed(self, attempt: int, reason: str) -> list[CoordinatorEffect]:
        """Name the next learner, because the seed's parameters are invalid or do not arrive."""
        state = self.state
        if state.phase != "seeding" or attempt != state.attempt or self.weights_from_file:
            return []
        failed, state.phase = state.seed, "gathering"
        named = self._name_seed(after=failed)
        named_now = f"trying {state.seed}" if state.seed else "no other learner is present"
        text = f"{failed} cannot provide the initial weights; {named_now}"
        return [Note(text, reason), *named]

    def _shard_ready(self, shard: int, attempt: int) -> list[CoordinatorEffect]:
        state = self.state
        if state.phase != "seeding" or attempt != state.attempt:
            return []
        state.ready.add(shard)
        if len(state.ready) < self.options.shards:
            return []
        state.phase = "running"
        why = "every shard holds its share of the initial weights"
        return [
            Persist(why),
            *(Send(shard_peer(s), Begin(attempt), why) for s in sorted(self._present_shards)),
        ]

    @property
    def _slowest(self) -> int:
        return min(self.state.clocks.get(s, 0) for s in range(self.options.shards))

    def _spent(self) -> bool:
        state, options = self.state, self.options
        by_steps = options.max_steps is not None and self._slowest >= options.max_steps
        by_tokens = options.max_tokens is not None and state.tokens >= options.max_tokens
        budget = (options.max_steps, options.max_tokens)
        stopped = state.stopped
        by_user = stopped is not None and (stopped.max_steps, stopped.max_tokens) == budget
        return by_steps or by_tokens or by_user  # break: stop-forgotten

    def _progressed(self, shard: int, clock: int, tokens: int) -> list[CoordinatorEffect]:
        state = self.state
        # A restarted shard may report less than before: neither value goes back.
        state.clocks[shard] = max(clock, state.clocks.get(shard, 0))
        state.tokens = max(state.tokens, tokens)
        if state.phase != "running":
            return []
        if not self._spent():
            return self._revise()
        return self._end(f"the budget is reached: step {self._slowest}, {state.tokens} tokens")

    def _stopped(self, by: str) -> list[CoordinatorEffect]:
        """End the run in order, on behalf of a user."""
        state, options = self.state, self.options
        if state.phase != "running":
            return []
        state.stopped = Stopped(by, options.max_steps, options.max_tokens)
        why = f"{by} has stopped the run"
        return [Note(f"{why} at step {self._slowest}", "the closing rounds start"), *self._end(why)]

    def _end(self, why: str) -> list[CoordinatorEffect]:
        self.state.phase = "ending"
        return [
            Persist(why),
            *(Send(shard_peer(s), EndOrdered(), why) for s in sorted(self._present_shards)),
        ]

    def _revise(self) -> list[CoordinatorEffect]:
        """Revise H and τ, if the links (rule 20) or the schedule require it."""
        state, options = self.state, self.options
        clock = max(state.clocks.values())
        present = state.revision or Revision(0, 0, options.period, options.overlap)
        found = None
        if options.schedule is not None:
            try:
                found = scheduled(options.schedule, options.max_steps, clock, present)
            except MethodError as error:
                return self._schedule_failed(str(error))
        elif options.adapt is not None:
            found = self._reviser.review(clock, options.adapt, present, options.fragments)
        if found is None:
            return []
        state.revision, why = found
        text = f"revision {state.revision.number}: {state.revision} from step "
        text += f"{state.revision.tick} on (before: {present})"
        return [
            Persist(why),  # break: revision-before-disk
            Note(text, why),
            *(Send(shard_peer(s), state.revision, why) for s in sorted(self._present_shards)),
        ]

    def _schedule_failed(self, reason: str) -> list[CoordinatorEffect]:
        """Warn once; H stays."""
        if self._schedule_has_failed:
            return []
        self._schedule_has_failed = True
        return [Note(SCHEDULE_FAILED, reason, warns=True)]

    def _shard_swept(self, shard: int) -> list[CoordinatorEffect]:
        state = self.state
        if state.phase != "ending":
            return []
        state.swept.add(shard)
        if len(state.swept) < self.options.shards:
            return []
        state.phase = "finished"
        why = "every shard has been swept"
        return [
            Persist(why),
            *(Send(shard_peer(s), FinishOrdered(), why) for s in sorted(self._present_shards)),
        ]
