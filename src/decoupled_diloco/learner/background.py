"""The background of a learner or observer: one thread, one event loop, all of its connections.

The trainer and the background share one `LearnerMachine`, and the driver's monitor is its lock. The
lock is held for a decision and for what must happen with it: the orders of a step boundary, and
copies of what is sent. The event loop executes all other orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from decoupled_diloco.config.addresses import reached_by, relays_among
from decoupled_diloco.config.method import (
    mechanism_of,
    options_of,
    plan_of,
    read_public,
)
from decoupled_diloco.errors import DilocoError, ProtocolError, TransportError
from decoupled_diloco.learner.checkpointer import Checkpointer, log_recovery
from decoupled_diloco.learner.connections import (
    CoordinatorSession,
    ProcessIdentity,
    ShardLinks,
    require_valid_from_coordinator,
)
from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.learner.learner_model import layout_text
from decoupled_diloco.learner.masked_sums import require_for_sums
from decoupled_diloco.learner.option_groups import Timeouts
from decoupled_diloco.learner.parameter_store import ParameterStore
from decoupled_diloco.learner.payloads import BodyExchange
from decoupled_diloco.learner.shared import Context, Shared, StepPlan, header_of, with_loss
from decoupled_diloco.learner.transfers import StateTransfers
from decoupled_diloco.merge import Layout
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.learner_machine import LearnerMachine
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    CopyState,
    ForgetCheckpoints,
    TakeCheckpoint,
    shard_of,
)
from decoupled_diloco.protocol.wire import encode
from decoupled_diloco.runtime import Beside, now, runtime
from decoupled_diloco.shell.driver import Driver, Orders, at_decision, executes
from decoupled_diloco.tape import FLUSH_SECONDS, TapeWriter
from decoupled_diloco.tape.samples import BytesMoved, Sample
from decoupled_diloco.transport.interface import Client

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NO_MAIN_THREAD = (
    "the program's main thread has ended, and the exchange stops with it: let it join the thread "
    "that trains"
)

STATS_SECONDS = 5.0
"""Interval at which the bytes moved are written to the tape."""


class Background:
    """Connections, transfers and the event loop's thread.

    Args:
        identity: Identity of this process.
        addresses: Addresses of one or several shards; each can refer to the coordinator.
        store: The parameters.
        client: Creates the transport's client; called in the event loop.
        tape: Creates the event tape from its header; ``None``: write none.
        timeouts: How long to wait for the run.
        exchange: Creates the object that executes orders about payloads.
        checkpointer: A learner's checkpointer; ``None`` for observers.
        transfers: The state that a learner shares with others and takes from them.

    Attributes:
        restoring: The learner continues from its own checkpoint, which the trainer restores.
        links: The connections to the shards.
        bodies: Executes the orders about payloads.
        run_id: Id of the run; empty before the run has admitted this process.
        index: The number of this learner's name in the run.
        count: Number of learners that the run expected when it first admitted this process.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        addresses: tuple[str, ...],
        store: ParameterStore,
        *,
        client: Callable[[], Client],
        tape: Callable[[dict[str, Any]], TapeWriter] | None,
        timeouts: Timeouts,
        exchange: Callable[[Context], BodyExchange] = BodyExchange,
        checkpointer: Checkpointer | None = None,
        transfers: StateTransfers | None = None,
    ) -> None:
        self.checkpointer = checkpointer
        self._transfers = transfers or StateTransfers({})
        self.restoring = False
        self.run_id = ""
        self.index, self.count = 0, 1
        self.identity = identity
        self.changed = runtime().monitor()
        self.shared: Shared | None = None
        self.failure: DilocoError | None = None
        self.ready = False
        self._addresses = addresses
        self._store = store
        self._make_client = client
        self._make_tape = tape
        self._tape: TapeWriter | None = None
        self._disconnect_seconds = timeouts.disconnect
        self._worker = runtime().worker("ddiloco-codec")
        self.links = ShardLinks(identity, self)
        self.bodies = exchange(self)
        self._boundary: list[messages.LearnerEffect] | None = None
        self._loss: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stop_asked = False
        self._beside: Beside | None = None
        self._client: Client | None = None
        self._coordinator = CoordinatorSession(
            identity,
            layout_text(store.layout),
            addresses,
            self,
            timeouts,
        )

    def start(self) -> None:
        """Start the event loop's thread."""
        self._beside = runtime().beside(self._run, "ddiloco")

    def submit(self, event: messages.LearnerEvent, loss: float | None = None) -> StepPlan:
        """Pass a fact to the machine and execute the boundary; ``loss`` is for the report.

        Orders for the tensors run under the lock, together with the decision. The caller must
        execute what the returned plan has left.
        """
        shared = self._require_shared()
        with self.changed:
            orders = self._boundary = []
            self._loss = loss
            try:
                shared.driver.decide(event)
            finally:
                self._boundary = self._loss = None
        for order in orders:
            if isinstance(order, CopyState):
                self._transfers.copy(order)
                shared.driver.in_loop(shared.driver.spawn, self._transfers.serve(order))
        shared.driver.wake()
        return StepPlan.of(orders)

    def _in_loop(self, work: Callable[[], None]) -> None:
        """Call ``work`` in the event loop, if there is one."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                self._loop.call_soon_threadsafe(work)

    def _broken(self, error: BaseException) -> None:
        if isinstance(error, DilocoError):
            self.fail(error)
            return
        logger.error("the background of %s failed", self.identity.name, exc_info=error)
        self.fail(DilocoError(f"the background of {self.identity.name} failed: {error!r}"))

    def sample(self, sample: Sample) -> None:
        """Write a measurement to the tape."""
        with self.changed:
            if self._tape is not None:
                self._tape.sample(now(), sample)

    def stop(self, farewell: str, *, abrupt: bool = False, wait_seconds: float = 5.0) -> None:
        """Leave the shards, close all connections and end the thread.

        Args:
            farewell: The reason to send to the shards; empty: send nothing.
            abrupt: An exception may have occurred between a decision and its record. The tape ends
                here, so that its content can be replayed exactly.
            wait_seconds: How long to wait for the thread, whose peer may not answer.
        """
        with self.changed:
            if abrupt:
                self._end_tape()

        self._stop_asked = True
        self._in_loop(partial(self._leave, farewell))
        if self._beside is not None:
            self._beside.join(wait_seconds)
        self._worker.shutdown(wait=False, cancel_futures=True)
        with self.changed:
            self._end_tape()

    def _leave(self, farewell: str) -> None:
        for channel in self.links.channels.values():
            if farewell:
                channel.send(encode(messages.Leave(farewell)))
        assert self._stop is not None, "the loop runs"
        self._stop.set()

    def _end_tape(self) -> None:
        if self._tape is not None and self.shared is not None:
            self.shared.driver.unrecorded()
            self._tape.close()
            self._tape = None

    def deliver(self, event: messages.LearnerEvent) -> None:
        """See `Context`."""
        self._require_shared().driver.deliver(event)

    @at_decision(messages.Apply, messages.Snapshot)
    def _change_or_copy(self, order: messages.Apply | messages.Snapshot) -> None:
        tensors = self.tensors
        if isinstance(order, messages.Apply):
            tensors.apply(order.fragment, order.mode)
        else:
            tensors.snapshot(order.fragment)
        self._of_the_boundary(order)

    @at_decision(TakeCheckpoint, CopyState)
    def _of_the_boundary(self, order: messages.LearnerEffect) -> None:
        assert self._boundary is not None, "only a step boundary orders this"
        self._boundary.append(order)

    @at_decision(messages.Hold, messages.Release, messages.EndTraining)
    def _for_the_trainer(self, order: messages.LearnerEffect) -> None:
        """Add the order to the boundary; outside of one, the machine's state has it."""
        if self._boundary is not None:
            self._boundary.append(order)

    @at_decision(messages.Send)
    def _with_loss(self, order: messages.Send) -> messages.Message:
        """Return the message; the report of a step receives the step's loss."""
        message: messages.Message = order.message
        return message if self._loss is None else with_loss(message, self._loss)

    @executes(messages.Send)
    def _send(self, order: messages.Send, message: messages.Message) -> None:
        if order.peer == COORDINATOR:
            self._coordinator.send(message)
        else:
            self.links.send(shard_of(order.peer), message)

    @executes(messages.Ready)
    def _mark_ready(self, order: messages.Ready) -> None:
        with self.changed:
            self.ready = True
            self.changed.notify()

    @executes(messages.Note)
    def _note(self, order: messages.Note) -> None:
        level = logging.WARNING if order.warns else logging.INFO
        logger.log(level, "%s: %s (%s)", self.identity.name, order.text, order.why)

    @executes(messages.Recovered)
    def _recovered(self, order: messages.Recovered) -> None:
        log_recovery(self.identity.name, order)

    @executes(ForgetCheckpoints)
    def _forget_checkpoints(self, order: ForgetCheckpoints) -> None:
        if self.checkpointer is not None:
            self.checkpointer.forget_checkpoints(order.keep, order.before)

    @executes(messages.Expelled, messages.Relabel, messages.RunOver)
    def _ignore(self, order: messages.LearnerEffect) -> None:
        """Do nothing: the machine's state or the connection already has the same information."""

    def fetch_averages(self, take: Callable[[list[Tensor] | DilocoError], object]) -> None:
        """Fetch the averages of the parameters; call ``take`` with them, or the error, and notify.

        ``take`` is called in the event loop, with the lock.
        """
        driver = self._require_shared().driver

        async def fetch() -> None:
            found: list[Tensor] | DilocoError
            try:
                found = await self.bodies.averages()
            except (TransportError, ProtocolError) as error:
                found = error
            with self.changed:
                take(found)
                self.changed.notify()

        driver.in_loop(lambda: driver.spawn(fetch()))

    def deliver_later(self, event: messages.LearnerEvent) -> None:
        """Pass a fact to the machine in the event loop; called by other threads."""
        self._require_shared().driver.in_loop(self.deliver, event)

    def wake(self) -> None:
        """Wake all waits for a change; called by other threads."""
        with self.changed:
            self.changed.notify()

    def fail(self, error: DilocoError) -> None:
        """End the learner: `close` no longer takes part, and each `step` raises this error."""
        with self.changed:
            if self.failure is None:
                self.failure = error
            self.changed.notify()

    @property
    def over(self) -> bool:
        """See `Context`."""
        return self.shared is not None and self.shared.machine.state.over

    @property
    def leaving(self) -> bool:
        """See `Context`."""
        return self.over or self._stop_asked

    async def _run(self) -> None:
        try:
            await self._main()
        except Exception as error:
            self._broken(error)

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._stop_asked:
            return
        self._client = self._make_client()
        self._transfers.enter(self)
        stopped = self._loop.create_task(self._stop.wait())
        ending = self._loop.create_task(self._end_with_the_program())
        try:
            await self.bodies.start()
            joining = self._loop.create_task(self._coordinator.join(self._client))
            await asyncio.wait({joining, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                joining.cancel()
                return
            channel = joining.result()
            self.spawn(self._coordinator.stay(self._client, channel))
            for keeping in self.links.stay():
                self.spawn(keeping)
            self.spawn(self._watch())
            self.spawn(self._write_tape())
            await stopped
        finally:
            stopped.cancel()
            ending.cancel()
            await asyncio.gather(self.links.close(), self._coordinator.close())
            if self.shared is not None:
                await self.shared.driver.close()
            await asyncio.gather(ending, return_exceptions=True)
            await self.bodies.close()
            await self._transfers.close()
            await self._client.close()
            if self.shared is not None:
                self.sample(BytesMoved.of(self.client.stats))  # a visit may be short

    @property
    def client(self) -> Client:
        """The client that opens connections."""
        assert self._client is not None, "the loop runs"
        return self._client

    def _require_shared(self) -> Shared:
        assert self.shared is not None, "the run has let this process in"
        return self.shared

    @property
    def machine(self) -> LearnerMachine:
        """See `Context`."""
        return self._require_shared().machine

    @property
    def tensors(self) -> LearnerTensors:
        """See `Context`."""
        return self._require_shared().tensors

    def address_of(self, shard: int) -> str:
        """See `Context`."""
        return self.links.addresses[shard]

    def reaches(self, shard: int) -> bool:
        """See `Context`."""
        return shard in self.links.channels

    def send(self, shard: int, message: messages.Message) -> None:
        """See `Context`."""
        self.links.send(shard, message)

    async def confirmed(self, shard: int) -> None:
        """See `Context`."""
        await self._coordinator.confirmed(shard)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """See `Context`."""
        return self._require_shared().driver.spawn(work)

    async def _end_with_the_program(self) -> None:
        """Leave the run when the program ends without `close`, for example by Ctrl-C.

        Otherwise this thread would keep the process alive.
        """
        await runtime().program_ended()
        self.fail(DilocoError(_NO_MAIN_THREAD))
        self._leave("its program has ended")

    async def _watch(self) -> None:
        """Write the bytes moved to the tape, and check how long no shard has been reachable."""
        while True:
            await asyncio.sleep(min(STATS_SECONDS, self._disconnect_seconds or STATS_SECONDS))
            self.sample(BytesMoved.of(self.client.stats))
            self.check_patience("no shard has been reachable")

    async def _write_tape(self) -> None:
        """Flush the tape in a thread, so that neither the trainer nor the loop waits."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if (tape := self._tape) is not None and tape.waiting:
                await self._in_executor(None, tape.flush)

    def check_patience(self, what: str) -> None:
        """See `Context`."""
        alone = now() - self.links.alone_since
        limit = self._disconnect_seconds
        if limit is not None and not self.links.channels and alone > limit and not self.over:
            raise TransportError(
                f"{what} for {alone:.0f} s, Timeouts(disconnect={limit:g}): start the syncer, "
                f"correct its address ({', '.join(self._addresses)}), or raise the "
                "timeout (None: forever)"
            )

    def admitted(self, admitted: messages.Admitted, dialled: str) -> None:
        """See `Context`."""
        config = read_public(admitted.settings)
        if self.identity.party is not None:
            # break: other-parties-accepted
            self.identity.party.require_same(config.privacy.agreed)
        if self.identity.role == "learner":
            require_for_sums(self.identity.party, config.privacy.secure_sums)
        with self.changed:
            if self.shared is not None:
                self.shared.config = config  # joined again: the budget may have changed
                return
            layout, me = Layout.from_text(admitted.layout), self.identity
            machine = LearnerMachine(options_of(config), me.name, admitted.epoch, me.nonce, me.role)
            plan, alpha = plan_of(layout, config), config.sync.apply.blend_alpha
            mechanism = mechanism_of(plan, config)
            tensors = LearnerTensors(plan, self._store, alpha, mechanism)
            if self._make_tape and not self._stop_asked:  # after `stop`, no caller would close it
                self._tape = self._make_tape(header_of(machine, config))
            driver = Driver[messages.LearnerEvent, messages.LearnerEffect](
                machine, tape=self._tape, on_failure=self._broken, monitor=self.changed
            )
            driver.enter()
            driver.set_handlers(
                Orders(messages.LearnerEffect, self, tensors, self.bodies, self._transfers)
            )
            self.links.addresses = [reached_by(each, dialled) for each in admitted.shards]
            self.links.near = relays_among(self._addresses, self.links.addresses)
            if admitted.relayed:
                self.links.relays.update(self.links.near)
            self.shared = Shared(machine, tensors, config, driver)
            self.run_id = admitted.run
            self.index, self.count = admitted.index, admitted.count
            if self.checkpointer is not None:
                self._begin(self.shared, self.checkpointer)
            self.changed.notify()
        logger.info("%s joined %s as incarnation %d", me.name, config.run.name, admitted.epoch)

    def coordinator_sent(self, message: messages.ToMember) -> None:
        """See `Context`."""
        machine = self._require_shared().machine
        data = machine.state.data
        partitions = None if data is None else data.parts
        require_valid_from_coordinator(message, machine.options, partitions)
        self.deliver(messages.Received(COORDINATOR, message))

    def _begin(self, shared: Shared, checkpointer: Checkpointer) -> None:
        """Notify the machine of the state that this process begins with."""
        numels = tuple(part.numel for part in shared.tensors.plan.fragments)
        checkpoint = checkpointer.fitting(self.run_id, numels)
        gives = self._transfers.wanted
        if isinstance(checkpoint, str):
            self.deliver(messages.Began(why=checkpoint, seeks_donor=gives, gives=gives))
            return
        self.restoring = True
        if checkpoint.fragments:
            shared.tensors.published = [held.published for held in checkpoint.fragments]
            # break: residuals-not-restored
            shared.tensors.residuals = [held.residual for held in checkpoint.fragments]
        why = f"its own checkpoint of step {checkpoint.steps}, incarnation {checkpoint.epoch}"
        alone = checkpoint.alone
        self.deliver(messages.Began(checkpoint.kept(), why, False, gives, *alone))

    @property
    def is_too_late(self) -> bool:
        """Whether the shards have finished and gone, so that missing copies never arrive."""
        shards = () if self.shared is None else self.shared.machine.state.shards
        return any(s.finished for s in shards) and not any(s.linked for s in shards)

    @property
    def refused(self) -> str:
        """Why the run rejects this process, as text; empty if it does not."""
        return self._coordinator.refused or next(iter(self.links.refusals.values()), "")

    async def in_worker(self, task: Callable[[], _T]) -> _T:
        """See `Context`."""
        return await self._in_executor(self._worker, task)

    async def _in_executor(self, executor: Executor | None, task: Callable[[], _T]) -> _T:
        try:
            running = asyncio.get_running_loop().run_in_executor(executor, task)
        except RuntimeError:  # the program is ending, and executors are shut down before the loop
            raise asyncio.CancelledError from None
        return await running
