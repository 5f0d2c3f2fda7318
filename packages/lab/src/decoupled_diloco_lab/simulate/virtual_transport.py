"""The virtual transport: channels over the links of `network`.

Messages are JSON text and arrive in order, after the link's delay. A payload moves piece by piece,
by a request that the server's process handles. `network` decides how cuts, lost processes and slow
links affect them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

from yarl import URL

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.runtime import now
from decoupled_diloco.transport.byte_ranges import Range, RangeSet, Window
from decoupled_diloco.transport.channel import NOTHING_MORE, Mailbox, decode, encode, handle
from decoupled_diloco.transport.interface import Encoded, OnChannel, Peer, Stats
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import PREFIX, BodyBooks
from decoupled_diloco.transport.pool import ReceivePool
from decoupled_diloco.transport.tokens import (
    RequestRefusal,
    Tokens,
    bearer,
    check_role,
    refusal_error,
)
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.in_process import BodyClient
from decoupled_diloco_lab.simulate.virtual_network import STALL_SECONDS, Connection, Network
from decoupled_diloco_lab.simulate.virtual_runtime import VirtualProcess

SCHEME = "virtual"


@dataclass(frozen=True, slots=True)
class _Opening:
    """The first message on a connection: the dialing peer and its auth token."""

    peer: Peer
    token: str | None


@dataclass(frozen=True, slots=True)
class _Refused:
    """The server rejects a connection."""

    refusal: RequestRefusal


@dataclass(frozen=True, slots=True)
class _Opened:
    """The server accepts a connection."""


@dataclass(frozen=True, slots=True)
class _Goodbye:
    """The last message on a connection: why this end closes it."""

    reason: str


class Place:
    """The sockets of a process: they route arriving messages to its channels.

    Args:
        world: The directory of all processes by address.
        process: The owner of the sockets.
    """

    def __init__(self, world: Directory, process: VirtualProcess) -> None:
        self.world = world
        self.process = process
        self.network = world.network
        self.channels: dict[int, VirtualChannel] = {}
        self.servers: dict[str, VirtualServer] = {}
        self.dialling: dict[int, asyncio.Future[None]] = {}
        self.requests: dict[int, Callable[[str], None]] = {}

    def forget(self) -> None:
        """Drop all sockets after the end of the process."""
        self.channels.clear()
        self.servers.clear()
        self.dialling.clear()

    def received(self, connection: Connection, message: Any) -> None:
        """Handle a message that has arrived."""
        channel = self.channels.get(connection.number)
        match message:
            case _Opening(peer, token):
                self._open(connection, peer, token)
            case _Opened() | _Refused():
                waiting = self.dialling.pop(connection.number, None)
                if waiting is not None and not waiting.done():
                    if isinstance(message, _Refused):
                        waiting.set_exception(message.refusal)
                    else:
                        waiting.set_result(None)
            case _Goodbye(reason) if channel is not None:
                channel.close_reason = reason
            case str() if channel is not None:
                channel.arrived(message)

    def _open(self, connection: Connection, peer: Peer, token: str | None) -> None:
        server = self.servers.get(peer.address)
        if server is None:
            connection.close(self.process)
            return
        try:
            check_role(peer.role)
            server.authorize(peer.principal, token)
        except RequestRefusal as refusal:
            connection.send(self.process, _Refused(refusal))
            connection.close(self.process)
            return
        connection.send(self.process, _Opened())
        channel = VirtualChannel(self, connection, peer, server.limits, server.stats)
        server.accept(channel)

    def lost(self, connection: Connection) -> None:
        """Handle the end of a connection."""
        waiting = self.dialling.pop(connection.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(TransportError("connection refused"))
        channel = self.channels.get(connection.number)
        if channel is not None:
            channel.ended()


class Directory:
    """The directory of all processes by address.

    Attributes:
        loss: Probability that the connection of a payload's range breaks on the way.
        corruption: Probability that a piece of a payload arrives corrupted.
    """

    def __init__(self, network: Network, choices: Choices) -> None:
        self.network = network
        self.choices = choices
        self.loss = self.corruption = 0.0
        self.places: dict[str, Place] = {}
        self._ports = itertools.count(40000)

    def clear_faults(self) -> None:
        """Stop losing and corrupting payloads."""
        self.loss = self.corruption = 0.0

    def settle(self, process: VirtualProcess) -> Place:
        """Create the sockets of a process."""
        place = self.places[process.name] = Place(self, process)
        return place

    def address(self, name: str, port: int = 0) -> str:
        """Return an address of a process, with a new port if none is given."""
        return f"{SCHEME}://{name}:{port or next(self._ports)}"

    def arrived(self, piece: memoryview, corruption: float) -> memoryview | bytes:
        """Return a piece of a payload as it arrives, with one bit flipped if it is corrupted.

        Args:
            piece: The bytes that were sent.
            corruption: Probability that the links on the way corrupt the piece.
        """
        if not self.choices.chance(max(self.corruption, corruption)):
            return piece
        bits = bytearray(piece)
        bits[self.choices.integer(0, len(bits) - 1)] ^= 1 << self.choices.integer(0, 7)
        return bytes(bits)

    def find(self, address: str) -> Place:
        """Return the sockets of the process at an address.

        Raises:
            TransportError: No process has this address.
        """
        place = self.places.get(URL(address).host or "")
        if place is None:
            raise TransportError(f"cannot reach {address}: unknown host")
        return place


class VirtualChannel:
    """One end of a connection; see `Channel`."""

    def __init__(
        self, place: Place, connection: Connection, peer: Peer, limits: Limits, stats: Stats
    ) -> None:
        self.peer = peer
        self.reason = self.close_reason = ""
        self.rtt: float | None = 0.0
        self._place = place
        self._connection = connection
        self._limits = limits
        self._stats = stats
        self._inbox = Mailbox(limits.inbox_messages, limits.inbox_bytes)
        self._received_at = now()
        self._life = connection.other(place.process).life
        self._closed = False
        place.channels[connection.number] = self

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        return self._closed

    @property
    def last_received(self) -> float:
        """See `Channel.last_received`: as if pings arrived all the time.

        The time advances while the peer's same incarnation runs and can reach this end.
        """
        connection, process = self._connection, self._place.process
        other = cast("VirtualProcess", connection.other(process))
        lives = other.alive and other.life == self._life
        in_reach = lives and not other.paused and not connection.broken
        if not self._closed and in_reach and not connection.is_stalled_to(process):
            self._received_at = now()
        return self._received_at

    def send(self, message: dict[str, object] | Encoded) -> None:
        """See `Channel.send`."""
        text = encode(message, self._limits)
        if not self._closed:
            self._stats.control_bytes_sent += len(text)
            self._connection.send(self._place.process, text)

    async def receive(self) -> dict[str, object]:
        """See `Channel.receive`."""
        while not self._inbox:
            if self._closed:
                raise TransportError(f"channel closed: {self.reason}")
            await self._inbox.wait()
        return decode(self._inbox.pop())

    async def close(self, reason: str = "") -> None:
        """See `Channel.close`."""
        self.shut(reason or "closed by this side")
        await asyncio.sleep(0)

    def shut(self, reason: str) -> None:
        """Close this end and send the reason to the other end."""
        if not self._closed:
            self._connection.send(self._place.process, _Goodbye(reason))
            self._mark(reason)
            self._connection.close(self._place.process)

    def arrived(self, text: str) -> None:
        """Put an arriving message into the inbox."""
        self._received_at = now()
        self._stats.control_bytes_received += len(text)
        if not self._closed:
            self._inbox.put(text)

    def ended(self) -> None:
        """Handle the end of the connection by the other end or by the network."""
        peer = f"{self.peer.principal!r} at {self.peer.address}"
        reason = self.close_reason
        self._mark(f"closed by {peer}: {reason}" if reason else f"connection to {peer} lost")

    def _mark(self, reason: str) -> None:
        if not self._closed:
            self._closed, self.reason = True, reason
            self._place.channels.pop(self._connection.number, None)
            self._inbox.changed.set()


class VirtualServer:
    """A `Server` of a virtual process."""

    certificate_ends_at: float | None = None
    """Always ``None``: traffic within one process is not encrypted."""

    def __init__(
        self,
        place: Place,
        address: str,
        *,
        on_channel: OnChannel,
        tokens: Tokens | None = None,
        pool_bytes: int = 1 << 30,
        limits: Limits | None = None,
    ) -> None:
        self.address = address
        self.stats = Stats()
        self.limits = limits or Limits()
        self.bodies = BodyBooks(ReceivePool(pool_bytes), self.limits)
        self._tokens = tokens or Tokens()
        self._place = place
        self._on_channel = on_channel
        self._serving: dict[VirtualChannel, asyncio.Task[None]] = {}
        self._handling: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """See `Server.start`."""
        self._place.servers[self.address] = self

    async def stop(self) -> None:
        """See `Server.stop`."""
        self._place.servers.pop(self.address, None)
        for channel in list(self._serving):
            channel.shut("the server stops")
        self.bodies.stop("the server stops")
        await asyncio.sleep(0)
        tasks = [*self._serving.values(), *self._handling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def authorize(self, principal: str, token: str | None) -> str:
        """Return the principal as which a peer may act.

        Raises:
            RequestRefusal: The auth token is not valid for the principal.
        """
        return self._tokens.authorize(bearer(token), principal)

    def accept(self, channel: VirtualChannel) -> None:
        """Serve one end of a new connection."""
        loop = self._place.process.loop
        assert loop is not None
        self._serving[channel] = loop.create_task(self._serve(channel))

    async def _serve(self, channel: VirtualChannel) -> None:
        try:
            await handle(self._on_channel, channel)
        finally:
            self._serving.pop(channel, None)
            channel.shut(NOTHING_MORE)

    def handle(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        """Handle a request in a task of this process."""
        loop = self._place.process.loop
        assert loop is not None

        def ended(task: asyncio.Task[None]) -> None:
            self._handling.discard(task)
            if task.cancelled():
                request.fail("the server stops")

        task = loop.create_task(work)
        self._handling.add(task)
        task.add_done_callback(ended)


class VirtualClient(BodyClient):
    """A `Client` of a virtual process."""

    scheme = SCHEME

    def __init__(
        self,
        place: Place,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        principal: str = "",
    ) -> None:
        super().__init__(token=token, limits=limits, principal=principal)
        self.place = place

    async def connect(
        self, address: str, role: str, principal: str, *, lost_seconds: float | None = None
    ) -> VirtualChannel:
        """See `Client.connect`."""
        self._dials(address, principal)
        target = self.place.world.find(address)
        loop = asyncio.get_running_loop()
        connected: asyncio.Future[Connection] = loop.create_future()

        def failed() -> None:
            if not connected.done():
                connected.set_exception(TransportError(f"cannot reach {address}"))

        def opened(connection: Connection) -> None:
            if not connected.done():
                connected.set_result(connection)

        self.place.network.dial(self.place.process, target.process, opened, failed)
        connection = await connected
        opening = self.place.dialling[connection.number] = loop.create_future()
        if not connection.open[self.place.process.name]:
            raise TransportError(f"cannot reach {address}: the connection was lost")
        mine = VirtualChannel(
            self.place, connection, Peer(principal, role, address), self._limits, self.stats
        )
        connection.send(self.place.process, _Opening(Peer(principal, role, address), self._token))
        try:
            await opening
        except RequestRefusal as refusal:
            raise refusal_error(refusal.status, refusal.text, address) from None
        except BaseException:
            mine.shut("not connected")
            raise
        self._keep(mine)
        return mine

    async def size(self, url: str, *, base: str = "") -> int:
        """See `Client`."""
        address, key = self._resolve(url, base)

        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                server.authorize(request.principal, request.token)
                await server.bodies.obtain(key)
                request.reply(len(server.bodies.look_up(key).body))
            except RequestRefusal as refusal:
                request.reply(refusal)

        return int(await _request(self, address, key, serve))

    def putting(self, address: str, key: str, body: Window) -> Put:
        """See `BodyClient`."""
        return Put(self, address, key, body)

    def getting(self, address: str, key: str, out: Window) -> Get:
        """See `BodyClient`."""
        return Get(self, address, key, out)


PIECES = 4
"""Least number of pieces per range of a payload. Pieces that have arrived are not sent again."""

PIECE_SECONDS = 1.0
"""Longest time that a piece occupies a whole link. Payloads on one link take turns, so none of them
stalls."""

Serve = Callable[["VirtualServer", "Request"], Coroutine[Any, Any, None]]


class Request:
    """One request of a client to a server, until it is answered.

    The server's side runs in the server's process. Every failure reaches the client.
    """

    _numbers = itertools.count()

    def __init__(self, client: VirtualClient, address: str) -> None:
        self.address = address
        self.client = client.place
        self.target = client.place.world.find(address)
        self.principal, self.token = client.identity(address)
        loop = client.place.process.loop
        assert loop is not None
        self.answer: asyncio.Future[Any] = loop.create_future()
        self._life = client.place.process.life
        self._number = next(self._numbers)
        self._answers = False

    async def run(self, serve: Serve) -> Any:
        """Send the request and return the server's reply.

        Raises:
            RequestRefusal: The server refuses the request.
            TransportError: The connection broke.
        """
        self.target.requests[self._number] = self.fail

        def reach() -> None:
            server = self.target.servers.get(self.address)
            if server is None:
                self.fail("connection refused")
            else:
                server.handle(self, serve(server, self))

        try:
            self._carry(self.client.process, self.target.process, reach)
            return await self.answer
        finally:
            self.target.requests.pop(self._number, None)

    def reply(self, result: Any) -> None:
        """Send the server's reply to the client, which raises it if it is an exception."""

        def deliver() -> None:
            if self.answer.done():
                return
            if isinstance(result, Exception):
                self.answer.set_exception(result)
            else:
                self.answer.set_result(result)

        self._carry(self.target.process, self.client.process, deliver)

    def fail(self, reason: str) -> None:
        """Report the loss of the connection to the client."""
        client = self.client.process

        def deliver() -> None:
            if not self.answer.done():
                self.answer.set_exception(TransportError(f"{self.address}: {reason}"))

        client.run(self._life, False, deliver, ())

    def rate(self, *, up: bool) -> float:
        """Return the present rate between client and server, in bytes per second."""
        sender, receiver = self._ends(up=up)
        return min(sender.link.up_bytes_per_second, receiver.link.down_bytes_per_second)

    def _ends(self, *, up: bool) -> tuple[VirtualProcess, VirtualProcess]:
        client, target = self.client.process, self.target.process
        return (client, target) if up else (target, client)

    async def piece(self, nbytes: int, share: float, *, up: bool) -> bool:
        """Move one piece of a range.

        Args:
            nbytes: Size of the piece.
            share: Its share of the range, by which the probability of a loss is scaled.
            up: Whether it moves from the client to the server.

        Returns:
            Whether it arrived. If not, the request has failed.
        """
        directory = self.client.world
        if directory.choices.chance(directory.loss * share):
            self.fail("the connection was lost")
            return False
        loop = self.target.process.loop
        assert loop is not None
        moved: asyncio.Future[bool] = loop.create_future()
        target, life = self.target.process, self.target.process.life

        def done(arrived: bool) -> None:
            def deliver() -> None:
                if not moved.done():
                    moved.set_result(arrived)

            target.run(life, False, deliver, ())
            if not arrived:
                self.fail("the connection was lost")

        self.client.network.transfer(
            *self._ends(up=up),
            nbytes,
            lambda: done(True),
            lambda: done(False),
            follows=up or self._answers,  # an upload follows its request without another delay
        )
        self._answers = True
        return await moved

    def arrived(self, body: memoryview | Window, left: int, right: int) -> memoryview | bytes:
        """Return a piece of a payload as it arrives."""
        # A link's `corruption` is the probability for a whole payload: scale it to the piece.
        client, target = self.client.process.link, self.target.process.link
        whole = (1 - client.corruption) * (1 - target.corruption)
        corruption = 1 - whole ** ((right - left) / len(body))
        return self.client.world.arrived(body[left:right], corruption)

    def _carry(
        self, sender: VirtualProcess, receiver: VirtualProcess, then: Callable[[], None]
    ) -> None:
        network, lives = self.client.network, (sender.life, receiver.life)
        clockwork = network.clockwork

        def arrive(stalled: float) -> None:
            if not receiver.alive or receiver.life != lives[1]:
                self.fail("no answer")
            elif network.is_cut(sender, receiver):
                if stalled >= STALL_SECONDS:
                    self.fail(f"nothing moved for {STALL_SECONDS:g} s")
                else:
                    clockwork.after(1.0, arrive, stalled + 1.0)
            else:
                receiver.run(receiver.life, False, then, ())

        clockwork.after(network.delay(sender, receiver), arrive, 0.0)


def _pieces(start: int, stop: int, rate: float) -> list[Range]:
    step = max(1, -(-(stop - start) // PIECES))
    if step > rate * PIECE_SECONDS:
        step = max(1, int(rate * PIECE_SECONDS))
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


class Put:
    """Uploads the ranges of one payload."""

    digest = ""

    def __init__(self, client: VirtualClient, address: str, key: str, body: Window) -> None:
        self._client, self._address, self._key, self._body = client, address, key, body

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        """See `Mover`."""

        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                stream = server.bodies.open(
                    self._key, principal, (start, stop), len(self._body), resumed
                )
            except RequestRefusal as refusal:
                request.reply(refusal)
                return
            try:
                async with stream.receiving():
                    for left, right in _pieces(start, stop, request.rate(up=True)):
                        share = (right - left) / (stop - start)
                        if not await request.piece(right - left, share, up=True):
                            return
                        stream.write(request.arrived(self._body, left, right))
                        self._client.stats.data_bytes_sent += right - left
                        server.stats.data_bytes_received += right - left
                    stream.finish()
                await server.bodies.passed_on(self._key)
                request.reply(None)
            except RequestRefusal as refusal:
                request.reply(refusal)

        await _request(self._client, self._address, self._key, serve)

    async def gaps(self, start: int, stop: int) -> list[Range]:
        """See `Mover`."""

        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                request.reply(server.bodies.state(self._key, principal))
            except RequestRefusal as refusal:
                request.reply(refusal)

        state, received = await _request(self._client, self._address, self._key, serve)
        return [] if state == "arrived" else RangeSet(received).missing(start, stop)


class Get:
    """Downloads the ranges of one payload that a server offers."""

    def __init__(self, client: VirtualClient, address: str, key: str, out: Window) -> None:
        self.digest = ""
        self._client, self._address, self._key, self._out = client, address, key, out
        self._arrived = RangeSet()

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        """See `Mover`."""

        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                await server.bodies.obtain(self._key)
                offer = server.bodies.look_up(self._key)
                if len(offer.body) != len(self._out):
                    text = f"the payload has {len(offer.body)} bytes, {len(self._out)} are expected"
                    request.reply(ProtocolError(f"GET {self._key}: {text}"))
                    return
                download = server.bodies.fetch(self._key, principal, (start, stop))
            except RequestRefusal as refusal:
                request.reply(refusal)
                return
            try:
                for left, right in _pieces(start, stop, request.rate(up=False)):
                    share = (right - left) / (stop - start)
                    if not await request.piece(right - left, share, up=False):
                        return
                    self._out[left:right] = request.arrived(offer.body, left, right)
                    self._arrived.add(left, right)
                    download.sent(right - left)
                    server.stats.data_bytes_sent += right - left
                    self._client.stats.data_bytes_received += right - left
                request.reply(offer.digest)
            finally:
                download.close()

        self.digest = await _request(self._client, self._address, self._key, serve)

    async def gaps(self, start: int, stop: int) -> list[Range]:
        """See `Mover`."""
        return self._arrived.missing(start, stop)


async def _request(client: VirtualClient, address: str, key: str, serve: Serve) -> Any:
    try:
        return await Request(client, address).run(serve)
    except RequestRefusal as refusal:
        raise refusal_error(refusal.status, refusal.text, f"{address}{PREFIX}{key}") from None
