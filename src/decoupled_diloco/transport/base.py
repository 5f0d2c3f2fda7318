"""What every transport offers: a control plane of small ordered messages, a data plane of bodies.

The transport decides nothing about the protocol: control messages are dictionaries that JSON can
carry, bodies are opaque bytes. HTTP (aiohttp), the virtual world's transport, and the one within a
process that tests use implement the same interface.

Nothing here asks a user for a timeout. Two derived intervals decide what is lost, both counted
in time during which this process really ran, so that a paused process does not give up its peers
the moment it wakes:

- a channel is lost when its peer was silent for `Limits.lost_seconds` (ten missed pings);
- a transfer is abandoned when no byte of it moved for `max(Limits.stall_seconds, 20 · rtt)`.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from decoupled_diloco.transport.bodies import BodyBooks

PIECE_BYTES = 512 << 10
"""Bodies move between buffers in pieces of this size: on loopback the fastest of 128 KiB to 4 MiB,
and so small that handling one (about 0.1 ms) never delays a ping."""


@dataclass(frozen=True)
class Peer:
    """The process at the other end of a channel."""

    principal: str  # learner id, observer or shard name, as bound by the token
    role: str  # what the peer says it is: `learner`, `observer`, `shard`
    address: str  # where it is: the server's `http://host:port`, or the client's `host:port`


@dataclass
class Stats:
    """Application bytes moved by one server or client since it was made."""

    control_bytes_sent: int = 0
    control_bytes_received: int = 0
    data_bytes_sent: int = 0
    data_bytes_received: int = 0


@dataclass(frozen=True)
class TransferStats:
    """How one body was moved."""

    nbytes: int
    seconds: float  # from the call to the last byte (GET) or the last acknowledgement (PUT)
    stripes: int = 1
    retries: int = 0
    # congestion control of the sending sockets (`bbr`, `cubic`); empty if unknown
    congestion: str = ""
    digest: str = ""  # what the sender gave with the body (GET); empty otherwise


class Encoded:
    """A control message as the JSON text that is sent: made once for many channels."""

    def __init__(self, message: dict[str, object]) -> None:
        # ASCII: its length in bytes and in characters agree.
        self.text = json.dumps(message, separators=(",", ":"))


class Channel(Protocol):
    """One control connection: ordered, and reliable while it lives."""

    @property
    def peer(self) -> Peer:
        """The process at the other end."""

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent."""

    @property
    def reason(self) -> str:
        """Why it is closed; empty while it lives."""

    @property
    def last_received(self) -> float:
        """`time.monotonic()` of the last byte heard from the peer, pings and bodies included."""

    @property
    def rtt(self) -> float | None:
        """Smallest recent round trip of a ping in seconds, or None before the first answer."""

    def send(self, message: dict[str, object] | Encoded) -> None:
        """Put a message into the outbox; never blocks.

        A full outbox means a peer that does not read: the channel is closed with a reason.
        On a closed channel the message is dropped, and `receive` tells why.

        Raises:
            ProtocolError: the message is larger than `Limits.message_bytes`.
        """

    async def receive(self) -> dict[str, object]:
        """Return the next message; what arrived before the peer closed is still delivered.

        Raises:
            TransportError: the channel is closed; the text is the reason.
        """

    def shut(self, reason: str) -> None:
        """Close without waiting; the first reason counts."""

    async def close(self, reason: str = "") -> None:
        """Send what waits in the outbox if the peer takes it at once, then close."""


class Server(Protocol):
    """Accepts control connections and serves bodies on one port."""

    @property
    def address(self) -> str:
        """`scheme://host:port`, with the port really bound."""

    @property
    def bodies(self) -> BodyBooks:
        """The data plane."""

    @property
    def stats(self) -> Stats:
        """Bytes moved so far."""

    @property
    def certificate_ends_at(self) -> float | None:
        """When the certificate that it shows ends, in seconds since the epoch; None: no such."""

    async def start(self) -> None:
        """Bind and accept. Raises TransportError if the address cannot be bound."""

    async def stop(self) -> None:
        """Close all channels, fail all transfers, free the port."""


class Locator(Protocol):
    """Knows where servers are by now that move while a process runs."""

    async def look(self) -> Collection[str]:
        """Finds out, and returns the addresses at which they may be dialled now."""

    def now(self, address: str) -> str:
        """Where the server is that was at an address; one that is not known stays as it is."""


class Client(Protocol):
    """Dials out; one per process."""

    @property
    def stats(self) -> Stats:
        """Bytes moved so far."""

    @property
    def certificate_ends_at(self) -> float | None:
        """When the certificate that it shows ends, in seconds since the epoch; None: no such."""

    def trust(self, address: str) -> None:
        """Shows the token to a server from now on."""

    async def connect(self, address: str, role: str, principal: str) -> Channel:
        """Open a control channel; one attempt.

        Raises:
            AccessError: the server refuses: wrong token, or another principal's.
            TransportError: the address does not answer.
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
        """Send a body, or a part of one that has other senders too.

        Args:
            url: What the control plane named: relative, or absolute to another host.
            base: Address a relative URL belongs to; default: the one connected to last.
            first: Of a part: which byte of the whole is its first.
            total: Of a part: size of the whole in bytes.

        Raises:
            AccessError: refused for lack of rights.
            ProtocolError: refused: unknown, replayed, cancelled, of another size.
            TransportError: the connection failed and resuming did not help.
        """

    async def get(
        self, url: str, out: memoryview, *, base: str = "", first: int = 0, total: int | None = None
    ) -> TransferStats:
        """Fill `out` with a body of exactly that size, or a part; for the rest see `put`."""

    async def close(self) -> None:
        """Close all channels and connections."""


OnChannel = Callable[[Channel], Awaitable[None]]
Health = Callable[[], dict[str, object]]


@dataclass
class Silence:
    """Counts how long nothing was heard, in time during which this process really ran.

    A step never counts for more than twice its nominal length: a process that was stopped for a
    minute finds its peers as alive as when it stopped, and has time to read what they sent.

    >>> silence = Silence(step_seconds=1.0, now=0.0)
    >>> silence.observe(1.0, heard=0), silence.observe(61.0, heard=0)
    (1.0, 3.0)
    >>> silence.observe(62.0, heard=7)
    0.0
    """

    step_seconds: float
    now: float
    heard: object = 0
    seconds: float = field(default=0.0)

    def observe(self, now: float, heard: object) -> float:
        """Return the silence so far, given the time and any value that changes when heard."""
        elapsed, self.now = now - self.now, now
        if heard != self.heard:
            self.heard, self.seconds = heard, 0.0
        else:
            self.seconds += min(elapsed, 2 * self.step_seconds)
        return self.seconds
