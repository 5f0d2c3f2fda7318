"""The transport of the virtual world: channels and bodies over the links of `network`.

Messages are JSON text, in order, with what the link costs; a body is moved by requests that the
process of its server handles, piece by piece. What a cut, a lost process or a slow link does to
them is `network`'s affair.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

from yarl import URL

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.simulate.choices import Choices
from decoupled_diloco.simulate.network import STALL_SECONDS, Connection, Network
from decoupled_diloco.simulate.runtime import VirtualProcess
from decoupled_diloco.transport.base import (
    Encoded,
    Limits,
    OnChannel,
    Peer,
    Stats,
    TransferStats,
)
from decoupled_diloco.transport.bodies import PREFIX, Bodies
from decoupled_diloco.transport.channel import Mailbox, decode, encode
from decoupled_diloco.transport.pool import ReceivePool
from decoupled_diloco.transport.ranges import Range, RangeSet
from decoupled_diloco.transport.stripes import StripeController
from decoupled_diloco.transport.tokens import TokenRefusal, Tokens, check_role, refusal_error
from decoupled_diloco.transport.transfer import Slots, Transfer

logger = logging.getLogger(__name__)

PIECES = 4
"""A range of a body is moved in so many pieces at least; what has arrived is not sent again."""

PIECE_SECONDS = 1.0
"""No piece takes the whole link for longer: bodies on one link share it, and none stands still."""

SCHEME = "virtual"


@dataclass(frozen=True, slots=True)
class _Opening:
    """The first thing on a connection: who dials, and as what."""

    peer: Peer
    token: str | None


@dataclass(frozen=True, slots=True)
class _Refused:
    """The server does not take a connection."""

    refusal: TokenRefusal


@dataclass(frozen=True, slots=True)
class _Opened:
    """The server has taken a connection."""


@dataclass(frozen=True, slots=True)
class _Goodbye:
    """Why an end closes a connection."""

    reason: str


class Place:
    """A process's sockets: what arrives at it finds its channel here.

    Args:
        world: Where processes are found by address.
        process: Whose they are.
    """

    def __init__(self, world: Streets, process: VirtualProcess) -> None:
        self.world = world
        self.process = process
        self.network = world.network
        self.channels: dict[int, VirtualChannel] = {}
        self.servers: dict[str, VirtualServer] = {}
        self.dialling: dict[int, asyncio.Future[None]] = {}
        self.requests: dict[int, Callable[[str], None]] = {}

    def forget(self) -> None:
        """The process is gone, and its sockets with it."""
        self.channels.clear()
        self.servers.clear()
        self.dialling.clear()

    # ---- told by the network

    def received(self, connection: Connection, message: Any) -> None:
        """Something has arrived."""
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
                channel.farewell = reason
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
        except TokenRefusal as refusal:
            connection.send(self.process, _Refused(refusal))
            connection.close(self.process)
            return
        connection.send(self.process, _Opened())
        channel = VirtualChannel(self, connection, peer, server.limits, server.stats)
        server.accept(channel)

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        waiting = self.dialling.pop(connection.number, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(TransportError("nobody listens there"))
        channel = self.channels.get(connection.number)
        if channel is not None:
            channel.ended()


class Streets:
    """Where the processes of a world are found by address.

    Attributes:
        loss: That a range of a body finds its connection broken on the way.
        corruption: That a piece of it arrives with other bits.
    """

    def __init__(self, network: Network, choices: Choices) -> None:
        self.network = network
        self.choices = choices
        self.loss = self.corruption = 0.0
        self.places: dict[str, Place] = {}
        self.owners: dict[str, Place] = {}
        self._ports = itertools.count(40000)

    def be_sound(self) -> None:
        """From now on bodies arrive whole."""
        self.loss = self.corruption = 0.0

    def settle(self, process: VirtualProcess) -> Place:
        """Gives a process its sockets."""
        place = self.places[process.name] = Place(self, process)
        return place

    def address(self, name: str, port: int = 0) -> str:
        """An address at a process, of its own if no port is given."""
        return f"{SCHEME}://{name}:{port or next(self._ports)}"

    def arrived(self, piece: memoryview) -> memoryview | bytes:
        """A piece of a body as it is when it arrives."""
        if not self.choices.chance(self.corruption):
            return piece
        bits = bytearray(piece)
        bits[self.choices.integer(0, len(bits) - 1)] ^= 1 << self.choices.integer(0, 7)
        return bytes(bits)

    def find(self, address: str) -> Place:
        """The process at an address.

        Raises:
            TransportError: There is none.
        """
        place = self.places.get(URL(address).host or "")
        if place is None:
            raise TransportError(f"cannot reach {address}: nobody lives there")
        return place


class VirtualChannel:
    """One end of a connection; see `Channel`."""

    def __init__(
        self, place: Place, connection: Connection, peer: Peer, limits: Limits, stats: Stats
    ) -> None:
        self.peer = peer
        self.reason = self.farewell = ""
        self.rtt: float | None = 0.0
        self._place = place
        self._connection = connection
        self._limits = limits
        self._stats = stats
        self._inbox = Mailbox(limits.inbox_messages, limits.inbox_bytes)
        self._heard_at = now()
        self._life = connection.other(place.process).life
        self._closed = False
        place.channels[connection.number] = self

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        return self._closed

    @property
    def last_received(self) -> float:
        """Pings are answered for as long as the peer runs and is in reach."""
        connection, process = self._connection, self._place.process
        other = cast("VirtualProcess", connection.other(process))
        lives = other.alive and other.life == self._life
        in_reach = lives and not other.paused and not connection.broken
        if not self._closed and in_reach and not connection.is_stalled_to(process):
            self._heard_at = now()
        return self._heard_at

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
        """Closes this end; the other end is told the reason."""
        if not self._closed:
            self._connection.send(self._place.process, _Goodbye(reason))
            self._mark(reason)
            self._connection.close(self._place.process)

    def arrived(self, text: str) -> None:
        """A message is here."""
        self._heard_at = now()
        self._stats.control_bytes_received += len(text)
        if not self._closed:
            self._inbox.put(text)

    def ended(self) -> None:
        """The other end, or the network, has ended the connection."""
        who = f"{self.peer.principal!r} at {self.peer.address}"
        told = self.farewell
        self._mark(f"closed by {who}: {told}" if told else f"connection to {who} lost")

    def _mark(self, reason: str) -> None:
        if not self._closed:
            self._closed, self.reason = True, reason
            self._place.channels.pop(self._connection.number, None)
            self._inbox.changed.set()


class VirtualServer:
    """A `Server` of a virtual process."""

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
        self.bodies = Bodies(ReceivePool(pool_bytes), self.limits)
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
        """The principal as which a peer may act."""
        header = None if token is None else f"Bearer {token}"
        return self._tokens.authorize(header, principal)

    def accept(self, channel: VirtualChannel) -> None:
        """Serves one end of a new connection."""
        loop = self._place.process.loop
        assert loop is not None
        self._serving[channel] = loop.create_task(self._serve(channel))

    async def _serve(self, channel: VirtualChannel) -> None:
        reason = "the server has nothing more to say"
        try:
            await self._on_channel(channel)
        except TransportError:
            pass  # The channel closed while the handler used it; its reason says why.
        except Exception:
            logger.exception("the handler of %s failed", channel.peer.principal)
            reason = "the server failed on this channel; its log says why"
        finally:
            self._serving.pop(channel, None)
            channel.shut(reason)

    def arrived(self, piece: memoryview) -> memoryview | bytes:
        """A piece of a body of this server as it is when it arrives."""
        return self._place.world.arrived(piece)

    def handle(self, work: Coroutine[Any, Any, None]) -> None:
        """Has this process handle a request."""
        loop = self._place.process.loop
        assert loop is not None
        task = loop.create_task(work)
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)


class Request:
    """One request of a client to a server, while it lasts.

    The server's side runs in the server's process. Whatever goes wrong, the client hears of it.
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

    async def run(
        self, serve: Callable[[VirtualServer, Request], Coroutine[Any, Any, None]]
    ) -> Any:
        """Sends the request; returns what the server replies.

        Raises:
            Refusal: The server refuses.
            TransportError: The connection broke.
        """
        self.target.requests[self._number] = self.fail

        def reach() -> None:
            server = self.target.servers.get(self.address)
            if server is None:
                self.fail("nobody listens there")
            else:
                server.handle(serve(server, self))

        try:
            self._carry(self.client.process, self.target.process, reach)
            return await self.answer
        finally:
            self.target.requests.pop(self._number, None)

    def reply(self, result: Any) -> None:
        """The server's answer is on its way; an exception is raised at the client."""

        def here() -> None:
            if self.answer.done():
                return
            if isinstance(result, Exception):
                self.answer.set_exception(result)
            else:
                self.answer.set_result(result)

        self._carry(self.target.process, self.client.process, here)

    def fail(self, reason: str) -> None:
        """The connection is lost: the client notices."""
        client = self.client.process

        def here() -> None:
            if not self.answer.done():
                self.answer.set_exception(TransportError(f"{self.address}: {reason}"))

        client.run(self._life, False, here, ())

    def rate(self, *, up: bool) -> float:
        """What the links carry at present, bytes a second."""
        sender, receiver = self._ends(up=up)
        return min(sender.link.up_bytes_per_second, receiver.link.down_bytes_per_second)

    def _ends(self, *, up: bool) -> tuple[VirtualProcess, VirtualProcess]:
        client, target = self.client.process, self.target.process
        return (client, target) if up else (target, client)

    async def piece(self, nbytes: int, share: float, *, up: bool) -> bool:
        """Moves so many bytes, a share of a range; whether they got there."""
        streets = self.client.world
        if streets.choices.chance(streets.loss * share):
            self.fail("the connection was lost")
            return False
        loop = self.target.process.loop
        assert loop is not None
        moved: asyncio.Future[bool] = loop.create_future()
        target, life = self.target.process, self.target.process.life

        def done(arrived: bool) -> None:
            def here() -> None:
                if not moved.done():
                    moved.set_result(arrived)

            target.run(life, False, here, ())
            if not arrived:
                self.fail("the connection was lost")

        self.client.network.transfer(
            *self._ends(up=up), nbytes, lambda: done(True), lambda: done(False)
        )
        return await moved

    def _carry(
        self, sender: VirtualProcess, receiver: VirtualProcess, then: Callable[[], None]
    ) -> None:
        network, lives = self.client.network, (sender.life, receiver.life)
        clockwork = network.clockwork

        def arrive(stalled: float) -> None:
            if not receiver.alive or receiver.life != lives[1]:
                self.fail("nobody answers")
            elif network.is_cut(sender, receiver):
                if stalled >= STALL_SECONDS:
                    self.fail(f"nothing moved for {STALL_SECONDS:g} s")
                else:
                    clockwork.after(1.0, arrive, stalled + 1.0)
            else:
                receiver.run(receiver.life, False, then, ())

        clockwork.after(network.delay(sender, receiver), arrive, 0.0)


class VirtualClient:
    """A `Client` of a virtual process."""

    def __init__(
        self, place: Place, *, token: str | None = None, limits: Limits | None = None
    ) -> None:
        self.place = place
        self.stats = Stats()
        self._token = token
        self._limits = limits or Limits()
        self._rng: random.Random = runtime().rng()
        self._base = ""
        self._principals: dict[str, str] = {}
        self._channels: set[VirtualChannel] = set()

    def identity(self, address: str) -> tuple[str, str | None]:
        """As whom this client is known at an address, and by which token."""
        principal = self._principals.get(address, self._principals.get(self._base, ""))
        return principal, self._token

    async def connect(self, address: str, role: str, principal: str) -> VirtualChannel:
        """See `Client.connect`."""
        self._base = address
        self._principals[address] = principal
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
        except TokenRefusal as refusal:
            raise refusal_error(refusal.status, refusal.text, address) from None
        except BaseException:
            mine.shut("not connected")
            raise
        self._channels = {channel for channel in self._channels if not channel.closed} | {mine}
        return mine

    async def put(self, url: str, body: memoryview, *, base: str = "") -> TransferStats:
        """See `Client.put`."""
        move = _Put(self, *self._resolve(url, base), body.cast("B"))
        return await self._run(move, len(body.cast("B")))

    async def get(self, url: str, out: memoryview, *, base: str = "") -> TransferStats:
        """See `Client.get`."""
        move = _Get(self, *self._resolve(url, base), out.cast("B"))
        return await self._run(move, len(out.cast("B")))

    async def close(self) -> None:
        """See `Client.close`."""
        for channel in self._channels:
            channel.shut("the client closes")
        await asyncio.sleep(0)

    def _resolve(self, url: str, base: str) -> tuple[str, str]:
        target = URL(url, encoded=True)
        if target.is_absolute():
            return str(target.origin()), target.raw_path.removeprefix(PREFIX)
        return base or self._base, target.raw_path.removeprefix(PREFIX)

    async def _run(self, move: _Put | _Get, nbytes: int) -> TransferStats:
        transfer = Transfer(nbytes, move.move, move.gaps, self._limits.retries, self._rng, Slots(0))
        count, seconds = await transfer.run(StripeController(), 0.0)
        return TransferStats(nbytes, seconds, count, transfer.retries, SCHEME, move.digest)


def _pieces(start: int, stop: int, rate: float) -> list[Range]:
    step = max(1, -(-(stop - start) // PIECES))
    if step > rate * PIECE_SECONDS:
        step = max(1, int(rate * PIECE_SECONDS))
    return [(at, min(at + step, stop)) for at in range(start, stop, step)]


class _Put:
    """Writes the ranges of one body into the server's books."""

    digest = ""

    def __init__(self, client: VirtualClient, address: str, key: str, body: memoryview) -> None:
        self._client, self._address, self._key, self._body = client, address, key, body

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                stream = server.bodies.open(
                    self._key, principal, (start, stop), len(self._body), resumed
                )
            except TokenRefusal as refusal:
                request.reply(refusal)
                return
            task = asyncio.current_task()
            assert task is not None
            stream.on_abort = task.cancel
            try:
                await stream.prepare()
                for left, right in _pieces(start, stop, request.rate(up=True)):
                    share = (right - left) / (stop - start)
                    if not await request.piece(right - left, share, up=True):
                        return
                    stream.write(server.arrived(self._body[left:right]))
                    self._client.stats.data_bytes_sent += right - left
                    server.stats.data_bytes_received += right - left
                stream.finish()
                request.reply(None)
            except TokenRefusal as refusal:
                request.reply(refusal)
            except asyncio.CancelledError:
                if stream.refusal is None:
                    raise
                task.uncancel()
                request.reply(stream.refusal)
            finally:
                stream.on_abort = None
                stream.close()

        await _ask(self._client, self._address, self._key, serve)

    async def gaps(self, start: int, stop: int) -> list[Range]:
        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                request.reply(server.bodies.state(self._key, principal))
            except TokenRefusal as refusal:
                request.reply(refusal)

        state = await _ask(self._client, self._address, self._key, serve)
        return [] if state.state == "arrived" else RangeSet(state.received).missing(start, stop)


class _Get:
    """Reads the ranges of one offer."""

    def __init__(self, client: VirtualClient, address: str, key: str, out: memoryview) -> None:
        self.digest = ""
        self._client, self._address, self._key, self._out = client, address, key, out
        self._arrived = RangeSet()

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        async def serve(server: VirtualServer, request: Request) -> None:
            try:
                principal = server.authorize(request.principal, request.token)
                offer = server.bodies.look_up(self._key)
                if len(offer.body) != len(self._out):
                    text = f"the body has {len(offer.body)} bytes, {len(self._out)} are wanted"
                    request.reply(ProtocolError(f"GET {self._key}: {text}"))
                    return
                download = server.bodies.fetch(self._key, principal, (start, stop))
            except TokenRefusal as refusal:
                request.reply(refusal)
                return
            try:
                for left, right in _pieces(start, stop, request.rate(up=False)):
                    share = (right - left) / (stop - start)
                    if not await request.piece(right - left, share, up=False):
                        return
                    self._out[left:right] = server.arrived(offer.body[left:right])
                    self._arrived.add(left, right)
                    download.sent(right - left)
                    server.stats.data_bytes_sent += right - left
                    self._client.stats.data_bytes_received += right - left
                request.reply(offer.digest)
            finally:
                download.close()

        self.digest = await _ask(self._client, self._address, self._key, serve)

    async def gaps(self, start: int, stop: int) -> list[Range]:
        return self._arrived.missing(start, stop)


async def _ask(
    client: VirtualClient,
    address: str,
    key: str,
    serve: Callable[[VirtualServer, Request], Coroutine[Any, Any, None]],
) -> Any:
    try:
        return await Request(client, address).run(serve)
    except TokenRefusal as refusal:
        raise refusal_error(refusal.status, refusal.text, f"{address}{PREFIX}{key}") from None
