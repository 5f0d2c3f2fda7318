"""Interface of every transport: small ordered control messages, and payloads.

The transport makes no protocol decisions: control messages are dictionaries that JSON can
represent, and payloads are opaque bytes. Three implementations share this interface: HTTP
(aiohttp), the virtual world's transport, and an in-process transport for tests.

No setting specifies a timeout. Two derived intervals decide when something is lost. Both count only
time during which this process really ran, so that a process that was paused does not drop its peers
as soon as it resumes:

- A channel is lost when its peer was silent for `Limits.lost_seconds` (ten missed pings).
- A transfer is abandoned when no byte moved for `max(Limits.stall_seconds, 20 · rtt)`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from decoupled_diloco.transport.payload_store import BodyBooks

PIECE_BYTES = 512 << 10
"""Size of the pieces in which payloads are copied between buffers. On loopback this is the fastest
size from 128 KiB to 4 MiB. Handling one piece takes about 0.1 ms, so it never delays a ping."""


@dataclass(frozen=True)
class Peer:
    """The process at the other end of a channel."""

    principal: str  # learner name, observer or shard name, as bound by the token
    role: str  # the role that the peer claims: `learner`, `observer`, `shard`
    address: str  # the server's `http://host:port`, or the client's `host:port`
    # at a server: returns why this peer may not represent a principal, or an empty text
    represents: Callable[[str], str] = field(default=lambda principal: "", compare=False)


@dataclass
class Stats:
    """Application bytes moved by one server or client since its creation."""

    control_bytes_sent: int = 0
    control_bytes_received: int = 0
    data_bytes_sent: int = 0
    data_bytes_received: int = 0


@dataclass(frozen=True)
class TransferStats:
    """Size, duration and retries of one payload transfer."""

    nbytes: int
    seconds: float  # from the call to the last byte (GET) or the last acknowledgement (PUT)
    stripes: int = 1
    retries: int = 0
    # congestion control of the sending sockets (`bbr`, `cubic`); empty if unknown
    congestion: str = ""
    digest: str = ""  # the digest that the sender reported with the payload (GET); empty otherwise


class Encoded:
    """A control message as JSON text, encoded once for many channels."""

    def __init__(self, message: dict[str, object]) -> None:
        # ASCII only, so that its length in characters is its length in bytes.
        self.text = json.dumps(message, separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Encoded:
        """Create it from its text."""
        encoded = cls.__new__(cls)
        encoded.text = text
        return encoded


class Channel(Protocol):
    """One control connection: ordered, and reliable while it lives."""

    @property
    def peer(self) -> Peer:
        """Return the process at the other end."""

    @property
    def closed(self) -> bool:
        """Whether sending is no longer possible."""

    @property
    def reason(self) -> str:
        """Return the reason for closing; empty while the channel is open."""

    @property
    def last_received(self) -> float:
        """`time.monotonic()` of the last byte from the peer, pings and payloads included."""

    @property
    def rtt(self) -> float | None:
        """Smallest recent round trip of a ping in seconds, or None before the first answer."""

    def send(self, message: dict[str, object] | Encoded) -> None:
        """Put a message into the outbox; never blocks.

        A full outbox means that the peer does not read: the channel is closed with a reason.
        A closed channel drops the message, and `receive` raises with the reason.

        Raises:
            ProtocolError: The message is larger than `Limits.message_bytes`.
        """

    async def receive(self) -> dict[str, object]:
        """Return the next message; messages that arrived before the peer closed are delivered.

        Raises:
            TransportError: The channel is closed; the error text is the reason.
        """

    def shut(self, reason: str) -> None:
        """Close without waiting; the first reason is kept."""

    async def close(self, reason: str = "") -> None:
        """Send the queued messages if the peer accepts them at once, then close."""


class Server(Protocol):
    """A server that accepts control connections and serves payloads on one port."""

    @property
    def address(self) -> str:
        """Return `scheme://host:port` with the port that is actually bound."""

    @property
    def bodies(self) -> BodyBooks:
        """The data plane."""

    @property
    def stats(self) -> Stats:
        """Bytes moved so far."""

    @property
    def certificate_ends_at(self) -> float | None:
        """Expiry of the server's certificate in seconds since the epoch; None without one."""

    async def start(self) -> None:
        """Bind and accept connections. Raises TransportError if the address cannot be bound."""

    async def stop(self) -> None:
        """Close all channels, fail all transfers and release the port."""


class Locator(Protocol):
    """Resolves the current addresses of servers that may move while a process runs."""

    async def locate(self) -> Collection[str]:
        """Refresh the address table, and return the addresses that may be dialed now."""

    def now(self, address: str) -> str:
        """Return the current address of the server that was at `address`.

        An unknown address is returned unchanged.

        Raises:
            TransportError: The server has not had an address yet.
        """


class Client(Protocol):
    """A dialing endpoint; one per process."""

    @property
    def stats(self) -> Stats:
        """Bytes moved so far."""

    @property
    def certificate_ends_at(self) -> float | None:
        """Expiry of the client's certificate in seconds since the epoch; None without one."""

    def trust(self, address: str) -> None:
        """Send the token to the server at this address from now on."""

    async def connect(
        self, address: str, role: str, principal: str, *, lost_seconds: float | None = None
    ) -> Channel:
        """Open a control channel; one attempt.

        Args:
            lost_seconds: Silence after which the channel is lost; default: `Limits.lost_seconds`.

        Raises:
            AccessError: The server rejects the token, or the token belongs to another principal.
            TransportError: The address does not answer.
        """

    async def put(
        self,
        url: str,
        body: memoryview,
        *,
        base: str = "",
        first: int = 0,
        total: int | None = None,
    ) -> TransferStats:
        """Send a payload, or one part of a payload that has several senders.

        Args:
            url: The URL from the control plane: relative, or absolute on another host.
            base: Base address of a relative URL; default: the most recently connected server.
            first: For a part: offset of its first byte in the whole payload.
            total: For a part: size of the whole payload in bytes.

        Raises:
            AccessError: The server denies access.
            ProtocolError: The payload is unknown, replayed, cancelled or of the wrong size.
            TransportError: The connection failed, and resuming did not help.
        """

    async def get(
        self, url: str, out: memoryview, *, base: str = "", first: int = 0, total: int | None = None
    ) -> TransferStats:
        """Fill `out` with a payload or a part of exactly that size; for the rest see `put`."""

    async def size(self, url: str, *, base: str = "") -> int:
        """Return the size of a payload in bytes; for arguments and errors see `get`."""

    async def close(self) -> None:
        """Close all channels and connections."""


OnChannel = Callable[[Channel], Awaitable[None]]
Health = Callable[[], dict[str, object]]


@dataclass
class Silence:
    """Measures how long a peer was silent, in time during which this process really ran.

    A step never counts for more than twice its nominal length. A process that was stopped for a
    minute therefore still treats its peers as alive, and has time to read what they sent.

    >>> silence = Silence(step_seconds=1.0, now=0.0)
    >>> silence.observe(1.0, marker=0), silence.observe(61.0, marker=0)
    (1.0, 3.0)
    >>> silence.observe(62.0, marker=7)
    0.0
    """

    step_seconds: float
    now: float
    marker: object = 0
    seconds: float = field(default=0.0)

    def observe(self, now: float, marker: object) -> float:
        """Return the silence in seconds.

        Args:
            now: Current time in seconds.
            marker: Any value that changes whenever something arrives from the peer.
        """
        elapsed, self.now = now - self.now, now
        if marker != self.marker:
            self.marker, self.seconds = marker, 0.0
        else:
            self.seconds += min(elapsed, 2 * self.step_seconds)
        return self.seconds
