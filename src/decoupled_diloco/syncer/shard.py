"""One syncer shard as a process: the shell around `SyncerMachine`.

One event loop executes orders. One worker thread handles tensors, in the order of the orders, so
the loop answers heartbeats during a merge. Shard 0 also hosts the coordinator; the other shards
connect to it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from decoupled_diloco.config.method import mechanism_of, options_of, plan_of, public_text
from decoupled_diloco.config.run import RunConfig
from decoupled_diloco.config.signing_keys import SigningKey
from decoupled_diloco.errors import (
    DilocoError,
    ProtocolError,
    TransportError,
)
from decoupled_diloco.merge import Layout
from decoupled_diloco.monitor.counters import ShardTally
from decoupled_diloco.monitor.metric_sources import WatchedShard
from decoupled_diloco.privacy.keys import require_cryptography
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import COORDINATOR, Holding
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco.protocol.wire import decode, encode, number_of, numbered
from decoupled_diloco.runtime import runtime
from decoupled_diloco.shell.driver import Driver, Orders, at_decision, executes
from decoupled_diloco.syncer.audit_trail import AuditTrail
from decoupled_diloco.syncer.coordinator import CoordinatorHost
from decoupled_diloco.syncer.data_plane import Downloads, Uploads
from decoupled_diloco.syncer.durable import DURABLE, ShardDisk, identity_of_shard
from decoupled_diloco.syncer.flushing import Flushing
from decoupled_diloco.syncer.health import health_of
from decoupled_diloco.syncer.link import CoordinatorLink
from decoupled_diloco.syncer.payload_archive import Payloads
from decoupled_diloco.syncer.relay_connections import RelayConnections, RelaySession
from decoupled_diloco.syncer.seals import Seals
from decoupled_diloco.syncer.secure_sums import FromMember, SecureSums
from decoupled_diloco.syncer.shard_connections import Sessions, ShardDriver, first_message
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.syncer.shard_tensors import ShardTensors
from decoupled_diloco.syncer.sum_uploads import Sums
from decoupled_diloco.syncer.worker import Worker
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import PayloadsEnded
from decoupled_diloco.transport.interface import Channel, Client, Server
from decoupled_diloco.transport.limits import Limits

logger = logging.getLogger(__name__)

HEARD_SECONDS = 1.0
"""Interval at which the shard reports which peers sent something: every ping interval."""

ServerFactory = Callable[[Callable[[Channel], Coroutine[Any, Any, None]]], Server]


@dataclasses.dataclass(frozen=True)
class Parts:
    """The objects that a shard creates once it receives the model's layout."""

    layout: Layout
    worker: Worker
    uploads: Uploads
    sums: Sums
    secure: SecureSums


class Shard:
    """One shard process; created in its event loop.

    Args:
        config: The run's settings.
        shard: The number of this shard.
        addresses: The shards' addresses, in order; the first one hosts the coordinator.
        folder: The run folder.
        server: Creates the transport's server from the function that serves a channel.
        client: Connects to the coordinator (shards other than 0).
        tape: This shard's tape.
        coordinator_tape: Creates the coordinator's tape (shard 0) from its header.
        shard_lease: The leadership lease by which this process acts for the shard.
        linger: Continue to serve after the run, until `stop`.
        last: Awaited after the run, before the shard stops; the shard still serves meanwhile.
        signing_key: Signs the audit trail; ``None``: the shard writes none.

    Attributes:
        machine: The state machine, which decides.
        driver: The driver, which runs the machine.
        parts: The `Parts`, once the model's layout is known.

    Raises:
        StorageError: The coordinator's state on disk cannot be read.
        ConfigError: It belongs to a run with other settings.
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
        signing_key: SigningKey | None = None,
    ) -> None:
        assert (shard == 0) == (coordinator_tape is not None), "shard 0 hosts the coordinator"
        self.config = config
        self.shard = shard
        self._addresses = addresses
        self._folder = folder
        self._server = server(self._serve)
        self._client = client
        if config.privacy.secure_sums:
            require_cryptography()
        self.machine = SyncerMachine(options_of(config), shard)
        self.driver: ShardDriver = Driver(
            self.machine,
            tape=tape,
            on_failure=self.fail,
            arrivals=self._heard,
            lease=shard_lease,
        )
        self._host = (
            CoordinatorHost(
                config,
                addresses,
                folder,
                coordinator_tape,
                self.fail,
                self._server.bodies,
                shard_lease,
            )
            if coordinator_tape is not None
            else None
        )
        tapes = [tape] if self._host is None else [tape, self._host.tape]
        self._flushing = Flushing(tapes, self._server.stats)
        self._coordinator = CoordinatorLink(
            messages.ShardHello(
                shard, runtime().unique_id(), public_text(config), shard_lease.number
            ),
            self._ordered,
            host=self._host,
            client=client,
            address=addresses[0],
            fail=self.fail,
            out_of_reach=lambda: self.driver.spawn(self._check_for_end()),
        )
        self._seals: asyncio.Future[Seals] = asyncio.get_running_loop().create_future()
        self.parts: asyncio.Future[Parts] = asyncio.get_running_loop().create_future()
        self._begun: list[messages.ShardAdmitted] = []
        self._run = ""
        self._tally = ShardTally()
        self._sessions = Sessions(self.driver, self._received, self._tally.evicted)
        self._downloads = Downloads(self._server.bodies, self.machine.options.chain + 1)
        self._relays = RelayConnections(
            self._serve,
            Limits(),
            begins=self._relay_begins,
            received=self._relay_sent,
            ends=self._relay_ends,
        )
        self._orders = Orders[messages.SyncerEffect](
            messages.SyncerEffect, self, self._sessions, later=(Uploads, Sums, SecureSums, Worker)
        )
        self.driver.set_handlers(self._orders)
        self._stopping = asyncio.Event()
        self._error: BaseException | None = None
        self._shard_lease = shard_lease
        self._linger = linger
        self._last = last
        self._signing_key = signing_key
        shard_lease.when_lost(self.fail)

    @property
    def address(self) -> str:
        """The address at which the server listens."""
        return self._server.address

    @property
    def host(self) -> CoordinatorHost | None:
        """The coordinator, if it runs in this process."""
        return self._host

    @property
    def finished(self) -> bool:
        """Whether the run is over, as opposed to a stop of this process."""
        state = self.machine.state
        return state.phase == "finished" or state.stopped

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until the run is finished or `stop` is called.

        Args:
            started: Called once the server listens.

        Raises:
            TransportError: The port is in use.
            DilocoError: The state on disk cannot be read or written.
        """
        torch.set_num_threads(self.config.syncer.threads)
        await self._server.start()
        logger.info("shard %d listens on %s", self.shard, self.address)
        self.driver.spawn(self._coordinator.run())
        self.driver.spawn(self._report_heard())
        self.driver.spawn(self._flushing.run())
        self.driver.spawn(self._flushing.count_bytes())
        started()
        try:
            await self._stopping.wait()
        finally:
            await self._close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End `run`; safe to call from a signal handler of the loop."""
        self.driver.stop()
        self._stopping.set()

    async def _close(self) -> None:
        await self.driver.close()
        if self._host is not None:
            await self._host.close()
        await self._server.stop()
        await self._client.close()
        await self.driver.close()  # payloads may have arrived while the server stopped
        if self.parts.done():
            self.parts.result().worker.close()
        await self._flushing.close()

    def health(self) -> dict[str, object]:
        """Return the answer at `/healthz`."""
        return health_of(self.machine, self.config.run.name)

    def describe(self) -> dict[str, object]:
        """Return the answer at `/run`: settings, addresses and, once known, the layout."""
        return {
            "settings": self.config.public(),
            "addresses": self._addresses,
            "layout": self.parts.result().layout.to_json() if self.parts.done() else None,
        }

    def watched(self) -> WatchedShard:
        """Return the objects from which the shard's metrics are read."""
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

    async def _report_heard(self) -> None:
        while True:
            await asyncio.sleep(HEARD_SECONDS)
            for heard in self._heard():
                self.driver.deliver(heard)

    def _heard(self) -> list[messages.SyncerEvent]:
        heard = self._sessions.received_since(HEARD_SECONDS / 2)
        return [messages.Heard(heard)] if heard else []  # break: heard-unreported

    def fail(self, error: BaseException) -> None:
        """End the process after an error.

        The process may be in the middle of a change, so its memory is not used any more. The next
        process restores the shard from disk.
        """
        if self._error is None:
            self._error = error
            details = None if isinstance(error, DilocoError) else error
            logger.error("shard %d stops: %s", self.shard, error, exc_info=details)
        self.stop()

    async def _serve(self, channel: Channel) -> None:
        """Serve one control connection; its first message determines its purpose."""
        try:
            kinds: tuple[type[Any], ...] = (
                messages.Hello,
                messages.Join,
                messages.ShardHello,
                messages.RelayHello,
                messages.RelayProbe,
            )
            data = await first_message(channel)
            checkpoint, first = number_of(data), cast("Any", decode(data, kinds))
            match first:
                case messages.RelayProbe():
                    channel.send(encode(messages.RelayProbed(False, False)))
                    await channel.close("this is a shard")
                case messages.RelayHello():
                    self._require_principal(channel, first.relay)
                    await self._relays.serve(channel, first, self._accepted)
                case messages.Hello():
                    self._require_principal(channel, first.learner)
                    if first.shard not in (None, self.shard):
                        raise ProtocolError(f"this is shard {self.shard}, not {first.shard}")
                    # The key of the seals verifies the versions that the learner reports.
                    await self._seals
                    await self._sessions.serve(channel, self._genuine(first), checkpoint)
                case _ if self._host is None:
                    channel.send(encode(messages.Referred(self._addresses[0])))
                    await channel.close("this shard does not host the coordinator")
                case messages.Join():
                    self._require_principal(channel, first.learner)
                    await self._host.serve_join(channel, first)
                case messages.ShardHello():
                    self._require_principal(channel, f"shard-{first.shard}")
                    await self._host.serve_shard(channel, first)
        except ProtocolError as error:
            logger.warning("dropping %s: %s", channel.peer.principal, error)
            await channel.close(str(error))
        except TransportError:
            pass
        except Exception as error:
            self.fail(error)

    @staticmethod
    def _require_principal(channel: Channel, name: str) -> None:
        if channel.peer.principal != name:
            raise ProtocolError(
                f"the auth token is for {channel.peer.principal!r}, not for {name!r}"
            )

    def _accepted(self, connection: str) -> messages.RelayAccepted:
        sites = tuple(messages.SiteListed(s.name, s.learners) for s in self.config.sites)
        name = self.config.run.name
        return messages.RelayAccepted(
            self.shard, connection, self._addresses, run=name, sites=sites
        )

    def _relay_begins(self, session: RelaySession) -> None:
        self.driver.spawn(self._welcome_relay(session))

    async def _welcome_relay(self, session: RelaySession) -> None:
        """Notify the machine of a relay, once the layout is known: requests to it may follow."""
        parts = await asyncio.shield(self.parts)
        name = session.hello.relay
        if self._relays.sessions.get(name) is not session:
            return
        settings, layout = public_text(self.config), parts.layout.to_text()
        welcome = messages.RelayWelcome(settings, layout, self._run)
        self._relays.send(name, welcome)
        upstream = session.upstream
        if not upstream:
            parts.sums.begin(name, session.connection, self.machine.owned)
        peer = messages.relay_peer(name)
        self.driver.deliver(messages.Connected(peer, session.hello, relay=upstream))

    def _relay_sent(self, relay: str, message: messages.FromRelay) -> None:
        if not self.parts.done():
            return
        parts, session = self.parts.result(), self._relays.sessions[relay]
        match message:
            case messages.Sum() | messages.SumCorrupt(relay="") if session.upstream:
                pass  # the relay before it takes its sums
            case messages.Sum():
                parts.sums.announce(session.connection, message)
            case messages.BodyArrived() | messages.BodyCorrupt():
                parts.uploads.reported(relay, message)
            case messages.SumCorrupt(relay=""):  # of its own sum
                parts.sums.failed(session.connection, message)
            case messages.SumArrived() | messages.SumCorrupt():
                self.driver.deliver(dataclasses.replace(message, at=relay))

    def _relay_ends(self, session: RelaySession) -> None:
        if self.parts.done():
            self.parts.result().sums.end(session.connection)
            self.driver.deliver(messages.Lost(messages.relay_peer(session.hello.relay)))

    def _received(self, learner: str, message: messages.FromLearner) -> None:
        if isinstance(message, FromMember):
            if not (self.parts.done() and self.machine.options.secure):
                return
            message = self.parts.result().secure.receive(learner, message)
        if isinstance(message, messages.Upload | messages.Copy) and self.parts.done():
            parts = self.parts.result()
            parts.uploads.announce(learner, message)
            if isinstance(message, messages.Upload) and parts.worker.trail is not None:
                parts.worker.trail.announced(message.ask, message.digest)
        self._tally.count_message(learner, message)
        if not isinstance(message, Holding) or self._seals.result().genuine([message]):
            self.driver.deliver(messages.Received(learner, message))

    def _genuine(self, hello: messages.Hello) -> messages.Hello:
        return dataclasses.replace(hello, held=self._seals.result().genuine(hello.held))

    @at_decision(messages.Send, messages.Broadcast)
    def _as_of_now(self, order: messages.Send | messages.Broadcast) -> tuple[messages.Message, int]:
        """Return the message and the number of the newest checkpoint, which the message carries.

        A copy's URL is resolved now, because the copy may be withdrawn before all peers receive the
        message.
        """
        message: messages.Message = order.message
        if isinstance(message, messages.Published):
            message = dataclasses.replace(
                self._seals.result().sealed(message),
                difference=self._downloads.url(message.difference),
                whole=self._downloads.url(message.whole),
                difference_nbytes=self._downloads.difference_nbytes(message.difference),
            )
        return message, self.machine.state.checkpoint

    @executes(messages.Send, sliced=True)
    def _send(
        self, order: messages.Send, taken: tuple[messages.Message, int]
    ) -> Coroutine[Any, Any, None] | None:
        message, checkpoint = taken
        if order.peer == COORDINATOR:
            return self._report(cast("messages.FromShard", message))
        if relay := messages.relay_of(order.peer):
            self._relays.send(relay, message)
            return None
        if isinstance(message, messages.Pull | messages.CopyWanted):
            url = self.parts.result().uploads.url(message.path)
            message = dataclasses.replace(message, path=url)
        self._sessions.send(order.peer, numbered(message, checkpoint))
        return None

    def _send_now(self, learner: str, message: messages.Message) -> None:
        self._sessions.send(learner, numbered(message, self.machine.state.checkpoint))

    @executes(messages.Broadcast, sliced=True)
    def _broadcast(
        self, order: messages.Broadcast, taken: tuple[messages.Message, int]
    ) -> Iterator[None]:
        return self._sessions.broadcast(numbered(*taken))

    @executes(messages.RoundFinished)
    def _finished(self, order: messages.RoundFinished) -> None:
        self._tally.finished(order)

    @executes(
        messages.ClockAdvanced,
        messages.RoundOpened,
        messages.PrivacyAccounted,
        messages.Scored,
    )
    def _tape_only(
        self,
        order: messages.ClockAdvanced
        | messages.RoundOpened
        | messages.PrivacyAccounted
        | messages.Scored,
    ) -> None:
        pass

    @executes(messages.Note)
    def _note(self, order: messages.Note) -> None:
        level = logging.WARNING if order.warns else logging.INFO
        logger.log(level, "%s (%s)", order.text, order.why)

    @executes(messages.Stop, sliced=True)
    async def _stop_last(self, order: messages.Stop) -> None:
        """Stop after the run; the coordinator's process stays until the other shards have left."""
        if self._host is not None:
            await self._host.everyone_gone()
        if self._last is not None:
            await self._last()
        if not self._linger:
            self.stop()
            return
        logger.info("shard %d has finished, and lingers until SIGTERM", self.shard)

    def _report(self, message: messages.FromShard) -> Coroutine[Any, Any, None] | None:
        """Send a message to the coordinator.

        A report of the first versions, or of the end, waits until these are on disk.
        """
        send = partial(self._coordinator.send, message)
        if self.parts.done():
            worker = self.parts.result().worker
            if isinstance(message, messages.Swept):
                return worker.save_share(send)
            # break: ready-before-disk
            if isinstance(message, messages.ShardReady) and worker.disk is not None:
                return worker.keep_installed(send)
        send()
        return None

    def _ordered(self, message: messages.ToShard | messages.ShardAdmitted) -> None:
        if self._stopping.is_set():
            return
        if isinstance(message, messages.ShardAdmitted):
            if not self._seals.done():
                self._seals.set_result(Seals(message.key))
                self._run = message.run
            message = dataclasses.replace(message, key="")  # the key must not be on the tape
        if isinstance(message, messages.LayoutSet):
            self._set_layout(message.layout)
            for admitted in self._begun:
                self._coordinator.hold_back()
                self.driver.spawn(self._recover(admitted))
            self._begun.clear()
        waits = not self.parts.done() and self.config.syncer.persist
        if isinstance(message, messages.ShardAdmitted) and message.begun and waits:
            self._begun = [message]  # the disk is read first, which requires the layout
        else:
            self.driver.deliver(messages.Received(COORDINATOR, message))

    async def _recover(self, admitted: messages.ShardAdmitted) -> None:
        """Read the disk, and pass the result and then the admission to the machine."""
        found = await self.parts.result().worker.recover(admitted.term)
        if found is not None:
            self.driver.deliver(found)
        self.driver.deliver(messages.Received(COORDINATOR, admitted))
        self._coordinator.let_go()

    async def _check_for_end(self) -> None:
        """Finish if the claim shows that the run is over.

        The coordinator may have ended before this shard received the order to finish.
        """
        if await self._shard_lease.ended():
            self._coordinator.hand_on(messages.FinishOrdered())

    def _set_layout(self, text: str) -> None:
        if self.parts.done():
            return
        layout = Layout.from_text(text)
        plan = plan_of(layout, self.config)
        tensors = ShardTensors(
            plan,
            self.machine.owned,
            self.machine.options.mergeable_versions,
            mechanism_of(plan, self.config),
        )
        payloads = self._recorded(tensors)
        secure = SecureSums(self.machine, tensors, self._run, self._send_now)
        worker = Worker(
            self.driver,
            tensors,
            disk=self._disk_of(tensors, layout),
            payloads=payloads,
            folder=self._folder,
            initial_weights=self.config.sync.initial_weights,
            downloads=self._downloads,
            relays=self._relays.send,
            shard_lease=self._shard_lease,
            secure=secure if self.machine.options.secure else None,
            trail=self._trail(),
        )
        keep = None if payloads is None else payloads.keep
        bodies, relays = self._server.bodies, self._relays.send
        uploads = Uploads(tensors, bodies, self.driver, worker, relays, keep)
        sums = Sums(tensors, bodies, self.driver, worker, relays, checks=True)
        self._orders.add(worker)
        self._orders.add(uploads)
        self._orders.add(sums)
        self._orders.add(secure)
        self.parts.set_result(Parts(layout, worker, uploads, sums, secure))

    def _trail(self) -> AuditTrail | None:
        if self._signing_key is None:
            return None
        parties = self.config.privacy.agreed
        return AuditTrail(
            self._folder,
            self.shard,
            self._signing_key,
            journals=self._durable,
            about={"run": self._run, "parties": "" if parties is None else parties.digest},
            claim=self._shard_lease.number,
            is_masked=self.config.privacy.secure_sums,
        )

    def _disk_of(self, tensors: ShardTensors, layout: Layout) -> ShardDisk | None:
        if not self.config.syncer.persist:
            return None
        identity = identity_of_shard(self.config, layout)
        return ShardDisk(self._durable, identity, tensors, claim=self._shard_lease.number)

    def _recorded(self, tensors: ShardTensors) -> Payloads | None:
        if not self.config.records_payloads:
            return None
        later = asyncio.get_running_loop().call_soon_threadsafe
        return Payloads(
            self._folder, self.shard, tensors, lambda problem: later(self._payloads_end, problem)
        )

    def _payloads_end(self, problem: str) -> None:
        logger.warning("recording payloads ends: %s", problem)
        self._flushing.sample(PayloadsEnded(problem))
