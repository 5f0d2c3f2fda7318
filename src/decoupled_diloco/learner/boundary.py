"""The step boundary: changes to a learner's parameters between two of its steps.

At a boundary the machine receives that a step is finished, or that the loop is paused. The training
thread executes its orders at once: it applies staged copies, copies due fragments and takes
checkpoints. `Boundary` does that in the process that has the machine. In a learner of several ranks
this is rank 0, and its store turns the orders into the plan of all ranks.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace

from decoupled_diloco.learner.checkpointer import Checkpointer, Counted, Written, held_fragment
from decoupled_diloco.learner.learner_checkpoint import LearnerCheckpoint
from decoupled_diloco.learner.learner_model import TrainedModel
from decoupled_diloco.learner.membership import Membership, Waits
from decoupled_diloco.learner.shared import StepPlan
from decoupled_diloco.learner.transfers import StateTransfers
from decoupled_diloco.protocol.messages import (
    Done,
    Failed,
    Made,
    Paused,
    StepFinished,
    TakeCheckpoint,
)
from decoupled_diloco.protocol.recovery import kept as kept_fragments
from decoupled_diloco.protocol.visits import has_boundary_work, is_placed
from decoupled_diloco.runtime import now

PLACE_SECONDS = 5.0
"""Longest wait for a place without a look at the limit and at stop signals."""


@dataclass(frozen=True)
class LearnerProgress:
    """The progress of a learner and its run at one boundary.

    Attributes:
        steps: The learner's steps, including those of earlier processes if they are known.
        tokens: The learner's tokens, counted as ``steps``.
        discarded_tokens: Token-fragments whose training an overwrite discarded, divided by the
            number of fragments.
        global_step: The run's step.
        budget_reached: Whether the run's budget is spent.
        over: Whether every shard has finished.
        refused: Why the syncer rejects this process now; empty if it does not.
        goes_on: Whether the learner continues with another step.
    """

    steps: int = 0
    tokens: int = 0
    discarded_tokens: int = 0
    global_step: int = 0
    budget_reached: bool = False
    over: bool = False
    refused: str = ""
    goes_on: bool = True


class Boundary:
    """Executes step boundaries; see the module. Only the training thread uses it.

    Args:
        membership: The process's membership of the run.
        checkpointer: Takes its checkpoints.
        transfers: The state that it shares with other learners and takes from them.
        trained: The program's model.

    Attributes:
        stop_requested: From now on no step waits, and `LearnerProgress.goes_on` is false.
        applied: Fragment to version, for fragments applied since this was last emptied; read by the
            ranks that follow this one.
        untrained: Steps and tokens that the machine has counted but that will not be trained.
            Several ranks must agree on a step before they train it, so the machine counts it first.
    """

    def __init__(
        self,
        membership: Membership,
        checkpointer: Checkpointer,
        transfers: StateTransfers,
        trained: TrainedModel,
    ) -> None:
        self.membership = membership
        self.checkpointer = checkpointer
        self.trained = trained
        self.stop_requested = False
        self.applied: dict[int, str] = {}
        self.untrained = 0, 0
        self._transfers = transfers

    @property
    def progress(self) -> LearnerProgress:
        """The progress at this instant."""
        membership, before = self.membership, self.checkpointer.counted
        state, (steps, tokens) = membership.state, self.untrained
        return LearnerProgress(
            before.steps + state.step - steps,
            before.tokens + state.tokens - tokens,
            before.discarded_tokens + state.discarded_tokens // len(state.fragments),
            membership.shared.machine.global_step,
            state.ending,
            state.over,
            membership.background.refused,
            self.goes_on,
        )

    def count_from(self, steps: int, tokens: int) -> None:
        """Continue to count from the numbers of an earlier process."""
        own, before = self.membership.state, self.checkpointer.counted
        counted = Counted(steps - own.step, tokens - own.tokens, before.discarded_tokens)
        self.checkpointer.counted = counted

    @property
    def goes_on(self) -> bool:
        """Whether the learner continues with another step."""
        state = self.membership.state
        return not (self.stop_requested or state.ended or state.leaving or state.visit_over)

    def begin(self) -> None:
        """Execute the first boundary: restore or adopt a state, then apply what is newer.

        Raises:
            ConfigError: The checkpoint or the other learner's state does not fit this learner.
        """
        membership, trained = self.membership, self.trained
        restoring, provided = membership.background.restoring, False
        config = membership.shared.config
        trained.admit(membership.shared.tensors.plan, config.sync.merge.buffers != "local")
        if restoring:
            self.checkpointer.restore()
        elif self._transfers.taken is not None:
            self.checkpointer.adopt("the state provider", self._transfers.taken)
            self._transfers.taken = None
            provided = True
        self.at(Paused())
        if provided and trained.copies is not None:
            # The provider's optimizer keeps copies of the provider's weights.
            trained.copies.reset(trained.module.parameters())

    def settle_moments(self) -> None:
        """Let moments that arrived before the first step take effect after it.

        Raises:
            ConfigError: The optimizer has no such moments.
        """
        shared = self.membership.shared
        if shared.tensors.awaits_moments:  # no lock in any other step
            with self.membership.background.changed:
                shared.tensors.stepped(shared.machine.global_step)

    def at(self, event: StepFinished | Paused, loss: float | None = None) -> StepPlan:
        """Execute a boundary; a checkpoint of the run is taken first."""
        background, checkpointer = self.membership.background, self.checkpointer
        checkpointer.changing = True
        plan = background.submit(event, loss)
        checkpointer.changing = False
        if self.trained.last is not None:
            self.trained.last.mark()
        if plan.checkpoint is not None:
            # The run's checkpoint must hold the state before anything newer is applied. So the
            # machine orders the rest of this boundary only at the `Paused` that follows.
            self._keep_for_run(plan.checkpoint)
            rest = background.submit(Paused())
            plan = StepPlan(plan.orders + rest.orders, plan.hold or rest.hold)
        if plan.applied:
            fragments = self.membership.state.fragments
            self.applied |= {p: str(fragments[p].held) for p in plan.applied}
        return plan

    def pause(self) -> tuple[int, ...]:
        """Execute a boundary without a step; return the fragments that were applied."""
        return self.at(Paused()).applied

    def _keep_for_run(self, order: TakeCheckpoint) -> None:
        """Take this learner's part of a checkpoint of the run."""
        background, written = self.membership.background, self.keep(order.number)

        def report(part: Written) -> None:
            made = Done(order, Made(part.digest, part.nbytes))
            background.deliver_later(Failed(order, part.problem) if part.problem else made)

        if written is None:
            report(Written("", 0, "it keeps no checkpoints"))
        else:
            written.add_done_callback(lambda done: report(done.result()))

    def keep(self, run_checkpoint: int | None = None) -> Future[Written] | None:
        """Take a checkpoint now; see `Learner.checkpoint`."""
        outline = self.outline(run_checkpoint)
        if outline is None:
            return None
        return self.checkpointer.take(outline, self.membership.background.sample)

    def outline(self, run_checkpoint: int | None) -> LearnerCheckpoint | None:
        """Return the numbers and published copies of this boundary, without model and state.

        `None` before the learner holds a published copy of each fragment.
        """
        background, shared = self.membership.background, self.membership.shared
        steps, tokens = self.untrained
        with background.changed:
            state, tensors = shared.machine.state, shared.tensors
            # Until a shard has welcomed a device, its training is reported to no process.
            alone = all(link.offset is None for link in state.shards)
            unreported = (state.step, state.tokens) if alone else (0, 0)
            sent = [None if view.sent is None else view.sent.ask for view in state.fragments]
            fragments = [
                held_fragment(kept, published, tensors.kept_residual(p, sent[p]))
                for p, (kept, published) in enumerate(
                    zip(kept_fragments(state), tensors.published, strict=False)
                )
                if published is not None
            ]
        if len(fragments) < len(shared.tensors.published):
            return None
        progress = self.progress
        return LearnerCheckpoint(
            learner=self.membership.name,
            run=background.run_id,
            epoch=shared.machine.epoch,
            steps=progress.steps,
            tokens=progress.tokens,
            discarded_tokens=progress.discarded_tokens,
            global_step=progress.global_step,
            fragments=tuple(
                replace(held, steps=max(0, held.steps - steps), tokens=max(0, held.tokens - tokens))
                for held in fragments
            ),
            model={},
            run_checkpoint=run_checkpoint,
            alone=unreported,
        )

    async def take_place(self, waits: Waits, limit: float | None) -> None:
        """Wait until a device holds a place, and the newest copies that it has missed meanwhile.

        Raises:
            TransportError: It did not get a place in ``limit`` seconds.
        """
        membership, began = self.membership, now()
        state = membership.state
        if state.place is None:
            return
        with membership.background.changed:
            while not (is_placed(state) or state.ending or self.stop_requested):
                membership.raise_failure()
                if has_boundary_work(state):
                    self.pause()
                if limit is not None and now() - began > limit:
                    membership.check_place(limit)
                # Every message notifies the wait; its length is for the limit and for stop signals.
                await waits.wait(PLACE_SECONDS if limit is None else min(PLACE_SECONDS, limit))
        self.pause()

    async def hold(self, waits: Waits) -> tuple[int, ...]:
        """Wait for due copies; return the fragments applied meanwhile.

        The machine orders this wait only with the run's setting ``wait="at_overlap"``.
        """
        membership, applied = self.membership, tuple[int, ...]()
        with membership.background.changed:
            while not self.stop_requested and membership.state.holding:
                membership.raise_failure()
                applied += self.pause()
                if membership.state.holding:
                    await waits.wait(1.0)
        return applied
