"""One syncer shard as a process: the shell around `SyncerMachine`.

One event loop carries out orders; tensors are handled by one worker thread, in the order of the
orders, so that the loop answers heartbeats while a merge is running. Shard 0 also hosts the
coordinator; the other shards dial it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from decoupled_diloco.config.method import options_of, plan_of, public_text
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.errors import (
    Error,
    ProtocolError,
    TransportError,
)
from decoupled_diloco.merge import Layout
from decoupled_diloco.monitor.tally import ShardTally
from decoupled_diloco.monitor.watched import WatchedShard
from decoupled_diloco.observe.samples import PayloadsEnded
from decoupled_diloco.observe.tape import Recorder, TapeWriter
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.checkpoints.effects import ForgetCheckpoints, TakeCheckpoint
from decoupled_diloco.protocol.peers import COORDINATOR
from decoupled_diloco.protocol.syncer import SyncerMachine
from decoupled_diloco.protocol.syncer_memory import remembered
from decoupled_diloco.protocol.versions import Holding
from decoupled_diloco.protocol.wire import decode, encode, number_of
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.syncer.bodies import Downloads, Uploads
from decoupled_diloco.syncer.checkpoints import forget_checkpoints
from decoupled_diloco.syncer.coordinator import CoordinatorHost
from decoupled_diloco.syncer.durable import DURABLE, ShardDisk, identity_of_shard
from decoupled_diloco.syncer.flushing import Flushing
from decoupled_diloco.syncer.fragments import ShardTensors
from decoupled_diloco.syncer.health import health_of
from decoupled_diloco.syncer.link import CoordinatorLink
from decoupled_diloco.syncer.merging import Merging
from decoupled_diloco.syncer.outbox import Outbox
from decoupled_diloco.syncer.payloads import Payloads
from decoupled_diloco.syncer.seals import Seals
from decoupled_diloco.syncer.sessions import Sessions, first_message
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.transport.base import Channel, Client, Server

logger = logging.getLogger(__name__)

HEARD_SECONDS = 1.0
"""How often the shard looks at who was heard: every ping interval."""

_T = TypeVar("_T")

ServerFactory = Callable[[Callable[[Channel], Coroutine[Any, Any, None]]], Server]


class Shard:
    """One shard process.

    Args:
        config: The run's settings.
        shard: Which shard this is.
        addresses: Where the shards are, in order; the first hosts the coordinator.
        folder: The run folder.
        server: Makes the transport's server, given what to run for each channel.
        client: Dials the coordinator (shards other than 0).
        tape: This shard's tape.
        coordinator_tape: Makes the coordinator's tape (shard 0), given its header.
        shard_lease: The claim by which this process acts for the shard.
        linger: Serve on when the run is over, until `stop`.
        last: What is waited for when the run is over, before it stops; it serves meanwhile.

    Raises:
        StorageError: the coordinator's state on disk cannot be read.
        ConfigError: it is of a run with other settings.
    """

    def __init__(
        self,
        config: RunConfig,
        shard: int,
        *,
        addresses: tuple[str, ...],
        folder: Path,
        server: ServerFactory,
        client: Client,
        tape: TapeWriter,
        coordinator_tape: Callable[[Mapping[str, Any]], TapeWriter] | None = None,
        shard_lease: ShardLease | NoStandby = NO_STANDBY,
        linger: bool = False,
        last: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        assert (shard == 0) == (coordinator_tape is not None), "shard 0 hosts the coordinator"
        self.config = config
        self.shard = shard
        self._addresses = addresses
        self._folder = folder
        self._server = server(self._serve)
        self._client = client
        self.machine = SyncerMachine(options_of(config), shard)
        self._recorder = Recorder(self.machine, tape)
        self._host = (
            CoordinatorHost(
                config,
                addresses,
                folder,
                coordinator_tape,
                self._spawn,
                self._server.bodies,
                shard_lease,
            )
            if coordinator_tape is not None
            else None
        )
        tapes = [tape] if self._host is None else [tape, self._host.tape]
        self._flushing = Flushing(tapes, self._server.stats)
        self._coordinator = CoordinatorLink(
            say.ShardHello(shard, runtime().unique_id(), public_text(config), shard_lease.number),
            self._ordered,
            host=self._host,
            client=client,
            address=addresses[0],
            fail=self._fail,
            out_of_reach=lambda: self._spawn(self._look_for_the_end()),
        )
        self._seals: Seals | None = None
        self._sealed = asyncio.Event()
        self._layout: Layout | None = None
        self._merging: Merging | None = None
        self._admitted: say.ShardAdmitted | None = None
        self._worker = runtime().worker("merge")
        self._tasks: set[asyncio.Task[None]] = set()
        self._tally = ShardTally()
        self._sessions = Sessions(
            handle=self._handle,
            said=self._said,
            spawn=self._spawn,
            checkpoint=lambda: self.machine.state.checkpoint,
        )
        self._uploads: Uploads | None = None
        self._downloads = Downloads(self._server.bodies, self.machine.options.chain + 1)
        self._outbox = Outbox(
            self._sessions,
            self._downloads,
            uploads=self._require_uploads,
            seals=self._require_seals,
            checkpoint=lambda: self.machine.state.checkpoint,
            stop=lambda: self._spawn(self._stop_last()),
            fail=self._fail,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = asyncio.Event()
        self._error: BaseException | None = None
        self._shard_lease = shard_lease
        self._linger = linger
        self._last = last
        shard_lease.when_lost(self._fail)

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self._server.address

    @property
    def host(self) -> CoordinatorHost | None:
        """The coordinator, if it is in this process."""
        return self._host

    @property
    def finished(self) -> bool:
        """Whether the run is over, as opposed to this process being stopped."""
        state = self.machine.state
        return state.phase == "finished" or state.stopped

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serves until the run is finished or `stop` is called.

        Raises:
            TransportError: the port is taken.
            Error: the state on disk cannot be read or written.
        """
        torch.set_num_threads(self.config.syncer.threads)
        await self._server.start()
        logger.info("shard %d listens on %s", self.shard, self.address)
        self._spawn(self._coordinator.run())
        self._spawn(self._listen())
        self._spawn(self._flushing.run())
        self._spawn(self._flushing.count_bytes())
        started()
        try:
            await self._stopping.wait()
        finally:
            await self._close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Ends `run`; safe to call from a signal handler of the loop."""
        self._stopping.set()

    async def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._host is not None:
            self._host.close()
        await self._server.stop()
        await self._client.close()
        self._worker.shutdown(wait=True, cancel_futures=True)
        if self._merging is not None and self._merging.disk is not None:
            self._merging.disk.close()
        await self._flushing.close()

    def health(self) -> dict[str, object]:
        """What `/healthz` answers."""
        return health_of(self.machine, self.config.run.name)

    def describe(self) -> dict[str, object]:
        """What `/run` answers: the settings, where the shards are, the run's layout once known."""
        return {
            "settings": self.config.public(),
            "addresses": self._addresses,
            "layout": None if self._layout is None else self._layout.to_json(),
        }

    def watched(self) -> WatchedShard:
        """What its metrics are read from."""
        return WatchedShard(
            self.config,
            self.machine,
            self._tally,
            self._server,
            self._sessions.last_heard,
            self._folder,
            self._durable,
        )

    @property
    def _durable(self) -> Path:
        return self._folder / DURABLE / f"shard-{self.shard}"

    def _handle(self, event: fact.SyncerEvent) -> None:
        if self._stopping.is_set() or not self._shard_lease.holds():
            return  # peers may still talk; what they say belongs to the next life
        collects = gc.isenabled()
        gc.disable()  # what it makes for thousands of learners is looked at once, after it
        try:
            effects = self._recorder.handle(now(), event)
        finally:
            if collects:
                gc.enable()
        for effect in effects:
            self._do(effect)
        self._outbox.go_on()
        self._arm()

    def _arm(self) -> None:
        deadline = self.machine.deadline()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None and not self._stopping.is_set():  # break: shard-timer-missing
            delay = max(0.0, deadline - now())
            self._timer = asyncio.get_running_loop().call_later(delay, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._spawn(self._tick())

    async def _tick(self) -> None:
        """Drains what has arrived before the machine looks at leases and windows (rule 13)."""
        for _ in range(3):  # break: tick-before-arrivals
            await asyncio.sleep(0)
        self._hear()
        self._handle(fact.Tick())

    async def _listen(self) -> None:
        while True:
            await asyncio.sleep(HEARD_SECONDS)
            self._hear()

    def _hear(self) -> None:
        heard = self._sessions.heard_since(HEARD_SECONDS / 2)
        if heard:  # break: heard-unreported
            self._handle(fact.Heard(heard))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Ends the process: what is half done here is nobody's state; a new life restores it."""
        if self._error is None:
            self._error = error
            details = None if isinstance(error, Error) else error
            logger.error("shard %d stops: %s", self.shard, error, exc_info=details)
        self._stopping.set()

    async def _serve(self, channel: Channel) -> None:
        """One control connection; its first message says what it is for."""
        try:
            kinds: tuple[type[Any], ...] = (say.Hello, say.Join, say.ShardHello)
            data = await first_message(channel)
            checkpoint, first = number_of(data), cast("Any", decode(data, kinds))
            match first:
                case say.Hello():
                    self._require_principal(channel, first.learner)
                    await self._sealed.wait()  # what it holds can be told from what it makes up
                    await self._sessions.serve(channel, self._genuine(first), checkpoint)
                case _ if self._host is None:
                    channel.send(encode(say.Referred(self._addresses[0])))
                    await channel.close("this shard does not host the coordinator")
                case say.Join():
                    self._require_principal(channel, first.learner)
                    await self._host.serve_join(channel, first)
                case say.ShardHello():
                    self._require_principal(channel, f"shard-{first.shard}")
                    await self._host.serve_shard(channel, first)
        except ProtocolError as error:
            logger.warning("dropping %s: %s", channel.peer.principal, error)
            await channel.close(str(error))
        except TransportError:
            pass
        except Exception as error:
            self._fail(error)

    @staticmethod
    def _require_principal(channel: Channel, name: str) -> None:
        if channel.peer.principal != name:
            raise ProtocolError(f"the token is for {channel.peer.principal!r}, not for {name!r}")

    def _said(self, learner: str, message: say.FromLearner) -> None:
        if isinstance(message, say.Upload | say.Copy) and self._uploads is not None:
            self._uploads.announce(learner, message)
        self._tally.said(learner, message)
        if not isinstance(message, Holding) or self._require_seals().genuine([message]):
            self._handle(fact.Received(learner, message))

    def _genuine(self, hello: say.Hello) -> say.Hello:
        return dataclasses.replace(hello, held=self._require_seals().genuine(hello.held))

    def _do(self, effect: do.SyncerEffect) -> None:
        """Does at once what the worker does, and in order, in slices, what peers hear of."""
        match effect:
            case do.Send(peer, message) if peer == COORDINATOR:
                self._report(cast("say.FromShard", message))
            case (
                do.Accept()
                | do.Reject()
                | do.Send()
                | do.Broadcast()
                | do.Evict()
                | do.Expect()
                | do.ExpectCopy()
                | do.Unexpect()
                | do.Stop()
            ):
                self._outbox.put(effect)
            case do.RoundFinished():
                self._tally.finished(effect)
            case do.ClockAdvanced() | do.RoundOpened():
                pass
            case do.Note(text, why, warns):
                logger.log(logging.WARNING if warns else logging.INFO, "%s (%s)", text, why)
            case TakeCheckpoint(number):
                memory = encode(remembered(self.machine.state))
                self._spawn(self._require_merging().take_checkpoint(number, memory))
            case ForgetCheckpoints(keep, before):
                self._spawn(asyncio.to_thread(forget_checkpoints, self._folder, keep, before))
            case _:
                self._require_merging().carry_out(effect)

    def _require_uploads(self) -> Uploads:
        assert self._uploads is not None, "bodies are spoken of only after the layout is set"
        return self._uploads

    def _require_seals(self) -> Seals:
        assert self._seals is not None, "versions are spoken of only after the shard is admitted"
        return self._seals

    def _require_merging(self) -> Merging:
        assert self._merging is not None, "bodies are spoken of only after the layout is set"
        return self._merging

    async def _in_worker(self, task: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, task)

    async def _stop_last(self) -> None:
        """The coordinator's process stays until the other shards have heard that all is over."""
        if self._host is not None:
            await self._host.everyone_gone()
        if self._last is not None:
            await self._last()
        if not self._linger:
            self._stopping.set()
            return
        logger.info("shard %d has finished, and lingers until SIGTERM", self.shard)

    def _report(self, message: say.FromShard) -> None:
        merging = self._merging
        if isinstance(message, say.Swept):
            self._spawn(self._save_share(message))
        # break: ready-before-disk
        elif isinstance(message, say.ShardReady) and merging is not None and merging.disk:
            # Nobody hears of the first versions before the disk has them.
            self._spawn(merging.keep_installed(partial(self._coordinator.tell, message)))
        else:
            self._coordinator.tell(message)

    async def _save_share(self, message: say.Swept) -> None:
        """The coordinator hears of the end when this shard's share of the result is written."""
        if self._merging is not None:
            await self._merging.save_share()
        self._coordinator.tell(message)

    def _ordered(self, message: say.ToShard | say.ShardAdmitted) -> None:
        if self._stopping.is_set():
            return
        if isinstance(message, say.ShardAdmitted):
            self._seals = Seals(message.key)
            self._sealed.set()
            message = dataclasses.replace(message, key="")  # it goes to no tape
        if isinstance(message, say.LayoutSet):
            self._set_layout(message.layout)
            if self._admitted is not None:
                self._coordinator.hold_back()
                self._spawn(self._recover(self._admitted))
                self._admitted = None
        waits = self._merging is None and self.config.syncer.durable
        if isinstance(message, say.ShardAdmitted) and message.begun and waits:
            self._admitted = message  # the disk is read first, and that takes the layout
        else:
            self._handle(fact.Received(COORDINATOR, message))

    async def _recover(self, admitted: say.ShardAdmitted) -> None:
        """Reads the disk; then the machine hears of it, and that it may begin."""
        found = await self._require_merging().recover(admitted.term)
        if found is not None:
            self._handle(found)
        self._handle(fact.Received(COORDINATOR, admitted))
        self._coordinator.let_go()

    async def _look_for_the_end(self) -> None:
        """Whoever could not hear the end from the coordinator reads it in its claim."""
        if await self._shard_lease.ended():
            self._coordinator.hand_on(say.FinishOrdered())

    def _set_layout(self, text: str) -> None:
        if self._merging is not None:
            return
        self._layout = Layout.from_text(text)
        tensors = ShardTensors(
            plan_of(self._layout, self.config),
            self.machine.owned,
            self.machine.options.mergeable_versions,
        )
        payloads = self._recorded(tensors)
        self._merging = Merging(
            self.machine,
            tensors,
            disk=self._disk_of(tensors, self._layout),
            payloads=payloads,
            folder=self._folder,
            initial_weights=self.config.sync.initial_weights,
            downloads=self._downloads,
            shard_lease=self._shard_lease,
            spawn=self._spawn,
            in_worker=self._in_worker,
            handle=self._handle,
        )
        self._uploads = Uploads(
            tensors,
            self._server.bodies,
            spawn=self._spawn,
            in_worker=self._in_worker,
            handle=self._handle,
            stopping=self._stopping.is_set,
            keep=None if payloads is None else payloads.keep,
        )

    def _disk_of(self, tensors: ShardTensors, layout: Layout) -> ShardDisk | None:
        if not self.config.syncer.durable:
            return None
        identity = identity_of_shard(self.config, layout)
        return ShardDisk(self._durable, identity, tensors, claim=self._shard_lease.number)

    def _recorded(self, tensors: ShardTensors) -> Payloads | None:
        if not self.config.syncer.record_payloads:
            return None
        later = asyncio.get_running_loop().call_soon_threadsafe
        return Payloads(
            self._folder, self.shard, tensors, lambda problem: later(self._payloads_end, problem)
        )

    def _payloads_end(self, problem: str) -> None:
        logger.warning("recording payloads ends: %s", problem)
        self._flushing.sample(PayloadsEnded(problem))
