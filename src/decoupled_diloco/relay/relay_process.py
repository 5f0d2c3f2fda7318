"""The process of a relay: the shell around `RelayMachine`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from decoupled_diloco.config.addresses import alternatives, reached_by, relays_among
from decoupled_diloco.config.method import plan_of, read_public
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    DilocoError,
    ProtocolError,
    RunEndedError,
    TransportError,
)
from decoupled_diloco.learner.connections import NEARER_SECONDS, TroubleLog, probed
from decoupled_diloco.merge import Layout
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import shard_of, shard_peer
from decoupled_diloco.protocol.relay_machine import RelayMachine
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.relay.passed_payloads import Copies
from decoupled_diloco.relay.sum_worker import KeptResiduals, RelayTensors, SumWorker
from decoupled_diloco.runtime import runtime
from decoupled_diloco.shell.driver import Driver, Orders, executes
from decoupled_diloco.syncer.data_plane import Uploads
from decoupled_diloco.syncer.flushing import Flushing
from decoupled_diloco.syncer.relay_connections import refuse_relay
from decoupled_diloco.syncer.shard_connections import first_message
from decoupled_diloco.syncer.sum_uploads import Sums, sum_path
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.transport.backoff import BRISK_SECONDS, Backoff
from decoupled_diloco.transport.interface import Channel, Client, Server
from decoupled_diloco.transport.multiplex import Own, RelayEnd
from decoupled_diloco.transport.payload_store import body_url

logger = logging.getLogger(__name__)

HEARD_SECONDS = 1.0
"""Interval at which a shard receives which children sent something: every ping interval."""

LINK_SECONDS = 3.0
"""Time for which a child's new connection waits for the relay's own connection to its shard."""

_TO_RELAY = get_args(messages.ToRelay)

ServerFactory = Callable[[Callable[[Channel], Coroutine[Any, Any, None]]], Server]


class ShardLink:
    """The connection to one shard, which may lead through another relay.

    Attributes:
        address: Where it was dialed.
        end: It carries the children's connections.
        connection: The name that the shard has given it.
    """

    def __init__(self, address: str, end: RelayEnd) -> None:
        self.address = address
        self.end = end
        self.connection = ""
        self.is_ready = False


@dataclass(eq=False)
class RelayBehind:
    """A connection of a relay behind this one to a shard; ``connection`` is its name, if known."""

    relay: str
    shard: int
    connection: str = ""


class RelayProcess:
    """One relay process; created in its event loop.

    Args:
        name: The name of the relay, which its credential is for.
        upstream: Addresses of shards or of other relays, in the order in which they are tried.
        server: Creates the transport's server from the function that serves a channel.
        client: Creates a client that acts as this principal.
        run: The name of the run that this relay is for.
        learners: The numbers of the site's learners; empty: its file does not list the site.
        tape: The relay's tape.
        folder: For what its sums leave out.
        cache_bytes: The limit for published copies that are kept for the children.

    Attributes:
        finished: Whether the run is over, as opposed to a stop of this process.
        machine: The state machine, which decides.
        driver: The driver, which runs the machine.
    """

    def __init__(
        self,
        name: str,
        upstream: Sequence[str],
        *,
        server: ServerFactory,
        client: Callable[[str], Client],
        run: str,
        learners: Sequence[int] = (),
        tape: TapeWriter,
        folder: Path,
        cache_bytes: int,
    ) -> None:
        self.name = name
        self._folder = folder
        self.finished = False
        self._run, self._learners = run, learners
        self._ended: set[int] = set()
        self.machine = RelayMachine()
        self.driver: Driver[messages.RelayEvent, messages.RelayEffect] = Driver(
            self.machine, tape=tape, on_failure=self.fail
        )
        self._upstream = tuple(upstream)
        self._server = server(self._serve)
        self._flushing = Flushing([tape], self._server.stats)
        self._client = client(name)
        self._clients: dict[str, Client] = {}
        self._make_client = client
        self._nonce = runtime().unique_id()
        self._rng = runtime().rng()
        self._links: dict[int, ShardLink] = {}
        self._changed = asyncio.Event()
        self._addresses: dict[int, tuple[str, ...]] = {}
        self._near: tuple[str, ...] = ()
        self._shards = 1
        self._behind: set[RelayBehind] = set()
        self.copies = Copies(
            self._server.bodies, cache_bytes, self._address_of, self._client, self._client_of
        )
        self._server.bodies.source = self.copies
        self._worker: SumWorker | None = None
        self._uploads: Uploads | None = None
        self._sums: Sums | None = None
        self._orders = Orders[messages.RelayEffect](
            messages.RelayEffect, self, later=(SumWorker, Sums)
        )
        self.driver.set_handlers(self._orders)
        self._stopping = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def address(self) -> str:
        """The address at which the server listens."""
        return self._server.address

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is called.

        Args:
            started: Called once the server listens.

        Raises:
            AccessError: A shard does not accept the relay's credential.
            TransportError: The port is in use.
        """
        torch.set_num_threads(1)
        await self._server.start()
        logger.info("relay %s listens on %s", self.name, self.address)
        self.driver.spawn(self._report_heard())
        self.driver.spawn(self._flushing.run())
        self.driver.spawn(self._flushing.count_bytes())
        self._follow(0, self._upstream)
        started()
        try:
            await self._stopping.wait()
        finally:
            await self._close()
        if self._error is not None:
            raise self._error
        outcome = "the run is over" if self.finished else "its learners dial their next address"
        logger.info("relay %s has stopped: %s", self.name, outcome)

    def stop(self) -> None:
        """End `run`; safe to call from a signal handler of the loop."""
        self.driver.stop()
        self._stopping.set()

    async def _close(self) -> None:
        await self.driver.close()
        await self.copies.close()
        await self._server.stop()
        for client in (self._client, *self._clients.values()):
            await client.close()
        await self.driver.close()  # payloads may have arrived while the server stopped
        if self._worker is not None:
            self._worker.close()
        await self._flushing.close()

    def fail(self, error: BaseException) -> None:
        """End the process after an error; its children dial their next address."""
        if self._error is None:
            self._error = error
            details = None if isinstance(error, DilocoError) else error
            logger.error("relay %s stops: %s", self.name, error, exc_info=details)
        self.stop()

    def health(self) -> dict[str, object]:
        """Return the answer at `/healthz`."""
        return {
            "relay": self.name,
            "shards": sorted(self._links),
            "ready": self._worker is not None,
        }

    # The connections to the shards

    def _follow(self, shard: int, addresses: Sequence[str]) -> None:
        is_new = shard not in self._addresses
        self._addresses[shard] = tuple(addresses)
        if is_new:
            self.driver.spawn(self._stay(shard))

    async def _stay(self, shard: int) -> None:
        """Keep the connection to a shard."""
        backoff, trouble = Backoff(brisk_seconds=BRISK_SECONDS), TroubleLog()
        while True:
            for address in self._addresses[shard]:
                try:
                    channel = await self._client.connect(address, "relay", self.name)
                    await self._converse(shard, address, channel, backoff, trouble)
                except (AccessError, ConfigError) as error:
                    self.fail(error)
                    return
                except (TransportError, ProtocolError) as error:
                    if isinstance(error, RunEndedError):
                        self._ended.add(shard)
                    if shard in self._ended:
                        self._end_if_over()
                        return
                    sentence = f"relay {self.name}: shard {shard} is unreachable ({error})"
                    trouble.warn("unreachable", f"{sentence}: retrying")
            await asyncio.sleep(backoff.next())

    def _end_if_over(self) -> None:
        """End this process once every shard has finished and left."""
        if self._ended >= self._addresses.keys() and not self._links:
            self.finished = True
            self.stop()

    async def _converse(
        self, shard: int, address: str, channel: Channel, backoff: Backoff, trouble: TroubleLog
    ) -> None:
        behind = tuple(sorted({each.relay for each in self._behind}))
        channel.send(encode(messages.RelayHello(self.name, self._nonce, shard, behind)))

        def own(message: dict[str, Any]) -> None:
            received = cast("messages.ToRelay", decode(message, _TO_RELAY))
            if isinstance(received, messages.Refusal):
                raise AccessError(f"{address} rejects this relay: {received.reason}")
            if isinstance(received, messages.RelayAccepted):
                self._require_same_run(received)
                self._found(self._upstream[-1] if received.relayed else address, received)
                if received.shard != shard and not received.relayed:
                    raise ProtocolError(f"{address} is shard {received.shard}, not {shard}")
                link.connection = received.connection
                self._links[shard] = link
                self._changed.set()
                backoff.reset()
                trouble.over(f"relay {self.name}: shard {shard} is back")
            else:
                self._received(shard, link, received)

        link = ShardLink(address, RelayEnd(channel, own, partial(self._passes, shard)))
        look = asyncio.ensure_future(self._look_nearer(shard, channel, address))
        try:
            await link.end.serve()
        except ProtocolError as error:
            await channel.close(str(error))
            raise
        finally:
            look.cancel()
            if self._links.get(shard) is link:
                del self._links[shard]
                if link.is_ready:
                    self.driver.deliver(messages.Lost(shard_peer(shard)))

    async def _look_nearer(self, shard: int, channel: Channel, present: str) -> None:
        """Close a channel as soon as a relay nearer than the present address can carry it."""
        while True:
            await asyncio.sleep(self._rng.uniform(NEARER_SECONDS / 2, NEARER_SECONDS))
            near = self._near
            for address in near[: near.index(present)] if present in near else near:
                answer = await probed(self._client, address, "relay", self.name, shard)
                if answer is not None and answer.is_relay and answer.is_connected:
                    await channel.close(f"the relay at {address} is nearer")
                    return

    def _require_same_run(self, accepted: messages.RelayAccepted) -> None:
        """Compare this relay's file with the run, as soon as a shard has answered.

        Raises:
            ConfigError: It is of another run, or has other learners for this site.
        """
        if accepted.run != self._run:
            raise ConfigError(
                f"this relay's file is of run {self._run!r}, but its upstream serves run "
                f"{accepted.run!r}: use that run's file, or correct --upstream"
            )
        listed = {site.name: list(site.learners) for site in accepted.sites}
        if listed and self.name not in listed:
            raise ConfigError(
                f"site {self.name!r} is not in [[sites]] of run {self._run!r}, which lists "
                f"{', '.join(listed)}: use that run's file, or correct --name"
            )
        if listed and self._learners and list(self._learners) != listed[self.name]:
            raise ConfigError(
                f"site {self.name!r} has learners={list(self._learners)} in this relay's file, but "
                f"learners={listed[self.name]} in that of run {self._run!r}: use the same file"
            )

    def _found(self, address: str, accepted: messages.RelayAccepted) -> None:
        """Connect to all shards: through a relay that is upstream, or at their own addresses.

        Args:
            address: An address of a shard, whose host replaces a wildcard.
            accepted: The answer with the addresses of all shards.
        """
        shards = [reached_by(each, address) for each in accepted.shards]
        self._near = relays_among(self._upstream, shards)
        for shard, own in enumerate(shards):
            self._follow(shard, (*self._near, *alternatives(own)))

    def _received(self, shard: int, link: ShardLink, message: messages.ToRelay) -> None:
        if isinstance(message, messages.RelayWelcome):
            self._prepare(message)
            link.is_ready = True
            logger.info("relay %s is connected to shard %d of run %s", self.name, shard, self._run)
            self.driver.deliver(messages.Connected(shard_peer(shard), shards=self._shards))
        elif link.is_ready:
            self.driver.deliver(messages.Received(shard_peer(shard), message))

    def _prepare(self, welcome: messages.RelayWelcome) -> None:
        """Create the parts that need the model's layout."""
        if self._worker is not None:
            return
        config = read_public(welcome.settings)
        plan, self._shards = plan_of(Layout.from_text(welcome.layout), config), config.syncer.shards
        tensors = RelayTensors(plan, KeptResiduals(self._folder, welcome.run))
        self.copies.plan = plan
        worker = self._worker = SumWorker(tensors, self)
        bodies = self._server.bodies
        self._uploads = Uploads(tensors, bodies, self.driver, worker, _no_relays)
        self._sums = Sums(tensors, bodies, self.driver, worker, _no_relays, checks=False)
        self._orders.add(worker)
        self._orders.add(self._sums)
        self._expect_sums()

    def send(self, shard: int, message: messages.Message) -> None:
        """See `SumUplink`."""
        link = self._links.get(shard)
        if link is not None:
            link.end.send(encode(message))

    async def put_sum(self, order: messages.SendSum, body: Tensor) -> None:
        """See `SumUplink`."""
        link = self._links.get(order.shard)
        if link is None:
            raise TransportError(f"shard {order.shard} is not connected")
        path = sum_path(self.name, link.connection, order.fragment, order.number)
        await self._client.put(body_url(path), body.numpy().data, base=link.address)

    def _address_of(self, fragment: int) -> str:
        shard = fragment % self._shards
        link = self._links.get(shard)
        if link is None:
            raise TransportError(f"shard {shard} is not connected")
        return link.address

    def _client_of(self, principal: str) -> Client:
        if principal not in self._clients:
            client = self._clients[principal] = self._make_client(principal)
            for link in self._links.values():
                client.trust(link.address)
        return self._clients[principal]

    async def _report_heard(self) -> None:
        while True:
            await asyncio.sleep(HEARD_SECONDS)
            for link in self._links.values():
                link.end.report_heard()

    # The children

    async def _serve(self, channel: Channel) -> None:
        """Carry a child's connection to the shard that it is for."""
        first = await first_message(channel)
        if first.get("type") == "RelayProbe":
            probe = decode(first, (messages.RelayProbe,))
            carries = probe.shard in self._links and not self._refusal(channel)
            channel.send(encode(messages.RelayProbed(True, carries)))
            await channel.close("the probe is answered")
            return
        if first.get("type") == "RelayHello":
            await self._serve_relay(channel, first, decode(first, (messages.RelayHello,)))
            return
        shard = first.get("shard")
        link = await self._link_of(channel, shard if isinstance(shard, int) else 0)
        if link is not None:
            await self._carry(link, channel, first, self._child_sends(channel), _ignore)

    async def _serve_relay(
        self, channel: Channel, first: dict[str, Any], hello: messages.RelayHello
    ) -> None:
        """Carry the connection of a relay behind this one, unless this one is behind it."""
        if self.name in (hello.relay, *hello.behind):
            reason = f"its upstream {self.name} is itself behind {hello.relay}: correct --upstream"
            refuse_relay(channel, reason)
            await channel.close(reason)
            return
        behind = RelayBehind(channel.peer.principal, hello.shard)
        self._behind.add(behind)  # before it waits: this relay's own greetings name it
        try:
            link = await self._link_of(channel, hello.shard)
            if link is None:
                return
            sends = partial(self._relay_sends, behind)
            await self._carry(link, channel, first, sends, partial(self._relay_gets, behind))
        finally:
            self._relay_left(behind)

    async def _link_of(self, channel: Channel, shard: int) -> ShardLink | None:
        """Return the connection to a shard, or close the child's connection with the reason."""
        link = await self._link_to(shard)
        if link is None:
            await channel.close(f"relay {self.name} is not connected to shard {shard}")
        elif problem := self._refusal(channel):
            await channel.close(problem)
            return None
        return link

    def _refusal(self, channel: Channel) -> str:
        """Return why a shard does not let this relay represent a child; empty if none does so."""
        refusals = (link.end.refused.get(channel.peer.principal) for link in self._links.values())
        return next(filter(None, refusals), "")

    async def _carry(
        self, link: ShardLink, channel: Channel, first: dict[str, Any], sent: Own, got: Own
    ) -> None:
        """Carry a child's connection until it closes, and log it if this is refused."""
        with contextlib.suppress(TransportError):
            await link.end.carry(channel, first, sent, got)
        if problem := self._refusal(channel):
            logger.warning("%s: %s; it dials its next address", channel.peer.principal, problem)

    async def _link_to(self, shard: int) -> ShardLink | None:
        try:
            async with asyncio.timeout(LINK_SECONDS):
                while shard not in self._links:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return None
        return self._links[shard]

    def _child_sends(self, channel: Channel) -> Callable[[dict[str, Any]], None]:
        principal = channel.peer.principal

        def sends(message: dict[str, Any]) -> None:
            if message.get("type") == "Upload" and self._uploads is not None:
                fields = {name: value for name, value in message.items() if name != "checkpoint"}
                self._uploads.announce(principal, decode(fields, (messages.Upload,)))

        return sends

    def _relay_sends(self, behind: RelayBehind, message: dict[str, Any]) -> None:
        """Take the announcements of sums from a relay behind this one."""
        for own in _own_frames(message):
            if own.get("type") == "Sum" and self._sums is not None:
                self._sums.announce(behind.connection, decode(own, (messages.Sum,)))
            elif own.get("type") == "SumCorrupt" and self._sums is not None:
                self._sums.failed(behind.connection, decode(own, (messages.SumCorrupt,)))

    def _relay_gets(self, behind: RelayBehind, message: dict[str, Any]) -> None:
        """Expect the sums of a relay behind this one, once its connection has a name."""
        for own in _own_frames(message):
            if own.get("type") == "RelayAccepted":
                own["relayed"] = True
                behind.connection = str(own.get("connection"))
                self._expect_sums()

    def _expect_sums(self) -> None:
        for behind in self._behind:
            if behind.connection and self._sums is not None and self.copies.plan is not None:
                owned = range(behind.shard, len(self.copies.plan.fragments), self._shards)
                self._sums.begin(behind.relay, behind.connection, owned)

    def _relay_left(self, behind: RelayBehind) -> None:
        self._behind.discard(behind)
        if self._sums is not None:
            self._sums.end(behind.connection)

    def _passes(self, shard: int, message: dict[str, Any]) -> None:
        """Note, and mark, what the shards send to children."""
        if message.get("type") == "Published":
            self.copies.announced(message)
        elif message.get("type") == "Admitted":
            message["relayed"] = True
        elif message.get("type") == "Finished":
            self._ended.add(shard)

    # Orders

    @executes(messages.Send)
    def _send(self, order: messages.Send) -> None:
        self.send(shard_of(order.peer), order.message)

    @executes(messages.Expect)
    def _expect(self, order: messages.Expect) -> None:
        assert self._uploads is not None
        self._uploads.expect(order)

    @executes(messages.Unexpect)
    def _unexpect(self, order: messages.Unexpect) -> None:
        assert self._uploads is not None
        self._uploads.unexpect(order)

    @executes(messages.Note)
    def _note(self, order: messages.Note) -> None:
        logger.log(
            logging.WARNING if order.warns else logging.INFO, "%s (%s)", order.text, order.why
        )


def _no_relays(relay: str, message: messages.Message) -> None:
    raise AssertionError("a relay sends orders only to its own parts")


def _own_frames(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a relay's connection that are for, or of, the relay itself."""
    frames = message.get("frames")
    return [
        frame[1]
        for frame in (frames if isinstance(frames, list) else [])
        if isinstance(frame, list) and len(frame) == 2 and frame[0] == "own"
    ]


def _ignore(message: dict[str, Any]) -> None:
    pass
