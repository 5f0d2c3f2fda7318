"""A learner's side of the consistent cuts of the run; see `cuts`. Functions of its state."""

from __future__ import annotations

from decoupled_diloco.protocol.effects import ForgetCuts, LearnerEffect, TakeCut, TellCoordinator
from decoupled_diloco.protocol.events import CutWritten
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.messages import CutKept, CutOrdered, Role


def heard(state: LearnerState, number: int) -> list[LearnerEffect]:
    """Its part is due at the next boundary; who has no copies yet has no part."""
    state.cut_heard = max(state.cut_heard, number)
    if not state.ready:
        state.cut = state.cut_heard
    return []


def ordered(state: LearnerState, order: CutOrdered) -> list[LearnerEffect]:
    """The coordinator begins a cut."""
    heard(state, order.number)
    forget = ForgetCuts(order.keep, order.number, "newer ones are complete")
    if state.ready:
        return [forget]
    problem = "it is only joining"
    return [forget, TellCoordinator(CutKept(order.number, "", 0, problem), problem)]


def at_boundary(state: LearnerState, role: Role) -> list[LearnerEffect]:
    """Its part of a cut that it has heard of.

    Nothing that another did after its own part may be in this one, and what is staged may be such:
    so nothing else happens at this boundary.
    """
    if state.cut >= state.cut_heard:
        return []
    state.cut = state.cut_heard
    if not state.ready or state.ending or role != "learner":
        return []
    if any(view.held is None for view in state.fragments):  # its first boundary
        problem = "it is only joining"
        return [TellCoordinator(CutKept(state.cut, "", 0, problem), problem)]
    return [TakeCut(state.cut, "before anything newer is applied")]


def written(event: CutWritten) -> list[LearnerEffect]:
    """Its part is on the disk, or cannot be."""
    kept = CutKept(event.number, event.digest, event.nbytes, event.problem)
    return [TellCoordinator(kept, event.problem or "its part is on the disk")]
