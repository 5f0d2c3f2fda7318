"""The ranks that act as one learner: the interface `Party`, and `Solo` for a single process.

The party of a multi-rank learner is `ranks.rank_party.LeaderRank` on rank 0, and
`ranks.rank_party.FollowerRank` on the others. The training thread calls all methods.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import ClassVar, Protocol

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner import process
from decoupled_diloco.learner.boundary import Boundary, LearnerProgress
from decoupled_diloco.learner.checkpointer import Written
from decoupled_diloco.learner.data_leases import DataLeases
from decoupled_diloco.learner.ending import Closing
from decoupled_diloco.learner.membership import Admission
from decoupled_diloco.learner.reports import StepReports
from decoupled_diloco.protocol.leaving import ASKED_TO_STOP
from decoupled_diloco.protocol.messages import StepFinished
from decoupled_diloco.runtime import blocking, now
from decoupled_diloco.tape.samples import LossMeasured

logger = logging.getLogger(__name__)


class Party(Protocol):
    """The ranks that act as one learner.

    Attributes:
        closed: Whether this rank has left the run.
        addresses: The syncer's addresses.
        leases: The leases of data partitions for its loop.
    """

    closed: bool
    addresses: tuple[str, ...]
    leases: DataLeases

    ends_alone: ClassVar[bool]
    """Whether it may leave when its program ends or is asked to stop, as no other rank waits."""

    @property
    def name(self) -> str:
        """The learner's name in the run."""

    @property
    def admission(self) -> Admission:
        """The values that the run assigned to this learner."""

    @property
    def progress(self) -> LearnerProgress:
        """The progress at the last boundary that all ranks have executed."""

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment that the parameters were last aligned with."""

    async def join(self) -> None:
        """Return once the run has admitted this learner, and its parameters are the run's.

        Raises:
            DilocoError: The run rejects it, or a timeout has passed. The learner has then left.
        """

    async def step(self, tokens: int, loss: float | None) -> bool:
        """Handle a finished step; return whether the learner continues with another one."""

    def checkpoint(self, run_checkpoint: int | None) -> Future[Written] | None:
        """Take a checkpoint; see `Learner.checkpoint`."""

    def count_from(self, steps: int, tokens: int) -> None:
        """Continue to count from the numbers of an earlier process."""

    def request_stop(self) -> None:
        """Let no step wait any more, and make the next step the last; safe in a signal handler."""

    async def flush(self, seconds: float, why: str) -> bool:
        """Submit training that is not merged; return whether the shards accepted all of it.

        Args:
            seconds: How long to wait.
            why: The reason, for logs.
        """

    async def close(self) -> None:
        """Flush, take a last checkpoint and leave the run."""

    async def requests_stop(self, error: BaseException) -> bool:
        """Return whether an exception in the loop means that the process was asked to stop."""

    async def abort(self, error: BaseException) -> bool:
        """Leave the run because an exception has left the loop.

        Returns:
            Whether the only cause of the exception is that a stop signal ended a loader's worker.
        """

    def replaced(self) -> None:
        """Save and leave: another learner with the same name takes over in this process."""


class Solo:
    """The party of a single process, which executes its machine's orders at once.

    Args:
        boundary: Executes its boundaries.
        ending: Executes its end.
        reports: Reports each step.
    """

    ends_alone: ClassVar[bool] = True

    def __init__(self, boundary: Boundary, ending: Closing, reports: StepReports) -> None:
        self.closed = False
        self.boundary = boundary
        self.membership = boundary.membership
        self.addresses = self.membership.addresses
        self.leases = DataLeases(self.membership.background)
        self.ending = ending
        self._reports = reports

    @property
    def name(self) -> str:
        """See `Party`."""
        return self.membership.name

    @property
    def admission(self) -> Admission:
        """See `Party`."""
        return self.membership.admission

    @property
    def progress(self) -> LearnerProgress:
        """See `Party`."""
        return self.boundary.progress

    @property
    def versions(self) -> tuple[str, ...]:
        """See `Party`."""
        return self.membership.versions

    async def join(self) -> None:
        """See `Party`."""
        try:
            await self.membership.join()
            self.boundary.begin()
            await self.boundary.take_place(self, self.membership.join_timeout)
            self._reports.start(self)
        except BaseException:
            self.leave("", abrupt=True)
            raise

    async def wait(self, seconds: float) -> None:
        """See `Waits`."""
        await self.membership.wait(seconds)

    async def step(self, tokens: int, loss: float | None) -> bool:
        """See `Party`."""
        boundary, membership = self.boundary, self.membership
        membership.raise_failure()
        self._check_model()
        boundary.trained.check_optimizer()
        boundary.settle_moments()
        began = now()
        plan = boundary.at(StepFinished(tokens, self.leases.taken()), loss)
        applied = plan.applied + (await boundary.hold(self) if plan.hold else ())
        boundary.trained.applied(applied)
        if loss is not None:
            machine = membership.shared.machine
            measured = machine.state.step, machine.global_step, machine.state.tokens, loss
            membership.background.sample(LossMeasured(*measured))
        boundary.checkpointer.prepare()
        if boundary.checkpointer.due:
            boundary.keep()
        self._reports.stepped(began, applied, loss)
        return boundary.goes_on

    def _check_model(self) -> None:
        """Detect a change of the model before it is read or written."""
        try:
            self.boundary.trained.guard.check()
        except ConfigError as error:
            # Without this, `close` would submit the changed model.
            self.membership.background.fail(error)
            raise

    def checkpoint(self, run_checkpoint: int | None) -> Future[Written] | None:
        """See `Party`."""
        return self.boundary.keep(run_checkpoint)

    def count_from(self, steps: int, tokens: int) -> None:
        """See `Party`."""
        self.boundary.count_from(steps, tokens)

    def request_stop(self) -> None:
        """See `Party`."""
        self.boundary.stop_requested = True

    async def flush(self, seconds: float, why: str) -> bool:
        """See `Party`."""
        return not self.closed and await self.ending.flush(self, seconds, why)

    async def close(self) -> None:
        """See `Party`."""
        with process.workers_may_end():
            await self.ending.close(self)
            self.leases.close()
            shared = self.membership.background.shared
            visits = shared is not None and shared.machine.options.devices
            end = ASKED_TO_STOP if self.boundary.stop_requested else "its loop has ended"
            end = "its visit has ended" if visits else end
            self.leave("the run is over" if self.progress.over else end)

    async def requests_stop(self, error: BaseException) -> bool:
        """See `Party`."""
        boundary, background = self.boundary, self.membership.background
        if boundary.checkpointer.changing:
            return False  # the parameters are inconsistent, so nothing can be flushed
        if process.is_death_of_worker(error):  # the worker may have received the signal first
            deadline = now() + process.SAME_SECONDS
            with background.changed:
                while not boundary.stop_requested and now() < deadline:
                    await self.wait(0.05)
        return isinstance(error, KeyboardInterrupt | SystemExit) or boundary.stop_requested

    async def abort(self, error: BaseException) -> bool:
        """See `Party`."""
        in_order, farewell = False, f"{type(error).__name__} in the training loop"
        try:
            if await self.requests_stop(error):
                farewell = ASKED_TO_STOP
                with process.workers_may_end():
                    await self.ending.interrupted(self)
                in_order = self.boundary.stop_requested and process.is_death_of_worker(error)
        finally:
            self.leave(farewell, abrupt=True)
        return in_order

    def replaced(self) -> None:
        """See `Party`."""
        name = self.membership.name
        logger.warning("%s closes: another Learner with this name is created in this process", name)
        whole = not self.boundary.checkpointer.changing
        if self.membership.background.failure is None and whole:
            blocking(self.ending.keep_last(self))
        self.leave("another learner with its name takes over", abrupt=True)

    def leave(self, farewell: str, *, abrupt: bool = False) -> None:
        """Leave the run; further calls do nothing."""
        if self.closed:
            return
        self.closed = True
        self._reports.close()
        self.boundary.trained.close()
        self.membership.leave(farewell, abrupt=abrupt)
        self.boundary.checkpointer.close()
