"""The leadership lease of a shard's process: the shell around `ShardLeaseMachine`.

With a standby, a process of a shard first waits for its claim, then serves, and ends when it loses
the claim. Work that other processes rely on is *fenced*. It is done while the claim is the newest,
and its result is used only if the claim is still the newest afterwards. The storage shows a claim
to all processes once it is made. So the process with the next claim finds every result that was
announced before, whatever the clocks show.

An error other than the storage's own answer ends the process, once: without the answer to an order,
the lease would wait forever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from decoupled_diloco.errors import LeaseError, StorageError
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.lease_machine import ShardLeaseMachine
from decoupled_diloco.protocol.messages import (
    Done,
    Failed,
    LeaseEffect,
    LeaseEvent,
    LeaseOrder,
    NewestClaim,
    Note,
    Tick,
)
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.shell.driver import Driver, Orders, executes
from decoupled_diloco.storage.claims import Claims
from decoupled_diloco.tape import TapeWriter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class NoStandby:
    """Stands in for the lease where only one process can act for a shard."""

    number = 0
    nonce = ""

    def holds(self) -> bool:
        """Return True."""
        return True

    def fenced(self, task: Callable[[], _T]) -> Callable[[], _T]:
        """Return the task unchanged."""
        return task

    def when_lost(self, on_lost: Callable[[BaseException], None]) -> None:
        """Do nothing: the lease cannot be lost."""

    async def ended(self) -> bool:
        """Return False: without claims, none can show that the run is over."""
        return False


NO_STANDBY = NoStandby()


class ShardLease:
    """One process's claim to a shard.

    Args:
        store: The shard's claims.
        tape: The tape of the lease's events.
        waits: Whether another process should make the first claim.

    Attributes:
        nonce: The nonce of this process.
        number: The number of this process's claim; 0 before `gained`.
        waited_seconds: How long the previous claim was silent.
        run_over: Whether there is nothing left to wait for.
    """

    def __init__(self, store: Claims, tape: TapeWriter, *, waits: bool) -> None:
        self.store = store
        self.nonce = store.nonce
        self.number = 0
        self.waited_seconds = 0.0
        self.run_over = False
        self.machine = ShardLeaseMachine(store.nonce, store.lease_seconds, waits=waits)
        self.tape = tape
        self._driver = Driver[LeaseEvent, LeaseEffect](
            self.machine, tape=tape, on_failure=self._failed
        )
        self._driver.set_handlers(Orders(LeaseEffect, self))
        self._worker = runtime().worker("claim")
        self._settled = asyncio.Event()
        self._on_lost: Callable[[BaseException], None] | None = None
        self._lost: BaseException | None = None
        self._raised = False

    async def gained(self) -> bool:
        """Wait for the claim; return ``False`` if the run is over or `give_up` was called.

        Raises:
            Exception: The error that ended the lease in the meantime.
        """
        self._driver.deliver(Tick())
        await self._settled.wait()
        self._raise_failure()
        return self.number > 0

    def when_lost(self, on_lost: Callable[[BaseException], None]) -> None:
        """Set the function that ends this process when the claim is lost or the lease fails."""
        self._on_lost = on_lost
        if self._lost is not None:
            self._report(self._lost)

    def give_up(self) -> None:
        """Stop waiting for the claim."""
        self._settled.set()

    def holds(self) -> bool:
        """Whether this process may act at this instant, by its own clock."""
        return self.machine.holds(now())

    def confirm(self) -> None:
        """Check the storage as well; for threads.

        Raises:
            LeaseError: Another process acts for the shard, or may do so.
            StorageError: The storage cannot be read.
        """
        newest = self.store.newest()
        if newest != self.number or not self.holds():  # break: claim-not-confirmed
            raise LeaseError(
                f"claim {self.number} is over (the newest is {newest}): this process no longer "
                "acts for the shard"
            )

    def fenced(self, task: Callable[[], _T]) -> Callable[[], _T]:
        """Return a task that runs only while the claim is the newest.

        It returns a result only if the claim is still the newest afterwards.

        Raises:
            LeaseError: In the task; see `confirm`. The result is not announced to any process.
            StorageError: In the task: the storage cannot be read, and nothing was done.
        """

        def run() -> _T:
            self.confirm()
            result = task()
            # Again: a process with a newer claim may have read the storage during the task, and
            # would miss the result.
            try:
                self.confirm()  # break: claim-not-confirmed-after
            except StorageError as error:
                raise LeaseError(f"claim {self.number} cannot be confirmed: {error}") from error
            return result

        return run

    async def ended(self) -> bool:
        """Whether shard 0's claim shows that the run is over and the coordinator has ended."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._ended)

    def _ended(self) -> bool:
        try:
            return self.store.of_shard(0).read_newest().condition == "finished"
        except StorageError:
            return False  # the caller tries again later

    async def end(self, *, finished: bool) -> None:
        """Release the claim, so that no process waits until it expires.

        Args:
            finished: Whether the run is over.

        Raises:
            Exception: An error that ended the lease and was not reported before.
        """
        self._on_lost = None  # the process that acted has ended: an error is raised here
        self._driver.deliver(messages.HolderLeaves(finished))
        # If the storage does not answer, the claim expires by itself.
        await self._driver.finish(self.store.lease_seconds)
        self._worker.shutdown(wait=False, cancel_futures=True)
        self.tape.close()
        self._raise_failure()

    def _failed(self, error: BaseException) -> None:
        """Report an error to the caller of `gained`, or to the process that acts by this claim."""
        self._settled.set()
        self._report(error)

    def _report(self, error: BaseException) -> None:
        """End the process that acts by this claim; the error is kept until there is one."""
        if self._on_lost is None:
            self._lost = error
            return
        self._raised = self._raised or error is self._driver.failure
        self._on_lost(error)

    def _raise_failure(self) -> None:
        error = self._driver.failure
        if error is not None and not self._raised:
            self._raised = True
            raise error

    @executes(messages.Activate)
    def _activate(self, order: messages.Activate) -> None:
        self.number, self.waited_seconds = order.number, order.waited_seconds
        logger.info("this process acts for the shard (%s)", order.why)
        self._settled.set()

    @executes(messages.StepDown)
    def _step_down(self, order: messages.StepDown) -> None:
        self._settled.set()
        self._report(LeaseError(f"this process no longer acts for its shard: {order.why}"))

    @executes(messages.StandDown)
    def _stand_down(self, order: messages.StandDown) -> None:
        self.run_over = True
        logger.info(
            "nothing to wait for (%s): to continue the run, use --resume, or remove %s",
            order.why,
            self.store.place,
        )
        self._settled.set()

    @executes(Note)
    def _note(self, order: Note) -> None:
        logger.warning("%s: %s", order.text, order.why)

    @executes(messages.Look, messages.Acquire, messages.Renew, messages.GiveBack)
    async def _execute(self, order: LeaseOrder) -> Done | Failed | None:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._answer, order)

    def _answer(self, order: LeaseOrder) -> Done | Failed | None:
        """Execute an order on the storage and return the answer."""
        store = self.store
        try:
            match order:
                case messages.Look():
                    return Done(order, store.read_newest())
                case messages.Acquire(number):
                    if store.claim(number):
                        return Done(order)
                    return Failed(order, "another process was faster")
                case messages.Renew(number, renewals):
                    store.renew(number, renewals)
                    return Done(order, NewestClaim(store.newest()))
                case messages.GiveBack(number, finished):
                    condition: messages.Condition = "finished" if finished else "released"
                    store.renew(number, self.machine.state.renewals, condition)
        except OSError as error:  # an order without an answer would hang forever
            if isinstance(order, messages.GiveBack):
                logger.warning("the claim could not be released and expires by itself: %s", error)
                return None
            return Failed(order, str(error))
        return None
