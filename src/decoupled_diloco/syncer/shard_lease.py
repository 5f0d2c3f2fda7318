"""The lease by which a process acts for its shard: the shell around `ShardLeaseMachine`.

A process of a shard that has a standby first waits for its claim, then serves, and ends when it
loses it. Whatever others must be able to rely on is *fenced*: done while the claim is the newest,
and told of only if it still is. As the storage shows a claim to everybody once it is made, whoever
makes the next one finds what was told of before, whatever the clocks say.

An error that is not the storage's own answer ends the process, once: a lease that went on without
the answer to an order would wait forever.
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
from decoupled_diloco.storage.claims import ClaimStore
from decoupled_diloco.tape import TapeWriter

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class NoStandby:
    """What takes the lease's place where one process alone can act for a shard."""

    number = 0
    nonce = ""

    def holds(self) -> bool:
        """Always."""
        return True

    def fenced(self, task: Callable[[], _T]) -> Callable[[], _T]:
        """The task, as it is."""
        return task

    def when_lost(self, on_lost: Callable[[BaseException], None]) -> None:
        """Never."""

    async def ended(self) -> bool:
        """There is no claim that could say so."""
        return False


NO_STANDBY = NoStandby()


class ShardLease:
    """One process's claim to a shard.

    Args:
        store: The shard's claims.
        waits: Another process is meant to be first.
        tape: Where events go.

    Attributes:
        nonce: Of this process.
        number: Of our claim; 0 before `gained`.
        waited_seconds: How long the claim before ours was silent.
        run_over: There is nothing left to wait for.
    """

    def __init__(self, store: ClaimStore, tape: TapeWriter, *, waits: bool) -> None:
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
        self._driver.carry(Orders(LeaseEffect, self))
        self._worker = runtime().worker("claim")
        self._settled = asyncio.Event()
        self._on_lost: Callable[[BaseException], None] | None = None
        self._lost: BaseException | None = None
        self._raised = False

    async def gained(self) -> bool:
        """Waits for the claim; ``False``: the run is over, or `give_up` was called.

        Raises:
            Exception: The error that has ended the lease meanwhile.
        """
        self._driver.tell(Tick())
        await self._settled.wait()
        self._raise_failure()
        return self.number > 0

    def when_lost(self, on_lost: Callable[[BaseException], None]) -> None:
        """Sets the function that ends this process when the claim is lost or the lease fails."""
        self._on_lost = on_lost
        if self._lost is not None:
            self._report(self._lost)

    def give_up(self) -> None:
        """Waits no longer."""
        self._settled.set()

    def holds(self) -> bool:
        """Whether this process may act at this instant, by its own clock."""
        return self.machine.holds(now())

    def confirm(self) -> None:
        """Asks the storage too; for threads.

        Raises:
            LeaseError: Another process acts for the shard, or may do so.
            StorageError: The storage cannot be read.
        """
        newest = self.store.newest()
        if newest != self.number or not self.holds():  # break: claim-not-confirmed
            raise LeaseError(
                f"claim {self.number} is over (the newest is {newest}): nothing is done with it "
                "any more"
            )

    def fenced(self, task: Callable[[], _T]) -> Callable[[], _T]:
        """The task, done only while the claim is the newest, with no result if it is not any more.

        Raises:
            LeaseError: In the task: see `confirm`. What was done is told to nobody.
            StorageError: In the task: the storage cannot be read, and nothing was done.
        """

        def run() -> _T:
            self.confirm()
            result = task()
            try:
                self.confirm()  # break: claim-not-confirmed-after
            except StorageError as error:
                raise LeaseError(f"claim {self.number} cannot be confirmed: {error}") from error
            return result

        return run

    async def ended(self) -> bool:
        """Whether the run is over, and the coordinator has ended: by the claim of shard 0."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._ended)

    def _ended(self) -> bool:
        store = self.store
        of_coordinator = store.folder.with_name("shard-0")
        claims = ClaimStore(of_coordinator, self.nonce, store.lease_seconds, store.holder)
        try:
            return claims.look().condition == "finished"
        except StorageError:
            return False  # it is asked again

    async def end(self, *, finished: bool) -> None:
        """Gives the claim back, so that no process waits for it to run out.

        Raises:
            Exception: An error that has ended the lease and was not reported before.
        """
        self._on_lost = None  # the process that acted has ended: an error is raised here
        self._driver.tell(messages.HolderLeaves(finished))
        # A storage that does not answer is left alone after a while.
        await self._driver.finish(self.store.lease_seconds)
        self._worker.shutdown(wait=False, cancel_futures=True)
        self.tape.close()
        self._raise_failure()

    def _failed(self, error: BaseException) -> None:
        """Whoever waits for the lease, or acts by it, receives the error."""
        self._settled.set()
        self._report(error)

    def _report(self, error: BaseException) -> None:
        """Ends the process that acts by this claim; before there is one, the error is kept."""
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
            "nothing to wait for (%s): to go on with it, use --resume, or remove %s",
            order.why,
            self.store.folder,
        )
        self._settled.set()

    @executes(Note)
    def _note(self, order: Note) -> None:
        logger.warning("%s: %s", order.text, order.why)

    @executes(messages.Look, messages.Acquire, messages.Renew, messages.GiveBack)
    async def _ask(self, order: LeaseOrder) -> Done | Failed | None:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._answer, order)

    def _answer(self, order: LeaseOrder) -> Done | Failed | None:
        """What the storage says to an order."""
        store = self.store
        try:
            match order:
                case messages.Look():
                    return Done(order, store.look())
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
        except OSError as error:  # an order without an answer would hang for ever
            if isinstance(order, messages.GiveBack):
                logger.warning("the claim could not be given back: %s", error)
                return None
            return Failed(order, str(error))
        return None
