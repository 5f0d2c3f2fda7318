"""The end of a learner: it flushes, waits for the end of the run, and takes a last checkpoint.

All of it runs on the training thread, in `Learner.close`, `Learner.flush`, and when an exception
leaves the training loop. It waits by its `Party`, so that the ranks that follow rank 0 can execute
orders meanwhile.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

from decoupled_diloco.learner.boundary import Boundary, LearnerProgress
from decoupled_diloco.learner.membership import Waits
from decoupled_diloco.protocol.leaving import ASKED_TO_STOP, drained, unmerged_tokens
from decoupled_diloco.protocol.messages import DrainAsked, VisitEnded
from decoupled_diloco.runtime import now

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 30.0
"""Time that `close` waits for the closing sweep while no shard is reachable."""

END_PATIENCE_SECONDS = 3.0
"""Least time that `close` waits for the run's clock to move, if the budget is nearly reached."""

END_SECONDS = 60.0
"""Time that `close` waits for the run's end, if this learner has made all steps of the budget."""

CHECKPOINT_SECONDS = 30.0
"""Time that `close` waits for the checkpoint that is being written."""


class Closing:
    """Ends a learner; see the module.

    Args:
        boundary: The learner's boundaries.
        flush_seconds: How long to wait until the shards have accepted the unmerged training.
    """

    def __init__(self, boundary: Boundary, flush_seconds: float) -> None:
        self._boundary = boundary
        self._membership = boundary.membership
        self._background = boundary.membership.background
        self._flush_seconds = flush_seconds

    async def close(self, party: Waits) -> None:
        """Do what `Learner.close` does before the learner leaves the run."""
        trained = self._boundary.trained
        optimizers = trained.optimizers
        mode = nullcontext(False) if optimizers is None else optimizers.in_training_mode()
        with mode as changed:
            if changed and trained.last is not None:
                trained.last.mark()
            if self._background.failure is None:
                await self._submit_last(party)
            if changed and self._membership.state.over and trained.copies is not None:
                # So that leaving the mode keeps the run's final weights.
                trained.copies.reset(trained.module.parameters())

    async def interrupted(self, party: Waits) -> None:
        """Flush and save after an exception that means a request to stop has left the loop."""
        await self.flush(party, self._flush_seconds, ASKED_TO_STOP)
        await self.keep_last(party)

    async def _submit_last(self, party: Waits) -> None:
        boundary = self._boundary
        if self._weights_replaced():
            return
        devices = self._membership.shared.machine.options.devices
        if not (boundary.stop_requested or devices):  # a device does not stay for the run's end
            await self._await_the_end(party)
        if boundary.progress.budget_reached:
            await self.finish(party)
            await self._await_write(party)
        else:
            await self.flush(party, self._flush_seconds, ASKED_TO_STOP)
            progress = boundary.progress
            early = not boundary.stop_requested and progress.steps and not progress.budget_reached
            if early and not devices:
                self._warn_of_early_end(progress)
            self._background.submit(VisitEnded())
            await self.keep_last(party)

    async def keep_last(self, party: Waits) -> None:
        """Write a last checkpoint, if this learner takes any."""
        self._boundary.keep()
        await self._await_write(party)

    async def flush(self, party: Waits, seconds: float, why: str) -> bool:
        """See `Learner.flush`."""
        background, deadline = self._background, now() + seconds
        if seconds <= 0 or background.failure is not None or self._boundary.progress.budget_reached:
            return False
        if self._weights_replaced():
            return False
        background.submit(DrainAsked(why))
        machine = self._membership.shared.machine
        with background.changed:
            while now() < deadline and background.failure is None:
                self._boundary.pause()
                if drained(machine.state, machine.options):
                    break
                await party.wait(min(0.1, seconds))
        state = machine.state
        return drained(state, machine.options) and not any(link.dismissed for link in state.shards)

    def _weights_replaced(self) -> bool:
        """Return whether the model's weights were replaced since its last step; if so, log it."""
        last = self._boundary.trained.last
        if last is None or not last.replaced():
            return False
        logger.warning(
            "The weights of %s were replaced after its last step, so they are not submitted, and "
            "its training since its last contribution is discarded. To submit it, close the "
            "learner before you load other weights (a best checkpoint, an average)",
            self._membership.name,
        )
        return True

    async def _await_the_end(self, party: Waits) -> None:
        """Wait for the closing sweep, if this learner has done its share of the run's budget.

        The run ends a little later than this learner's last step: the report of the step must
        arrive, and other learners may be a few steps behind. The wait lasts while the run's clock
        moves, at most `END_SECONDS`. It ends early if other learners are far behind.
        """
        if not self._has_done_its_share(self._boundary.progress):
            return
        began, state = now(), self._membership.state
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
                self._boundary.pause()
                await party.wait(0.1)

    def _has_done_its_share(self, progress: LearnerProgress) -> bool:
        """Estimate whether the run's budget is nearly spent.

        A learner does not receive the run's tokens. So it assumes that each learner has trained as
        many tokens as it has itself.
        """
        run = self._membership.shared.config.run
        overlap = self._membership.shared.machine.options.overlap
        if run.max_steps is not None and progress.global_step >= run.max_steps - overlap:
            return True
        if run.max_tokens is None or not progress.steps:
            return False
        soon = progress.tokens * (1 + overlap / progress.steps)
        return self._background.count * soon >= run.max_tokens

    @property
    def _clock(self) -> int:
        return min(link.clock for link in self._membership.state.shards)

    def _warn_of_early_end(self, progress: LearnerProgress) -> None:
        """Log that the program's data or steps have ended before the run's budget."""
        run = self._membership.shared.config.run
        if run.max_steps is not None:
            budget = f"step {progress.global_step} of {run.max_steps}"
        else:
            budget = f"its tokens: {progress.tokens}, the run's budget: {run.max_tokens}"
        kept = self._boundary.checkpointer.folder is not None
        logger.warning(
            "%s leaves the run before its budget is reached (%s): %d of its tokens are not merged "
            "and are discarded%s. Its model is not the run's result, which the syncer writes to "
            "the run folder. Train until step() returns False, or pass Timeouts(flush=…) to merge "
            "the last steps",
            self._membership.name,
            budget,
            unmerged_tokens(self._membership.state),
            " unless it restarts from its checkpoint" if kept else "",
        )

    async def finish(self, party: Waits) -> None:
        """Wait for what the closing sweep publishes, and apply it."""
        background, state = self._background, self._membership.state
        deadline = now() + FAREWELL_SECONDS
        with background.changed:
            # break: last-copies-not-awaited
            while not state.over and background.failure is None:
                self._boundary.pause()
                if any(shard.linked for shard in state.shards):
                    deadline = now() + FAREWELL_SECONDS
                elif now() > deadline:
                    name = self._membership.name
                    logger.warning("%s leaves before the run ends: no shard is reachable", name)
                    return
                if not state.over:
                    await party.wait(1.0)
        await self._take_last(party)

    async def _take_last(self, party: Waits) -> None:
        """Wait for published copies that are still in transit when the shards are finished."""
        state = self._membership.state
        with self._background.changed:
            while any(view.fetching is not None for view in state.fragments):
                if self._background.failure is not None:
                    return
                if not any(shard.linked for shard in state.shards):
                    break
                await party.wait(1.0)
        self._boundary.pause()

    async def _await_write(self, party: Waits) -> None:
        """Wait for the checkpoint that is being written, at most `CHECKPOINT_SECONDS`."""
        writing, background = self._boundary.checkpointer.writing, self._background
        deadline = now() + CHECKPOINT_SECONDS
        if writing is None:
            return
        writing.add_done_callback(lambda done: background.wake())
        with background.changed:
            while not writing.done() and now() < deadline:
                await party.wait(max(0.0, deadline - now()))
