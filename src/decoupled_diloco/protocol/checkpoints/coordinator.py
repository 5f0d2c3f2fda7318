"""Checkpoints of the whole run without a pause: when one begins, and when it is complete.

The algorithm of Lai and Yang: every process has a checkpoint number, and every message between
learners and shards carries its sender's. The coordinator raises the number; who hears a higher one
takes its own part of the checkpoint before the message has any effect on that part. So no part
knows of anything that another did after its own, in whatever order messages and bodies travel; what
was under way is in the sender's part, and is lost as on a broken link.

A shard's part is what its disk would hold, in the order of its worker's queue. A learner's part is
its checkpoint, taken at its next step boundary before anything staged is applied. A checkpoint is
complete when every shard and every learner that is present has its part on a disk. A learner that
leaves meanwhile is named as missing; a shard that leaves ends the checkpoint, because its next life
renames the versions that the parts speak of. Functions of the coordinator's state.

Leased data. What learners and the coordinator say to each other bears no checkpoint number, and
needs none. The coordinator's part is what it knows when it raises the number, before it tells
anybody. So all that its lease book calls durable was reported, hence merged, before any shard had
heard of the checkpoint, and is in the shards' parts: going back skips nothing. What the other parts
know beyond that book costs repeats alone: every life after the checkpoint has a newer epoch, so
that the leases of the book are taken back at their durable positions and lent anew, and the ledger
lists what is trained again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from decoupled_diloco.protocol.checkpoints.effects import BeginCheckpoint, KeepCheckpoint
from decoupled_diloco.protocol.checkpoints.messages import (
    CheckpointOrdered,
    CheckpointPart,
    PartSaved,
)
from decoupled_diloco.protocol.coordinator_state import CoordinatorState
from decoupled_diloco.protocol.effects import CoordinatorEffect, Note, Persist, Send
from decoupled_diloco.protocol.peers import shard_peer

LEAD_MAX = 1024
"""A participant may have heard of at most so many checkpoints that a shard has not: who says more
is not believed. The coordinator begins none without the shard, so a few would be enough."""

KEPT_MAX = 2
"""Complete checkpoints that are kept: one may turn out corrupt."""


@dataclass(slots=True)
class OpenCheckpoint:
    """A checkpoint under way: whose part is still to come, what has come, who gives none."""

    number: int
    shards_awaited: set[int]
    learners_awaited: set[str]
    shards: list[CheckpointPart] = field(default_factory=list)
    learners: list[CheckpointPart] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one life of the coordinator; the numbers alone outlive it.

    ``given_up``: number of the last one that was not completed, and why.
    """

    open: OpenCheckpoint | None = None
    due_at: float | None = None
    given_up: tuple[int, str] = (0, "")

    def begin(
        self, state: CoordinatorState, shards: Iterable[int], why: str
    ) -> list[CoordinatorEffect]:
        """Begins a checkpoint; one that is still open ends without being complete."""
        effects = self.give_up("the next one begins")
        learners = sorted(name for name, known in state.learners.items() if known.present)
        state.checkpoint += 1
        self.open = OpenCheckpoint(state.checkpoint, set(shards), set(learners))
        order = CheckpointOrdered(state.checkpoint, tuple(state.checkpoints_kept))
        return [
            *effects,
            Persist(f"checkpoint {state.checkpoint} begins"),
            BeginCheckpoint(state.checkpoint, why),
            *(Send(shard_peer(shard), order, why) for shard in sorted(self.open.shards_awaited)),
            *(Send(learner, order, why) for learner in learners),
        ]

    def give_up(self, reason: str) -> list[CoordinatorEffect]:
        """The open checkpoint, if there is one, will not be complete."""
        if self.open is None:
            return []
        awaited = [f"shard-{shard}" for shard in sorted(self.open.shards_awaited)]
        awaited += sorted(self.open.learners_awaited)
        text = (
            f"checkpoint {self.open.number} is given up, without {', '.join(awaited) or 'nobody'}"
        )
        self.given_up = self.open.number, reason
        self.open = None
        return [Note(text, reason)]

    def shard_kept(
        self, state: CoordinatorState, shard: int, message: PartSaved
    ) -> list[CoordinatorEffect]:
        """A shard has its part, or cannot have it.

        A number that was never begun is a lie that the shard has heard from a learner: the next
        checkpoint must be beyond it, or the shard would take no part of that.
        """
        if message.number > state.checkpoint:
            state.checkpoint = message.number
            text = f"shard-{shard} was told of checkpoint {message.number}, which was never begun"
            why = "the next one has a higher number"
            return [*self.give_up(text), Persist(text), Note(text, why)]
        checkpoint = self.open
        if (
            checkpoint is None
            or checkpoint.number != message.number
            or shard not in checkpoint.shards_awaited
        ):
            return []
        if message.problem:
            return self.give_up(f"shard-{shard}: {message.problem}")
        checkpoint.shards_awaited.discard(shard)
        checkpoint.shards.append(CheckpointPart(f"shard-{shard}", message.digest, message.nbytes))
        return self._complete(state)

    def learner_kept(
        self, state: CoordinatorState, learner: str, message: PartSaved
    ) -> list[CoordinatorEffect]:
        """A learner has its part, or cannot have it."""
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
        """Nothing more comes from a learner."""
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
        why = "every part is on a disk"
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
        """Somebody asks for a checkpoint: one that is under way will do."""
        if self.open is not None or why_none(state, present, shards):
            return []
        return self.begin(state, present, "somebody asks for it")

    def look(
        self,
        state: CoordinatorState,
        now: float,
        every_seconds: float,
        present: set[int],
        shards: int,
    ) -> list[CoordinatorEffect]:
        """Begins the checkpoint that is due, if the run is under way and no shard is away."""
        if state.phase != "running":
            self.due_at = None
            return self.give_up(f"the run is {state.phase}")
        if not every_seconds:
            return []
        if self.due_at is None:
            self.due_at = now + every_seconds
        if now < self.due_at:
            return []
        self.due_at = now + every_seconds
        if len(present) < shards:
            return self.give_up("a shard is away")
        return self.begin(state, present, f"every {every_seconds:g} s")


def why_none(state: CoordinatorState, present: set[int], shards: int) -> str:
    """Why no checkpoint can begin now; empty: one can."""
    if state.phase != "running":
        return f"the run is {state.phase}"
    away = sorted(set(range(shards)) - present)
    return f"shard-{away[0]} is away" if away else ""


def raised(state: CoordinatorState, newest: CoordinatorState) -> CoordinatorState:
    """The coordinator's part with every epoch, term and lease number that was ever given out."""
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
    return tuple(sorted(parts, key=lambda part: part.who))
