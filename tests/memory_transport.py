"""A transport within one process: the same server logic and rules, without sockets.

It connects real shells in one event loop. Faults are optional and seeded.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.runtime import now
from decoupled_diloco.transport.byte_ranges import Range, RangeSet, Window
from decoupled_diloco.transport.channel import NOTHING_MORE, Mailbox, decode, encode, handle
from decoupled_diloco.transport.interface import (
    PIECE_BYTES,
    Encoded,
    Health,
    OnChannel,
    Peer,
    Stats,
)
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import PREFIX, BodyBooks, Download, Stream
from decoupled_diloco.transport.pool import ReceivePool
from decoupled_diloco.transport.tokens import (
    RequestRefusal,
    Tokens,
    bearer,
    check_role,
    refusal_error,
)
from decoupled_diloco_lab.simulate.in_process import BodyClient


@dataclass
class Faults:
    """Probabilities of faults, drawn from a seeded source.

    Attributes:
        rng: Source of all choices.
        refuse: Probability that an attempt to connect is refused.
        cut: Probability that sending a message cuts the channel. Messages in flight are lost in
            both directions.
        cut_body: Probability that a piece of a payload cuts its connection. The range is resumed.
    """

    rng: random.Random
    refuse: float = 0.0
    cut: float = 0.0
    cut_body: float = 0.0

    def strikes(self, probability: float) -> bool:
        """Draw whether a fault happens."""
        return probability > 0 and self.rng.random() < probability


@dataclass
class MemoryNetwork:
    """The directory of servers by address."""

    faults: Faults | None = None
    servers: dict[str, MemoryServer] = field(default_factory=dict)
    _ports: itertools.count[int] = field(default_factory=lambda: itertools.count(40000))

    def find(self, address: str) -> MemoryServer:
        """Return the server at an address.

        Raises:
            TransportError: No server listens there.
        """
        server = self.servers.get(address)
        if server is None:
            raise TransportError(f"cannot reach {address}: connection refused")
        return server

    def strikes(self, kind: str) -> bool:
        """Whether a fault of a kind happens now."""
        return self.faults is not None and self.faults.strikes(getattr(self.faults, kind))


class MemoryChannel:
    """One end of a pair of queues."""

    def __init__(self, network: MemoryNetwork, peer: Peer, limits: Limits, stats: Stats) -> None:
        self.peer = peer
        self.reason = ""
        self.rtt: float | None = 0.0
        self._network = network
        self._limits = limits
        self._stats = stats
        self._closed_at: float | None = None
        self._inbox = Mailbox(
            limits.inbox_messages + limits.outbox_messages, limits.inbox_bytes + limits.outbox_bytes
        )
        self._other: MemoryChannel = self

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""
        return self._closed_at is not None

    @property
    def last_received(self) -> float:
        """The present time until the channel closes: pings within one process never fail."""
        return now() if self._closed_at is None else self._closed_at

    def send(self, message: dict[str, object] | Encoded) -> None:
        """See `Channel.send`."""
        text = encode(message, self._limits)
        if self.closed:
            return
        if self._network.strikes("cut"):
            self.cut()
            return
        other = self._other
        if len(text) > other._limits.message_bytes:
            other.shut(
                f"protocol violation by {other.peer.principal!r}: a message of {len(text)} bytes "
                f"exceeds {other._limits.message_bytes}"
            )
        elif other._inbox.full:
            self.shut(
                f"slow peer: {len(other._inbox)} messages of {other._inbox.nbytes} bytes wait for "
                f"{self.peer.principal!r}"
            )
        else:
            self._stats.control_bytes_sent += len(text)
            other._stats.control_bytes_received += len(text)
            other._inbox.put(text)

    async def receive(self) -> dict[str, object]:
        """See `Channel.receive`."""
        while not self._inbox:
            if self.closed:
                raise TransportError(f"channel closed: {self.reason}")
            await self._inbox.wait()
        return decode(self._inbox.pop())

    async def close(self, reason: str = "") -> None:
        """See `Channel.close`."""
        self.shut(reason or "closed by this side")
        await asyncio.sleep(0)

    def shut(self, reason: str) -> None:
        """Close both ends and pass the reason to the other end."""
        if self.closed:
            return
        self._mark(reason)
        other = self._other
        other._mark(f"closed by {other.peer.principal!r} at {other.peer.address}: {reason}")

    def cut(self) -> None:
        """Lose the connection and the messages in flight."""
        for end in (self, self._other):
            while end._inbox:
                end._inbox.pop()
            end._mark(f"connection to {end.peer.principal!r} at {end.peer.address} lost")

    def _mark(self, reason: str) -> None:
        if not self.closed:
            self._closed_at = now()
            self.reason = reason
            self._inbox.changed.set()


class MemoryServer:
    """A `Server` in this process; arguments as for `HttpServer`."""

    certificate_ends_at: float | None = None

    def __init__(
        self,
        network: MemoryNetwork,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tokens: Tokens | None = None,
        on_channel: OnChannel,
        health: Health = dict,
        pool_bytes: int = 1 << 30,
        limits: Limits | None = None,
    ) -> None:
        self.stats = Stats()
        self.limits = limits or Limits()
        self.tokens = tokens or Tokens()
        self.tokens.check_bind(host)
        self.health = health
        self.pool = ReceivePool(pool_bytes)
        self.bodies = BodyBooks(self.pool, self.limits)
        self._network = network
        self._host = host
        self._port = port
        self._on_channel = on_channel
        self._channels: dict[MemoryChannel, asyncio.Task[None]] = {}

    @property
    def address(self) -> str:
        """`memory://host:port`."""
        return f"memory://{self._host}:{self._port}"

    async def start(self) -> None:
        """See `Server.start`."""
        if self._port == 0:
            self._port = next(self._network._ports)
        if self.address in self._network.servers:
            raise TransportError(f"cannot listen on {self.address}: the address is in use")
        self._network.servers[self.address] = self

    async def stop(self) -> None:
        """See `Server.stop`."""
        if self._network.servers.get(self.address) is self:
            del self._network.servers[self.address]
        for channel in list(self._channels):
            channel.shut("the server stops")
        self.bodies.stop("the server stops")
        await asyncio.sleep(0)
        tasks = list(self._channels.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def accept(self, channel: MemoryChannel) -> None:
        """Serve one end of a new channel."""
        self._channels[channel] = asyncio.create_task(self._serve(channel))

    async def _serve(self, channel: MemoryChannel) -> None:
        try:
            await handle(self._on_channel, channel)
        finally:
            self._channels.pop(channel, None)
            channel.shut(NOTHING_MORE)


class MemoryClient(BodyClient):
    """A `Client` in this process; arguments as for `HttpClient`."""

    scheme = "memory"

    def __init__(
        self,
        network: MemoryNetwork,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(token=token, limits=limits, rng=rng)
        self._network = network

    async def connect(
        self, address: str, role: str, principal: str, *, lost_seconds: float | None = None
    ) -> MemoryChannel:
        """See `Client.connect`."""
        self._dials(address, principal)
        await asyncio.sleep(0)
        server = self._network.find(address)
        if self._network.strikes("refuse"):
            raise TransportError(f"cannot reach {address}: refused by a fault")
        try:
            check_role(role)
            self.authorize(server)
        except RequestRefusal as refusal:
            raise refusal_error(refusal.status, refusal.text, address) from None
        mine = MemoryChannel(
            self._network, Peer(principal, role, address), self._limits, self.stats
        )
        peer = Peer(principal, role, f"memory:{id(mine):x}")
        theirs = MemoryChannel(self._network, peer, server.limits, server.stats)
        mine._other, theirs._other = theirs, mine
        self._keep(mine)
        server.accept(theirs)
        return mine

    async def size(self, url: str, *, base: str = "") -> int:
        """See `Client`."""
        address, key = self._resolve(url, base)
        server = self.server(address)
        await server.bodies.obtain(key)
        return len(server.bodies.look_up(key).body)

    def putting(self, address: str, key: str, body: Window) -> _MemoryPut:
        """See `BodyClient`."""
        return _MemoryPut(self, address, key, body)

    def getting(self, address: str, key: str, out: Window) -> _MemoryGet:
        """See `BodyClient`."""
        return _MemoryGet(self, address, key, out)

    def authorize(self, server: MemoryServer) -> str:
        """Return the principal under which the server knows this client."""
        principal, token = self.identity(server.address)
        return server.tokens.authorize(bearer(token), principal)

    def server(self, address: str) -> MemoryServer:
        """Return the server of a payload."""
        return self._network.find(address)

    def piece_lost(self) -> None:
        """Raise if a fault cuts the connection of a payload."""
        if self._network.strikes("cut_body"):
            raise TransportError("the connection was cut by a fault")


class _MemoryPut:
    """Uploads the ranges of one payload."""

    digest = ""

    def __init__(self, client: MemoryClient, address: str, key: str, body: Window) -> None:
        self._client = client
        self._address = address
        self._key = key
        self._body = body

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        server = self._client.server(self._address)
        try:
            principal = self._client.authorize(server)
            stream = server.bodies.open(
                self._key, principal, (start, stop), len(self._body), resumed
            )
            await self._send(server, stream)
            await server.bodies.passed_on(self._key)
        except RequestRefusal as refusal:
            target = f"{self._address}{PREFIX}{self._key}"
            raise refusal_error(refusal.status, refusal.text, target) from None

    async def _send(self, server: MemoryServer, stream: Stream) -> None:
        async with stream.receiving():
            for position in range(stream.start, stream.stop, PIECE_BYTES):
                self._client.piece_lost()
                piece = self._body[position : min(position + PIECE_BYTES, stream.stop)]
                stream.write(piece)
                self._client.stats.data_bytes_sent += len(piece)
                server.stats.data_bytes_received += len(piece)
                await asyncio.sleep(0)
            stream.finish()

    async def gaps(self, start: int, stop: int) -> list[Range]:
        server = self._client.server(self._address)
        try:
            state, received = server.bodies.state(self._key, self._client.authorize(server))
        except RequestRefusal as refusal:
            raise refusal_error(refusal.status, refusal.text, self._address) from None
        return [] if state == "arrived" else RangeSet(received).missing(start, stop)


class _MemoryGet:
    """Downloads the ranges of one payload that a server offers."""

    def __init__(self, client: MemoryClient, address: str, key: str, out: Window) -> None:
        self.digest = ""
        self._client = client
        self._address = address
        self._key = key
        self._out = out
        self._arrived = RangeSet()

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        server = self._client.server(self._address)
        target = f"{self._address}{PREFIX}{self._key}"
        try:
            principal = self._client.authorize(server)
            await server.bodies.obtain(self._key)
            offer = server.bodies.look_up(self._key)
            if len(offer.body) != len(self._out):
                raise ProtocolError(
                    f"GET {target}: the payload has {len(offer.body)} bytes, expected "
                    f"{len(self._out)}"
                )
            download = server.bodies.fetch(self._key, principal, (start, stop))
        except RequestRefusal as refusal:
            raise refusal_error(refusal.status, refusal.text, target) from None
        self.digest = offer.digest
        try:
            await self._receive(server, download, start, stop)
        finally:
            download.close()

    async def _receive(
        self, server: MemoryServer, download: Download, start: int, stop: int
    ) -> None:
        for position in range(start, stop, PIECE_BYTES):
            self._client.piece_lost()
            end = min(position + PIECE_BYTES, stop)
            self._out[position:end] = download.offer.body[position:end]
            self._arrived.add(position, end)
            download.sent(end - position)
            server.stats.data_bytes_sent += end - position
            self._client.stats.data_bytes_received += end - position
            await asyncio.sleep(0)
            if server.address not in self._client._network.servers:
                raise TransportError(f"GET {self._key}: the server stopped")

    async def gaps(self, start: int, stop: int) -> list[Range]:
        return self._arrived.missing(start, stop)
