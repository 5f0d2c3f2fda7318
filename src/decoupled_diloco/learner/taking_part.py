"""What a learner does at its step boundaries, and when it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from torch import nn

from decoupled_diloco.learner.checkpoint import LearnerCheckpoint
from decoupled_diloco.learner.checkpointer import Checkpointer, Written, held_fragment
from decoupled_diloco.learner.last_weights import LastWeights
from decoupled_diloco.learner.participation import Participation
from decoupled_diloco.learner.plan import StepPlan
from decoupled_diloco.learner.transfers import StateTransfers
from decoupled_diloco.learner.weight_copies import WeightCopies
from decoupled_diloco.protocol.checkpoints.events import PartWritten
from decoupled_diloco.protocol.draining import drained, unmerged_tokens
from decoupled_diloco.protocol.events import DrainAsked, Paused, StepFinished
from decoupled_diloco.protocol.recovery import kept as kept_fragments
from decoupled_diloco.runtime import now

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 30.0
"""How long `close` waits for the closing sweep while no shard is reachable."""

END_PATIENCE_SECONDS = 3.0
"""How long `close` waits at least for the run's clock to move, if the budget is nearly reached."""

END_SECONDS = 60.0
"""How long `close` waits for the run's end, if this learner has made all steps of the budget."""


class TakingPart(Participation):
    """`Learner` without its public face: boundaries, checkpoints, hand-in, the closing sweep."""

    _checkpointer: Checkpointer
    _transfers: StateTransfers
    _model: nn.Module
    _last: LastWeights | None = None
    _copies: WeightCopies | None = None
    """Weights that the inner optimizers keep, and that follow the applied ones."""
    _after_apply: Callable[[tuple[int, ...]], None] | None
    _waits: bool
    """Whether a step may wait at all; see `Learner.stop_waiting`."""

    @property
    def steps(self) -> int:
        """This learner's own steps, those of earlier lives included if they are known."""
        return self._checkpointer.counted.steps + self._shared.machine.state.step

    @property
    def tokens(self) -> int:
        """This learner's own tokens, those of earlier lives included if they are known."""
        return self._checkpointer.counted.tokens + self._shared.machine.state.tokens

    @property
    def discarded_tokens(self) -> int:
        """Token-fragments whose training an overwrite threw away, divided by the fragments."""
        state = self._shared.machine.state
        own = state.discarded_tokens // len(state.fragments)
        return self._checkpointer.counted.discarded_tokens + own

    @property
    def epoch(self) -> int:
        """The epoch that the coordinator gave this process."""
        return self._shared.machine.epoch

    @property
    def index(self) -> int:
        """This learner's number in the run, from 0 to `count` - 1.

        The coordinator gives every new name the lowest free number. A learner that is started
        again under the same name has the same number. All ranks of a learner have one number.

            torch.manual_seed(1337 + learner.index)  # its own data

        A name that the learner chose itself (``learner_id=None``) is new in each process, and so
        is its number: give names if the number selects a part of a data set.
        """
        return self._background.index

    @property
    def count(self) -> int:
        """How many learners the run has, at least 1, as of this learner's join.

        That is the run's setting ``learners``, or the number of names that have ever joined, if
        that is more. It does not change while this process runs.
        """
        return self._background.count

    async def _begin(self) -> None:
        """The first boundary: what an earlier life has kept, then what is newer."""
        restoring, donated = self._background.restoring, False
        if restoring:
            self._checkpointer.restore()
        elif self._transfers.taken is not None:
            self._checkpointer.adopt("the donor", self._transfers.taken)
            self._transfers.taken = None
            donated = True
        applied = self._at_boundary(Paused()).applied
        if donated and self._copies is not None:
            self._copies.reset(self._model.parameters())  # They were beside the donor's weights.
        if restoring and self._after_apply is not None:
            self._after_apply(applied)

    def _at_boundary(self, event: StepFinished | Paused, loss: float | None = None) -> StepPlan:
        """Carries a boundary out; its part of a checkpoint comes first."""
        background = self._background
        self._checkpointer.changing = True
        plan = background.tell(event, loss)
        self._checkpointer.changing = False
        if self._last is not None:
            self._last.mark()
        if plan.checkpoint is None:
            return plan
        number, written = plan.checkpoint, self._keep(plan.checkpoint)

        def tell(part: Written) -> None:
            background.tell_later(PartWritten(number, part.digest, part.nbytes, part.problem))

        if written is None:
            tell(Written("", 0, "it keeps no checkpoints"))
        else:
            written.add_done_callback(lambda done: tell(done.result()))
        rest = background.tell(Paused())
        return StepPlan(plan.orders + rest.orders, plan.hold or rest.hold)

    def _boundary(self) -> bool:
        return bool(self._at_boundary(Paused()).applied)

    def _keep(self, run_checkpoint: int | None) -> Future[Written] | None:
        outline = self._outline(run_checkpoint)
        return (
            None if outline is None else self._checkpointer.take(outline, self._background.sample)
        )

    def _outline(self, run_checkpoint: int | None) -> LearnerCheckpoint | None:
        """The numbers and published copies of this boundary; `None` before all are held."""
        background, shared = self._background, self._shared
        with background.changed:
            state, tensors = shared.machine.state, shared.tensors
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
        return LearnerCheckpoint(
            learner=self.name,
            run=background.run_id,
            epoch=self.epoch,
            steps=self.steps,
            tokens=self.tokens,
            discarded_tokens=self.discarded_tokens,
            global_step=self.global_step,
            fragments=tuple(fragments),
            model={},
            run_checkpoint=run_checkpoint,
        )

    async def _hold(self) -> tuple[int, ...]:
        """Waits for what is due; only with the run's setting ``wait="at_overlap"``."""
        background, applied = self._background, tuple[int, ...]()
        with background.changed:
            while self._waits and self._shared.machine.state.holding:
                self._raise_failure()
                applied += self._at_boundary(Paused()).applied
                if self._shared.machine.state.holding:
                    await self._wait(1.0)
        return applied

    async def _hand_in(self, seconds: float, why: str) -> bool:
        background, deadline = self._background, now() + seconds
        if seconds <= 0 or background.failure is not None or self.finished or self._closed:
            return False
        if self._weights_replaced():
            return False
        background.tell(DrainAsked(why))
        with background.changed:
            while now() < deadline and background.failure is None:
                self._boundary()
                if drained(self._shared.machine.state, self._shared.machine.options):
                    break
                await self._wait(min(0.1, seconds))
        state, options = self._shared.machine.state, self._shared.machine.options
        return drained(state, options) and not any(link.dismissed for link in state.shards)

    def _weights_replaced(self) -> bool:
        """Whether the model holds other weights than at the last step, which is logged."""
        if self._last is None or not self._last.replaced():
            return False
        logger.warning(
            "The weights of %s were replaced after its last step, so they are not submitted, and "
            "what it trained since its last contribution is discarded. To submit that, close the "
            "learner before other weights (a best checkpoint, an average) are loaded",
            self.name,
        )
        return True

    async def _await_the_end(self) -> None:
        """Waits for the closing sweep, if this learner has done its part of the run's budget.

        The run ends a little later than this learner's last step: the report of the step must
        arrive, and other learners may be a few steps behind. It waits as long as the run's clock
        moves, at most `END_SECONDS`, and not at all for learners that are far behind.
        """
        shared, began = self._shared, now()
        state = shared.machine.state
        if not self._has_done_its_part():
            return
        pace = max((link.tick_seconds.value or 0.0 for link in state.shards), default=0.0)
        patience = max(END_PATIENCE_SECONDS, 10 * pace, 10 * (state.step_seconds.value or 0.0))
        with self._background.changed:
            clock, moved = self._clock, now()
            while not state.ending and self._background.failure is None:
                if self._clock > clock:
                    clock, moved = self._clock, now()
                late = now() - moved > patience or now() - began > END_SECONDS
                if late or not any(link.linked for link in state.shards):
                    return
                self._boundary()
                await self._wait(0.1)

    def _has_done_its_part(self) -> bool:
        """Whether the run's budget is nearly spent, as far as a learner can know.

        It does not know the run's tokens, so all learners are assumed to train as many as this one.
        """
        run, overlap = self._shared.config.run, self._shared.machine.options.overlap
        if run.budget_steps is not None and self.global_step >= run.budget_steps - overlap:
            return True
        if run.budget_tokens is None or not self.steps:
            return False
        soon = self.tokens * (1 + overlap / self.steps)
        return self.count * soon >= run.budget_tokens

    @property
    def _clock(self) -> int:
        return min(link.clock for link in self._shared.machine.state.shards)

    def _warn_of_early_end(self) -> None:
        """The program's data or steps have ended before the run's budget."""
        run = self._shared.config.run
        if run.budget_steps is not None:
            budget = f"step {self.global_step} of {run.budget_steps}"
        else:
            budget = f"{self.tokens} tokens of its own, while the run's budget is " + (
                f"{run.budget_tokens}"
            )
        logger.warning(
            "%s leaves the run before its budget is reached (%s): %d of its tokens are not merged "
            "and are discarded%s, and its model is not the run's result, which the syncer writes "
            "to the run folder; train until step() returns False, or give hand_in_seconds= to "
            "merge the last steps",
            self.name,
            budget,
            unmerged_tokens(self._shared.machine.state),
            "" if self._checkpointer.folder is None else " unless it restarts from its checkpoint",
        )

    async def _finish(self) -> None:
        background = self._background
        deadline = now() + FAREWELL_SECONDS
        with background.changed:
            while not self.over and background.failure is None:  # break: last-copies-not-awaited
                self._boundary()
                if any(shard.linked for shard in self._shared.machine.state.shards):
                    deadline = now() + FAREWELL_SECONDS
                elif now() > deadline:
                    logger.warning("%s leaves before the end: no shard is reachable", self.name)
                    return
                if not self.over:
                    await self._wait(1.0)
        await self._take_last()

    async def _take_last(self) -> None:
        """The last published copies may still be on their way when the shards are finished."""
        state = self._shared.machine.state
        with self._background.changed:
            while any(view.fetching is not None for view in state.fragments):
                if self._background.failure is not None:
                    return
                if not any(shard.linked for shard in state.shards):
                    break
                await self._wait(1.0)
        self._boundary()

    async def _written(self, seconds: float) -> None:
        """Waits at most so long for the checkpoint that is being written."""
        writing, background, deadline = (
            self._checkpointer.writing,
            self._background,
            now() + seconds,
        )
        if writing is None:
            return
        writing.add_done_callback(lambda done: background.wake())
        with background.changed:
            while not writing.done() and now() < deadline:
                await self._wait(max(0.0, deadline - now()))
