"""Whether other ranks must agree: `Solo`, the party of one process, and what every `Party` does.

The party of a learner of several ranks is `ranks.rank_party.LeaderRank` on rank 0, and
`ranks.rank_party.FollowerRank` on the others. All methods are called by the training thread.
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
from decoupled_diloco.protocol.messages import StepFinished
from decoupled_diloco.runtime import blocking, now
from decoupled_diloco.tape.samples import LossMeasured

logger = logging.getLogger(__name__)


class Party(Protocol):
    """The ranks that act as one learner.

    Attributes:
        closed: This rank has left the run.
        addresses: The syncer's addresses.
        leases: Where its loop gets leased data.
    """

    closed: bool
    addresses: tuple[str, ...]
    leases: DataLeases

    ends_alone: ClassVar[bool]
    """Whether it may leave when its program ends, or is asked to stop: no other rank waits then."""

    @property
    def name(self) -> str:
        """The learner's name in the run."""

    @property
    def admission(self) -> Admission:
        """What the run has given this learner."""

    @property
    def progress(self) -> LearnerProgress:
        """As of the last boundary that all ranks have carried out."""

    @property
    def versions(self) -> tuple[str, ...]:
        """The version of each fragment that the parameters were last aligned with."""

    async def join(self) -> None:
        """Returns once the run has let this learner in, and its parameters are the run's.

        Raises:
            Error: It does not; then it has left.
        """

    async def step(self, tokens: int, loss: float | None) -> bool:
        """A step is finished; returns whether another one is wanted."""

    def checkpoint(self, run_checkpoint: int | None) -> Future[Written] | None:
        """Takes a checkpoint: see `Learner.checkpoint`."""

    def count_from(self, steps: int, tokens: int) -> None:
        """Counts on from the numbers of an earlier process."""

    def request_stop(self) -> None:
        """No step waits any more, and the next one is the last. A signal's handler may call it."""

    async def flush(self, seconds: float, why: str) -> bool:
        """Submits what is trained and not merged; returns whether all was taken."""

    async def close(self) -> None:
        """Ends in order."""

    async def asks_to_stop(self, error: BaseException) -> bool:
        """Whether an exception in the loop means that the process was asked to stop."""

    async def abort(self, error: BaseException) -> bool:
        """An exception leaves the loop: leaves the run.

        Returns:
            Whether the exception is only that a signal to stop has ended a loader's workers.
        """

    def replaced(self) -> None:
        """Another learner with its name takes over in this process."""


class Solo:
    """One process alone: what its machine orders is done at once.

    Args:
        boundary: Its boundaries.
        ending: How it ends.
        reports: What others are told of each step.
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
        """Reports a change of the model before anything is read from it or written to it."""
        try:
            self.boundary.trained.guard.check()
        except ConfigError as error:
            # So `close` submits nothing of a model that is another one.
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
            self.leave("the run is over" if self.progress.over else "its loop has ended")

    async def asks_to_stop(self, error: BaseException) -> bool:
        """See `Party`."""
        boundary, background = self.boundary, self.membership.background
        if boundary.checkpointer.changing:
            return False  # it came while the parameters were changed
        if process.is_death_of_worker(error):  # the worker may have received the signal first
            deadline = now() + process.SAME_SECONDS
            with background.changed:
                while not boundary.stop_requested and now() < deadline:
                    await self.wait(0.05)
        return isinstance(error, KeyboardInterrupt | SystemExit) or boundary.stop_requested

    async def abort(self, error: BaseException) -> bool:
        """See `Party`."""
        in_order = False
        try:
            if await self.asks_to_stop(error):
                with process.workers_may_end():
                    await self.ending.interrupted(self)
                in_order = self.boundary.stop_requested and process.is_death_of_worker(error)
        finally:
            self.leave(f"{type(error).__name__} in the training loop", abrupt=True)
        return in_order

    def replaced(self) -> None:
        """See `Party`."""
        name = self.membership.name
        logger.warning(
            "%s: another Learner with this name is created in this process: this one closes", name
        )
        whole = not self.boundary.checkpointer.changing
        if self.membership.background.failure is None and whole:
            blocking(self.ending.keep_last(self))
        self.leave("another learner with its name takes over", abrupt=True)

    def leave(self, farewell: str, *, abrupt: bool = False) -> None:
        """Leaves the run; only the first call does anything."""
        if self.closed:
            return
        self.closed = True
        self._reports.close()
        self.boundary.trained.close()
        self.membership.leave(farewell, abrupt=abrupt)
        self.boundary.checkpointer.close()
