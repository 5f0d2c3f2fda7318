"""Checkpoints of the whole run without a pause: their start and their completion.

The algorithm is that of Lai and Yang. Every process has a checkpoint number, and every message
between learners and shards carries its sender's. The coordinator raises the number. A process that
receives a higher one saves its own part of the checkpoint before the message has any effect on that
part. No part therefore depends on anything that another process did after its own part, in whatever
order messages and payloads travel. Transfers in progress are in the sender's part, and are lost as
on a broken link.

A shard's part is what its disk would hold, in the order of its worker's queue. A learner's part is
its checkpoint, saved at its next step boundary before anything staged is applied. A checkpoint is
complete when every shard and every present learner has its part on a disk. A learner that leaves
meanwhile is listed as missing. A shard that leaves ends the checkpoint, because its next process
renames the versions to which the parts refer. Functions of the coordinator's state.

Leased data. Messages between learners and the coordinator carry no checkpoint number, and need
none. The coordinator's part is its state when it raises the number, before it sends any order. All
that its lease book lists as durable was reported, hence merged, before any shard received the
checkpoint, and is in the shards' parts. Returning to the checkpoint therefore skips nothing.
Progress that the other parts have beyond that book only causes repeats: every incarnation after the
checkpoint is newer, so the leases of the book are revoked at their durable positions and granted
again, and the ledger lists what is trained again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    BeginCheckpoint,
    CheckpointOrdered,
    CheckpointPart,
    CoordinatorEffect,
    ForgetCheckpoints,
    KeepCheckpoint,
    LearnerEffect,
    Note,
    PartSaved,
    Persist,
    Role,
    Send,
    TakeCheckpoint,
    shard_peer,
)


def heard(state: LearnerState, number: int) -> list[LearnerEffect]:
    """Make its part due at the next boundary. A learner without copies has no part."""
    state.checkpoint_heard = max(state.checkpoint_heard, number)
    if not state.ready:
        state.checkpoint = state.checkpoint_heard
    return []


def ordered(state: LearnerState, order: CheckpointOrdered) -> list[LearnerEffect]:
    """Start a checkpoint that the coordinator ordered."""
    heard(state, order.number)
    forget = ForgetCheckpoints(order.keep, order.number, "newer ones are complete")
    if state.ready:
        return [forget]
    return [forget, *not_saved(order.number, "it is still joining")]


def at_boundary(state: LearnerState, role: Role) -> list[LearnerEffect]:
    """Save its part of a checkpoint at this boundary, or report why it has none.

    A part must not contain anything that another process did after its own part, and a staged copy
    may be such. With a part, nothing else happens at this boundary. If checkpoints come as fast as
    steps, that would be so forever. The next boundary then does everything else, and this learner
    is missing.
    """
    just_taken, state.checkpoint_just_taken = state.checkpoint_just_taken, False
    if state.checkpoint >= state.checkpoint_heard:
        return []
    state.checkpoint = state.checkpoint_heard
    if not state.ready or state.ending or role != "learner":
        return []
    if any(view.held is None for view in state.fragments):  # before its first boundary
        return not_saved(state.checkpoint, "it is still joining")
    if just_taken:
        return not_saved(state.checkpoint, "checkpoints come faster than its steps")
    state.checkpoint_just_taken = True
    return [TakeCheckpoint(state.checkpoint, "before anything newer is applied")]


def saved(number: int, digest: str, nbytes: int) -> list[LearnerEffect]:
    """Report that its part is on the disk."""
    return [Send(COORDINATOR, PartSaved(number, digest, nbytes), "its part is on the disk")]


def not_saved(number: int, problem: str) -> list[LearnerEffect]:
    """Report that it has no part."""
    return [Send(COORDINATOR, PartSaved(number, "", 0, problem), problem)]


# The coordinator's side


LEAD_MAX = 1024
"""Greatest lead of a participant's checkpoint number over a shard's that is believed.

The coordinator begins no checkpoint without the shard, so a few would suffice.
"""


KEPT_MAX = 2
"""Complete checkpoints that are kept, because one may turn out to be corrupted."""


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint in progress: the awaited parts, the saved parts, and the missing learners."""

    number: int
    shards_awaited: set[int]
    learners_awaited: set[str]
    shards: list[CheckpointPart] = field(default_factory=list)
    learners: list[CheckpointPart] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one coordinator process; only the numbers are durable.

    ``given_up`` is the number of the last one that was abandoned, and why.
    """

    open: OpenCheckpoint | None = None
    due_at: float | None = None
    given_up: tuple[int, str] = (0, "")

    def begin(
        self, state: CoordinatorState, shards: Iterable[int], why: str
    ) -> list[CoordinatorEffect]:
        """Begin a checkpoint, and abandon the one that is still open."""
        effects = self.abandon("the next one begins")
        learners = sorted(name for name, known in state.learners.items() if known.present)
        state.checkpoint += 1
        self.open = OpenCheckpoint(state.checkpoint, set(shards), set(learners))
        order = CheckpointOrdered(state.checkpoint, tuple(state.checkpoints_kept))
        return [
            *effects,
            # Its own part comes before any order, so it knows of nothing after the checkpoint.
            Persist(f"checkpoint {state.checkpoint} begins"),
            BeginCheckpoint(state.checkpoint, why),
            *(Send(shard_peer(shard), order, why) for shard in sorted(self.open.shards_awaited)),
            *(Send(learner, order, why) for learner in learners),
        ]

    def abandon(self, reason: str) -> list[CoordinatorEffect]:
        """Abandon the open checkpoint, if there is one."""
        if self.open is None:
            return []
        awaited = [f"shard-{shard}" for shard in sorted(self.open.shards_awaited)]
        awaited += sorted(self.open.learners_awaited)
        missing = ", ".join(awaited) or "none"
        text = f"checkpoint {self.open.number} is abandoned, missing parts: {missing}"
        self.given_up = self.open.number, reason
        self.open = None
        return [Note(text, reason)]

    def shard_kept(
        self, state: CoordinatorState, shard: int, message: PartSaved
    ) -> list[CoordinatorEffect]:
        """Record a shard's part, or its failure.

        A number that never began is false information that the shard received from a learner. The
        next checkpoint must have a higher one, or the shard would save no part of it.
        """
        if message.number > state.checkpoint:
            state.checkpoint = message.number
            text = f"shard-{shard} received checkpoint {message.number}, which never began"
            why = "the next one has a higher number"
            return [*self.abandon(text), Persist(text), Note(text, why)]
        checkpoint = self.open
        if (
            checkpoint is None
            or checkpoint.number != message.number
            or shard not in checkpoint.shards_awaited
        ):
            return []
        if message.problem:
            return self.abandon(f"shard-{shard}: {message.problem}")
        checkpoint.shards_awaited.discard(shard)
        checkpoint.shards.append(CheckpointPart(f"shard-{shard}", message.digest, message.nbytes))
        return self._complete(state)

    def learner_kept(
        self, state: CoordinatorState, learner: str, message: PartSaved
    ) -> list[CoordinatorEffect]:
        """Record a learner's part, or its failure."""
        checkpoint = self.open
        if (
            checkpoint is None
            or checkpoint.number != message.number
            or learner not in checkpoint.learners_awaited
        ):
            return []
        if message.problem:
            return self.learner_gone(state, learner)
        checkpoint.learners_awaited.discard(learner)
        checkpoint.learners.append(CheckpointPart(learner, message.digest, message.nbytes))
        return self._complete(state)

    def learner_gone(self, state: CoordinatorState, learner: str) -> list[CoordinatorEffect]:
        """List a learner that will deliver no part as missing."""
        if self.open is None or learner not in self.open.learners_awaited:
            return []
        self.open.learners_awaited.discard(learner)
        self.open.missing.append(learner)
        return self._complete(state)

    def _complete(self, state: CoordinatorState) -> list[CoordinatorEffect]:
        checkpoint = self.open
        if checkpoint is None or checkpoint.shards_awaited or checkpoint.learners_awaited:
            return []
        self.open = None
        state.checkpoints_kept = [*state.checkpoints_kept, checkpoint.number][-KEPT_MAX:]
        why = "all parts are on disk"
        kept = KeepCheckpoint(
            checkpoint.number,
            _by_name(checkpoint.shards),
            _by_name(checkpoint.learners),
            tuple(sorted(checkpoint.missing)),
            why,
        )
        return [kept, Persist(f"checkpoint {checkpoint.number} is complete")]

    def wanted(
        self, state: CoordinatorState, present: set[int], shards: int
    ) -> list[CoordinatorEffect]:
        """Begin a checkpoint on request, unless one is in progress."""
        if self.open is not None or why_not_now(state, present, shards):
            return []
        return self.begin(state, present, "a user requested it")

    def begin_if_due(
        self,
        state: CoordinatorState,
        now: float,
        every_seconds: float,
        present: set[int],
        shards: int,
    ) -> list[CoordinatorEffect]:
        """Begin the checkpoint that is due, if the run is in progress and no shard is away."""
        if state.phase != "running":
            self.due_at = None
            return self.abandon(f"the run is {state.phase}")
        if not every_seconds:
            return []
        if self.due_at is None:
            self.due_at = now + every_seconds
        if now < self.due_at:
            return []
        self.due_at = now + every_seconds
        if len(present) < shards:
            return self.abandon("a shard is away")
        return self.begin(state, present, f"every {every_seconds:g} s")


def why_not_now(state: CoordinatorState, present: set[int], shards: int) -> str:
    """Return why no checkpoint can begin now; empty: one can."""
    if state.phase != "running":
        return f"the run is {state.phase}"
    away = sorted(set(range(shards)) - present)
    return f"shard-{away[0]} is away" if away else ""


def raised(state: CoordinatorState, newest: CoordinatorState) -> CoordinatorState:
    """Return the coordinator's part with the newest incarnation, term and lease numbers."""
    terms = {s: max(t, newest.terms.get(s, 0)) for s, t in state.terms.items()}
    learners = {
        name: replace(known, nonce="", present=False) for name, known in newest.learners.items()
    }
    return replace(
        state,
        terms=newest.terms | terms,
        learners=learners,
        nonces={},
        former={},
        claims=newest.claims,
        data=replace(state.data, leases=max(state.data.leases, newest.data.leases)),
        checkpoint=newest.checkpoint,
        checkpoints_kept=[],
    )


def _by_name(parts: Iterable[CheckpointPart]) -> tuple[CheckpointPart, ...]:
    return tuple(sorted(parts, key=lambda part: part.process))
