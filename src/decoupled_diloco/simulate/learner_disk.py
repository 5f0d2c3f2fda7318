"""What a virtual learner keeps on its disk: checkpoints at random boundaries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decoupled_diloco.protocol.events import KeptFragment
from decoupled_diloco.protocol.recovery import kept
from decoupled_diloco.simulate.bodies import LineageLearner
from decoupled_diloco.simulate.cuts import LearnerPart

if TYPE_CHECKING:
    from decoupled_diloco.simulate.learner_process import LearnerProcess


class LearnerDisk:
    """The disk of one learner; it outlives the learner's processes.

    Checkpoints hold lineage, not tensors: only a world with `NoBodies` can ask for them.
    """

    def __init__(self, learner: LearnerProcess) -> None:
        self._learner = learner
        self._choices = learner.world.choices.fork(f"{learner.name}/disk")
        self._fragments: tuple[KeptFragment, ...] = ()
        self._values: Any = None

    def at_boundary(self) -> None:
        """A step is over: perhaps a checkpoint is written."""
        chance = self._learner.world.checkpoints
        if chance and self._choices.chance(chance):
            self.keep()

    def keep(self) -> None:
        """A checkpoint of this boundary is written."""
        learner = self._learner
        assert isinstance(learner.bodies, LineageLearner)
        fragments = kept(learner.machine.state)
        if fragments:
            self._fragments, self._values = fragments, learner.bodies.keep()

    def put(self, fragments: tuple[KeptFragment, ...], values: Any) -> None:
        """Has this checkpoint, and no other."""
        self._fragments, self._values = fragments, values

    def part(self) -> LearnerPart:
        """What a checkpoint has of this boundary."""
        learner = self._learner
        bodies = learner.bodies
        if not isinstance(bodies, LineageLearner):
            return LearnerPart(kept(learner.machine.state), None)
        return LearnerPart(kept(learner.machine.state), bodies.keep(), bodies.life, bodies.steps)

    def recover(self) -> tuple[KeptFragment, ...]:
        """The newest checkpoint, now in the new life's parameters; empty: there is none."""
        if not self._fragments or self._choices.chance(self._learner.world.checkpoint_lost):
            return ()
        bodies = self._learner.bodies
        assert isinstance(bodies, LineageLearner)
        bodies.resume(self._values)
        return self._fragments
