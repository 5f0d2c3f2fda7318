"""The background of a learner or observer: one thread, one event loop, all of its connections.

The trainer and the background share one `LearnerMachine` under one lock that neither holds for
longer than a decision takes. Orders that belong to a step boundary are carried out by the trainer
(`Participation`); everything else ends in a queue, in order, which the event loop carries out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from decoupled_diloco.config.addresses import reached_by
from decoupled_diloco.config.method import (
    options_of,
    plan_of,
    read_public,
)
from decoupled_diloco.errors import (
    Error,
    TransportError,
)
from decoupled_diloco.learner.body_exchange import BodyExchange
from decoupled_diloco.learner.checkpointer import Checkpointer, tell_recovery
from decoupled_diloco.learner.checks import layout_text
from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.learner.joining import (
    Coordinations,
    CoordinatorSession,
    Patience,
    ProcessIdentity,
)
from decoupled_diloco.learner.plan import OF_THE_BOUNDARY, StepPlan, with_loss
from decoupled_diloco.learner.sense import require_sense_of_coordinator
from decoupled_diloco.learner.shard_links import LinkDuties, ShardLinks
from decoupled_diloco.learner.shared import Shared, Unrecorded, header_of
from decoupled_diloco.learner.store import ParameterStore
from decoupled_diloco.learner.transfers import StateTransfers, Surroundings
from decoupled_diloco.merge import Layout
from decoupled_diloco.observe.samples import BytesMoved, Sample
from decoupled_diloco.observe.tape import FLUSH_SECONDS, Recorder, TapeWriter
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.checkpoints.effects import ForgetCheckpoints, TakeCheckpoint
from decoupled_diloco.protocol.learner import LearnerMachine
from decoupled_diloco.protocol.peers import COORDINATOR, shard_of
from decoupled_diloco.protocol.transfer.effects import (
    CopyState,
    DropState,
    FetchState,
    ForgetState,
    RelayState,
)
from decoupled_diloco.protocol.wire import encode
from decoupled_diloco.runtime import Beside, now, runtime
from decoupled_diloco.transport.base import Client

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_NO_MAIN_THREAD = (
    "the program's main thread has ended, and no exchange goes on without it: let it wait for the "
    "thread that trains"
)

STATS_SECONDS = 5.0
"""How often the bytes moved are written to the tape."""


class Background:
    """Connections, transfers and the event loop's thread.

    Args:
        identity: Who this process is.
        addresses: One or several shards' addresses; each knows where the coordinator is.
        store: The parameters.
        client: Makes the transport's client, inside the loop.
        tape: Where events go, or ``None``.
        patience: How long it waits for the run.
        exchange: Carries out what is ordered about bodies.
        checkpointer: A learner's own checkpoint; ``None`` for observers.
        transfers: What a learner gives to others and takes from them.

    Attributes:
        restoring: The learner goes on from its own checkpoint, which the trainer puts back.
        links: The connections to the shards.
        bodies: What carries out what is ordered about bodies.
        run_id: The id of the run, once it has let this process in.
        index: The number of this learner's name in the run.
        count: How many learners the run expected when it let this process in first.
    """

    def __init__(
        self,
        identity: ProcessIdentity,
        addresses: tuple[str, ...],
        store: ParameterStore,
        *,
        client: Callable[[], Client],
        tape: Callable[[dict[str, Any]], TapeWriter] | None,
        patience: Patience,
        exchange: Callable[..., BodyExchange] = BodyExchange,
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
        self.failure: Error | None = None
        self.ready = False
        self._addresses = addresses
        self._store = store
        self._make_client = client
        self._make_tape = tape
        self._tape: TapeWriter | None = None
        self._give_up_seconds = patience.alone_seconds
        self._queue: deque[tuple[do.LearnerEffect, Any]] = deque()
        self._worker = runtime().worker("ddiloco-codec")
        self.links = ShardLinks(
            identity,
            LinkDuties(
                client=lambda: self.client,
                machine=lambda: self._require_shared().machine,
                told=self._told,
                sample=self.sample,
                confirmed=lambda shard: self._coordinator.confirmed(shard),
                admitted=lambda: self.ready,
                over=lambda: self._over,
                ending=lambda: self._over or self._stop_asked,
            ),
        )
        self.bodies = exchange(
            client=lambda: self.client,
            address_of=lambda shard: self.links.addresses[shard],
            reaches=lambda shard: shard in self.links.channels,
            tensors=lambda: self._require_shared().tensors,
            changed=self.changed,
            told=self._told,
            say=self.links.say,
            in_worker=self._in_worker,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._stop_asked = False
        self._beside: Beside | None = None
        self._client: Client | None = None
        self._coordinator = CoordinatorSession(
            identity,
            layout_text(store.layout),
            addresses,
            Coordinations(
                admitted=self._admitted,
                linked=lambda: self._told(fact.Connected(COORDINATOR)),
                told=self._coordinator_told,
                unlinked=lambda: self._told(fact.Lost(COORDINATOR)),
                over=lambda: self._over or self._stop_asked,
                check_patience=self._check_patience,
            ),
            patience,
        )

    def start(self) -> None:
        """Starts the event loop."""
        self._beside = runtime().beside(self._run, "ddiloco")

    def tell(self, event: fact.LearnerEvent, loss: float | None = None) -> StepPlan:
        """Tells the machine a fact, and carries the boundary out; ``loss`` is for the report."""
        with self.changed:
            shared = self._require_shared()
            effects = shared.recorder.handle(now(), event)
            plan = StepPlan.of(effects)
            copies = [effect for effect in effects if isinstance(effect, CopyState)]
            for effect in effects:
                if isinstance(effect, do.Apply | do.Snapshot):
                    shared.tensors.carry_out(effect)
                elif not isinstance(effect, OF_THE_BOUNDARY):
                    self._enqueue(shared, effect if loss is None else with_loss(effect, loss))
            pending = bool(self._queue)
        for order in copies:
            self._transfers.copy(order)
            self._in_loop(partial(self._spawn_quietly, self._transfers.serve(order)))
        if pending:
            self._in_loop(lambda: self._guarded(self._drain))
        return plan

    def _in_loop(self, work: Callable[[], None]) -> None:
        """Has the event loop do something, if there is one; it may just be ending."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(work)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Runs a callback of the event loop; what goes wrong there would be lost otherwise."""
        try:
            work()
        except Exception as error:
            self._broken(error)

    def _broken(self, error: BaseException) -> None:
        if isinstance(error, Error):
            self.fail(error)
            return
        logger.error("the background of %s failed", self.identity.name, exc_info=error)
        self.fail(Error(f"the background of {self.identity.name} failed: {error!r}"))

    def sample(self, sample: Sample) -> None:
        """Writes a measurement to the tape."""
        with self.changed:
            if self._tape is not None:
                self._tape.sample(now(), sample)

    def stop(self, farewell: str, *, abrupt: bool = False, wait_seconds: float = 5.0) -> None:
        """Says goodbye to the shards, closes all connections, ends the thread.

        Args:
            farewell: What to say; nothing if empty.
            abrupt: An exception may have struck between the machine and its tape: the tape ends
                here, so that what is on it can be replayed exactly.
            wait_seconds: How long to wait for the thread, which has a stopped peer to talk to.
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
                channel.send(encode(say.Leave(farewell)))
        assert self._stop is not None, "the loop runs"
        self._stop.set()

    def _end_tape(self) -> None:
        if self._tape is not None and self.shared is not None:
            self.shared.recorder = Unrecorded(self.shared.machine)
            self._tape.close()
            self._tape = None

    def _enqueue(self, shared: Shared, effect: do.LearnerEffect) -> None:
        """Called with the lock held; what must be captured at this instant is captured here."""
        captured: Any = None
        match effect:
            case do.SendBody(fragment=fragment, ask=ask):
                captured = shared.tensors.capture(fragment, ask)
            case do.Settle() | do.ForgetResidual():
                shared.tensors.carry_out(effect)
                return
            case do.SendCopy(_, fragment, _, version):
                captured = shared.tensors.whole(fragment, published=version is not None)
        self._queue.append((effect, captured))

    def _told(self, event: fact.LearnerEvent) -> None:
        """Tells the machine a fact of the background, and carries out what follows."""
        with self.changed:
            shared = self._require_shared()
            for effect in shared.recorder.handle(now(), event):
                self._enqueue(shared, effect)
            self.changed.notify()
        self._drain()
        self._arm(shared.machine.deadline())

    def _drain(self) -> None:
        while True:
            with self.changed:
                if not self._queue:
                    return
                effect, captured = self._queue.popleft()
            self._do(effect, captured)

    def _arm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:  # break: learner-timer-missing
            delay = max(0.0, deadline - now())
            loop = asyncio.get_running_loop()
            tick = fact.Tick()
            self._timer = loop.call_later(delay, self._guarded, lambda: self._told(tick))

    def _do(self, effect: do.LearnerEffect, captured: Any) -> None:
        match effect:
            case do.Send(peer, message) if peer == COORDINATOR:
                self._coordinator.tell(message)
            case do.Send(peer, message):
                self.links.say(shard_of(peer), message)
            case do.SendBody():
                self._spawn(self.bodies.send_body(effect, captured))
            case do.SendCopy():
                self._spawn(self.bodies.send_copy(effect, captured))
            case do.Fetch():
                self._spawn(self.bodies.fetch(effect))
            case do.Ready():
                with self.changed:
                    self.ready = True
                    self.changed.notify()
            case do.Expelled():
                pass  # `_converse` has heard the same
            case do.Note(text, why, warns):
                level = logging.WARNING if warns else logging.INFO
                logger.log(level, "%s: %s (%s)", self.identity.name, text, why)
            case RelayState() | ForgetState() | FetchState() | DropState():
                self._transfers.carry_out(effect, self.identity.name)
            case do.Recovered():
                tell_recovery(self.identity.name, effect)
            case do.Relabel() | do.RunOver() | do.Release() | do.Hold() | do.EndTraining():
                pass  # the machine's state says it; the trainer was notified
            case ForgetCheckpoints(keep, before) if self.checkpointer:
                self.checkpointer.forget_checkpoints(keep, before)
            case do.Snapshot() | do.Apply() | TakeCheckpoint() | CopyState():
                raise AssertionError("only a step boundary orders this")

    def tell_later(self, event: fact.LearnerEvent) -> None:
        """`tell` for another thread."""
        self._in_loop(partial(self._guarded, partial(self._told, event)))

    def wake(self) -> None:
        """Has who waits for a change look again; for another thread."""
        with self.changed:
            self.changed.notify()

    def fail(self, error: Error) -> None:
        """End the learner: `close` no longer takes part, and each `step` raises this error."""
        with self.changed:
            if self.failure is None:
                self.failure = error
            self.changed.notify()

    @property
    def _over(self) -> bool:
        return self.shared is not None and self.shared.machine.state.over

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
        self._transfers.enter(self._surroundings(self._client))
        stopped = self._loop.create_task(self._stop.wait())
        self._spawn(self._end_with_the_program())
        try:
            await self.bodies.start()
            joining = self._loop.create_task(self._coordinator.join(self._client))
            await asyncio.wait({joining, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                joining.cancel()
                return
            channel = joining.result()
            self._spawn(self._coordinator.stay(self._client, channel))
            for keeping in self.links.stay():
                self._spawn(keeping)
            self._spawn(self._watch())
            self._spawn(self._write_tape())
            await stopped
        finally:
            stopped.cancel()
            await asyncio.gather(self.links.close(), self._coordinator.close())
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self.bodies.close()
            await self._transfers.close()
            await self._client.close()

    @property
    def client(self) -> Client:
        """What dials."""
        assert self._client is not None, "the loop runs"
        return self._client

    def _require_shared(self) -> Shared:
        assert self.shared is not None, "the run has let this process in"
        return self.shared

    def _surroundings(self, client: Client) -> Surroundings:
        return Surroundings(
            self._told,
            self._spawn,
            self._in_worker,
            lambda: client,
            lambda: self.links.addresses[0],
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _spawn_quietly(self, work: Coroutine[Any, Any, None]) -> None:
        self._spawn(work)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broken(error)

    async def _end_with_the_program(self) -> None:
        """A program that ends without `close`, by Ctrl-C say, is not held up by this thread."""
        await runtime().program_ended()
        self.fail(Error(_NO_MAIN_THREAD))
        self._leave("its program has ended")

    async def _watch(self) -> None:
        """Bytes to the tape now and then; gives up when nobody was there for too long."""
        while True:
            await asyncio.sleep(min(STATS_SECONDS, self._give_up_seconds or STATS_SECONDS))
            self.sample(BytesMoved.of(self.client.stats))
            self._check_patience("no shard has been reachable")

    async def _write_tape(self) -> None:
        """Brings the tape to the disk, in a thread: neither the trainer nor the loop waits."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if (tape := self._tape) is not None and tape.waiting:
                await self._in_executor(None, tape.flush)

    def _check_patience(self, what: str) -> None:
        alone = now() - self.links.alone_since
        limit = self._give_up_seconds
        if limit is not None and not self.links.channels and alone > limit and not self._over:
            raise TransportError(
                f"{what} for {alone:.0f} s, give_up_seconds={limit:g}: start the syncer, correct "
                f"its address ({', '.join(self._addresses)}), or leave give_up_seconds out"
            )

    def _admitted(self, admitted: say.Admitted, dialled: str) -> None:
        config = read_public(admitted.settings)
        with self.changed:
            if self.shared is not None:
                self.shared.config = config  # joined again: the budget may be another one by now
                return
            layout, me = Layout.from_text(admitted.layout), self.identity
            machine = LearnerMachine(options_of(config), me.name, admitted.epoch, me.nonce, me.role)
            plan, alpha = plan_of(layout, config), config.sync.blend_alpha
            tensors = LearnerTensors(plan, self._store, alpha)
            if self._make_tape and not self._stop_asked:  # else it would stay open
                self._tape = self._make_tape(header_of(machine, config))
            recorder = Recorder(machine, self._tape) if self._tape else Unrecorded(machine)
            self.links.addresses = [reached_by(each, dialled) for each in admitted.shards]
            self.shared = Shared(machine, tensors, config, recorder)
            self.run_id = admitted.run
            self.index, self.count = admitted.index, admitted.count
            if self.checkpointer is not None:
                self._begin(self.shared, self.checkpointer)
            self.changed.notify()
        logger.info("%s has joined %s, epoch %d", me.name, config.run.name, admitted.epoch)

    def _coordinator_told(self, message: say.ToMember) -> None:
        machine = self._require_shared().machine
        data = machine.state.data
        require_sense_of_coordinator(message, machine.options, None if data is None else data.parts)
        self._told(fact.Received(COORDINATOR, message))

    def _begin(self, shared: Shared, checkpointer: Checkpointer) -> None:
        """Tells the machine what this process begins with."""
        numels = tuple(part.numel for part in shared.tensors.plan.fragments)
        checkpoint = checkpointer.fitting(self.run_id, numels)
        gives = self._transfers.wanted
        if isinstance(checkpoint, str):
            self._told(fact.Began(why=checkpoint, seeks_donor=gives, gives=gives))
            return
        self.restoring = True
        if checkpoint.fragments:
            shared.tensors.published = [held.published for held in checkpoint.fragments]
            # break: residuals-not-restored
            shared.tensors.residuals = [held.residual for held in checkpoint.fragments]
        why = f"its own checkpoint of step {checkpoint.steps}, epoch {checkpoint.epoch}"
        self._told(fact.Began(checkpoint.kept(), why, gives=gives))

    @property
    def is_too_late(self) -> bool:
        """Whether the shards have finished and gone: what is not here by now never comes."""
        shards = () if self.shared is None else self.shared.machine.state.shards
        return any(s.finished for s in shards) and not any(s.linked for s in shards)

    @property
    def refused(self) -> str:
        """Why the run does not take this process, in words; empty: it does."""
        return self._coordinator.refused or next(iter(self.links.refusals.values()), "")

    async def _in_worker(self, task: Callable[[], _T]) -> _T:
        return await self._in_executor(self._worker, task)

    async def _in_executor(self, executor: Executor | None, task: Callable[[], _T]) -> _T:
        try:
            running = asyncio.get_running_loop().run_in_executor(executor, task)
        except RuntimeError:  # The program ends, by itself or by `stop`: executors go first.
            raise asyncio.CancelledError from None
        return await running
