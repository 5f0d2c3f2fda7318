"""What is done to the parameters at one step boundary, as data.

One process decides, by its `LearnerMachine`; every rank of a sharded learner can then do the same
at the same step, because a plan is a JSON object that can be broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from decoupled_diloco.protocol.checkpoints.effects import TakeCheckpoint
from decoupled_diloco.protocol.effects import (
    Apply,
    EndTraining,
    Hold,
    LearnerEffect,
    Release,
    Send,
    Snapshot,
)
from decoupled_diloco.protocol.messages import LOSS_MAX, StepReport
from decoupled_diloco.protocol.transfer.effects import CopyState

OF_THE_BOUNDARY = (Snapshot, Apply, Hold, Release, EndTraining, TakeCheckpoint, CopyState)
"""Orders that the training loop carries out itself, or sees in the machine's state."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The orders of one boundary.

    Attributes:
        orders: What to apply and what to snapshot, in this order.
        hold: Do not start the next step yet (synchronous baselines only).
        checkpoint: Take this process's part of this one of the run, then look at the boundary
            again.
    """

    orders: tuple[Apply | Snapshot, ...] = ()
    hold: bool = False
    checkpoint: int | None = None

    @classmethod
    def of(cls, effects: Iterable[LearnerEffect]) -> StepPlan:
        """The part of a machine's answer that belongs to the boundary.

        >>> StepPlan.of([Hold("not back yet")])
        StepPlan(orders=(), hold=True, checkpoint=None)
        """
        effects = list(effects)
        return cls(
            tuple(effect for effect in effects if isinstance(effect, (Apply, Snapshot))),
            any(isinstance(effect, Hold) for effect in effects),
            next((effect.number for effect in effects if isinstance(effect, TakeCheckpoint)), None),
        )

    @property
    def applied(self) -> tuple[int, ...]:
        """The fragments whose global weights are taken."""
        return tuple(order.fragment for order in self.orders if isinstance(order, Apply))


def with_loss(effect: LearnerEffect, loss: float) -> LearnerEffect:
    """The report of a step with the step's loss in it; anything else as it is."""
    if not (isinstance(effect, Send) and isinstance(effect.message, StepReport)):
        return effect
    told = loss if abs(loss) < LOSS_MAX else LOSS_MAX  # so is one that is no number
    return replace(effect, message=replace(effect.message, loss=told))
