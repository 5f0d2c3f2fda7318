"""A learner's side of the checkpoints of the run; see `checkpoints`. Functions of its state."""

from __future__ import annotations

from typing import assert_never

from decoupled_diloco.protocol.checkpoints.effects import ForgetCheckpoints, TakeCheckpoint
from decoupled_diloco.protocol.checkpoints.events import CheckpointHeard, PartWritten
from decoupled_diloco.protocol.checkpoints.messages import CheckpointOrdered, PartSaved
from decoupled_diloco.protocol.effects import LearnerEffect, Send
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.messages import Role
from decoupled_diloco.protocol.peers import COORDINATOR


def handle(state: LearnerState, event: CheckpointHeard | PartWritten) -> list[LearnerEffect]:
    """A number has come with a message, or its part is written."""
    match event:
        case CheckpointHeard(number):
            return heard(state, number)
        case PartWritten():
            return written(event)
        case _:
            assert_never(event)


def heard(state: LearnerState, number: int) -> list[LearnerEffect]:
    """Its part is due at the next boundary; who has no copies yet has no part."""
    state.checkpoint_heard = max(state.checkpoint_heard, number)
    if not state.ready:
        state.checkpoint = state.checkpoint_heard
    return []


def ordered(state: LearnerState, order: CheckpointOrdered) -> list[LearnerEffect]:
    """The coordinator begins a checkpoint."""
    heard(state, order.number)
    forget = ForgetCheckpoints(order.keep, order.number, "newer ones are complete")
    if state.ready:
        return [forget]
    return [forget, _none_of(order.number, "it is only joining")]


def at_boundary(state: LearnerState, role: Role) -> list[LearnerEffect]:
    """Its part of a checkpoint that it has heard of, or why it has none.

    Nothing that another did after its own part may be in this one, and what is staged may be such:
    with a part, nothing else happens at this boundary. Where checkpoints come as fast as steps that
    would be for ever, so the next boundary is one for everything else, and this learner missing.
    """
    just_taken, state.checkpoint_just_taken = state.checkpoint_just_taken, False
    if state.checkpoint >= state.checkpoint_heard:
        return []
    state.checkpoint = state.checkpoint_heard
    if not state.ready or state.ending or role != "learner":
        return []
    if any(view.held is None for view in state.fragments):  # its first boundary
        return [_none_of(state.checkpoint, "it is only joining")]
    if just_taken:
        return [_none_of(state.checkpoint, "checkpoints come faster than its steps")]
    state.checkpoint_just_taken = True
    return [TakeCheckpoint(state.checkpoint, "before anything newer is applied")]


def _none_of(checkpoint: int, problem: str) -> LearnerEffect:
    return Send(COORDINATOR, PartSaved(checkpoint, "", 0, problem), problem)


def written(event: PartWritten) -> list[LearnerEffect]:
    """Its part is on the disk, or cannot be."""
    kept = PartSaved(event.number, event.digest, event.nbytes, event.problem)
    return [Send(COORDINATOR, kept, event.problem or "its part is on the disk")]
