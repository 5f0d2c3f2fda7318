"""The two ends of a control channel over a WebSocket, and the bounded queues behind them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import aiohttp
from aiohttp import web

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.runtime import now
from decoupled_diloco.transport.base import (
    Channel,
    Encoded,
    Limits,
    OnChannel,
    Peer,
    Silence,
    Stats,
)

logger = logging.getLogger(__name__)

WebSocket = aiohttp.ClientWebSocketResponse[bool] | web.WebSocketResponse
FLUSH_SECONDS = 1.0
"""How long `close` waits for a peer to take what is in the outbox, and to say goodbye."""


class Mailbox:
    """A bounded queue of encoded messages with one reader."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._queue: deque[str] = deque()
        self.nbytes = 0
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether another message should not be put in."""
        return len(self._queue) >= self._messages_max or self.nbytes >= self._bytes_max

    def put(self, text: str) -> None:
        self._queue.append(text)
        self.nbytes += len(text)
        self.changed.set()

    def pop(self) -> str:
        text = self._queue.popleft()
        self.nbytes -= len(text)
        self.changed.set()
        return text

    async def wait(self) -> None:
        """Wait for the next `put`, `pop` or `changed.set()`."""
        self.changed.clear()
        await self.changed.wait()


def encode(message: dict[str, object] | Encoded, limits: Limits) -> str:
    """Return the JSON text of a message of ours.

    Raises:
        ProtocolError: it is too large.
    """
    text = (message if isinstance(message, Encoded) else Encoded(message)).text
    if len(text) > limits.message_bytes:
        raise ProtocolError(
            f"a control message of {len(text)} bytes exceeds {limits.message_bytes}: "
            "large data goes as a body"
        )
    return text


def decode(text: str) -> dict[str, object]:
    """Return a message of the peer.

    Raises:
        ProtocolError: it is not a JSON object.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"a control message is a JSON {type(message).__name__}, not an object")
    return message


async def handle(on_channel: OnChannel, channel: Channel) -> None:
    """Runs a server's handler of a channel; one that fails is logged, and the peer is told."""
    try:
        await on_channel(channel)
    except TransportError:
        pass  # The channel closed while the handler used it; its reason says why.
    except Exception:
        logger.exception("the handler of %s failed", channel.peer.principal)
        channel.shut("the server failed on this channel; its log says why")


NOTHING_MORE = "the server has nothing more to say"
"""Why a server closes a channel whose handler has returned."""


class WebSocketChannel:
    """A `Channel` over an open WebSocket; `start` begins to read, write and ping."""

    def __init__(self, socket: WebSocket, peer: Peer, limits: Limits, stats: Stats) -> None:
        self.peer = peer
        self.last_received = now()
        self.rtt: float | None = None
        self.last_rtt: float | None = None
        self.reason = ""
        self.on_closed: Callable[[], None] | None = None
        self._socket = socket
        self._limits = limits
        self._stats = stats
        self._outbox = Mailbox(limits.outbox_messages, limits.outbox_bytes)
        self._inbox = Mailbox(limits.inbox_messages, limits.inbox_bytes)
        self.closed = False
        self._closing = asyncio.Event()
        self._recent_rtts: deque[float] = deque(maxlen=10)
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve the socket, until it or the channel is closed."""
        self._main = asyncio.create_task(self._serve())

    def heard(self) -> None:
        """Note that a byte came from the peer, here or on the data plane."""
        self.last_received = now()

    def send(self, message: dict[str, object] | Encoded) -> None:
        text = encode(message, self._limits)
        if self.closed:
            return
        if self._outbox.full:
            self.shut(
                f"slow peer: {len(self._outbox)} messages of {self._outbox.nbytes} bytes wait for "
                f"{self.peer.principal!r}"
            )
            return
        self._outbox.put(text)

    async def receive(self) -> dict[str, object]:
        while not self._inbox:
            if self.closed:
                raise TransportError(f"channel closed: {self.reason}")
            await self._inbox.wait()
        try:
            return decode(self._inbox.pop())
        except ProtocolError as error:
            self.shut(f"protocol violation by {self.peer.principal!r}: {error}")
            raise TransportError(f"channel closed: {self.reason}") from None

    async def close(self, reason: str = "") -> None:
        self.shut(reason or "closed by this side")
        await self.wait_closed()

    async def wait_closed(self) -> None:
        if self._main is not None and asyncio.current_task() is not self._main:
            await asyncio.wait([self._main])

    def shut(self, reason: str) -> None:
        """Close without waiting; the first reason counts."""
        if self.closed:
            return
        self.closed = True
        self.reason = reason
        self._closing.set()
        self._inbox.changed.set()
        self._outbox.changed.set()
        if self.on_closed is not None:
            self.on_closed()

    async def _serve(self) -> None:
        loops = [
            asyncio.create_task(each) for each in (self._read(), self._write(), self._ping_peer())
        ]
        try:
            await self._closing.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_SECONDS):
                    await asyncio.wait([loops[1]])
        finally:
            self.shut("cancelled")
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self._close_socket()

    async def _close_socket(self) -> None:
        # A close frame carries at most 123 bytes of reason.
        farewell = self.reason.encode(errors="replace")[:120].decode(errors="ignore").encode()
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError, RuntimeError):
            async with asyncio.timeout(2 * FLUSH_SECONDS):
                await self._socket.close(code=aiohttp.WSCloseCode.OK, message=farewell)

    async def _read(self) -> None:
        """Move what arrives into the inbox; pause while it is not emptied."""
        while not self.closed:
            frame = await self._socket.receive()
            kind = frame.type
            if kind is aiohttp.WSMsgType.TEXT:
                self.heard()
                self._stats.control_bytes_received += len(frame.data)
                self._inbox.put(frame.data)
                while self._inbox.full and not self.closed:
                    await self._inbox.wait()
            elif kind is aiohttp.WSMsgType.PING:
                self.heard()
                await self._guard(self._socket.pong(frame.data))
            elif kind is aiohttp.WSMsgType.PONG:
                self.heard()
                self._note_pong(frame.data)
            else:
                self.shut(self._farewell(frame))

    def _farewell(self, frame: Any) -> str:
        """Return why the socket ended, from its last frame."""
        who = f"{self.peer.principal!r} at {self.peer.address}"
        if frame.type is aiohttp.WSMsgType.BINARY:
            return f"protocol violation by {who}: binary data on the control plane"
        if frame.type is aiohttp.WSMsgType.CLOSE:
            return f"closed by {who}: {frame.extra or f'code {frame.data}'}"
        if isinstance(frame.data, aiohttp.WebSocketError):
            return f"protocol violation by {who}: {frame.data}"
        return f"connection to {who} lost{f': {frame.data}' if frame.data else ''}"

    async def _write(self) -> None:
        """Send the outbox; goes on after `shut` until it is empty."""
        while True:
            while self._outbox:
                text = self._outbox.pop()
                self._stats.control_bytes_sent += len(text)
                if not await self._guard(self._socket.send_str(text)):
                    return
            if self.closed:
                return
            await self._outbox.wait()

    async def _ping_peer(self) -> None:
        """Ping each second; give the peer up after a long silence."""
        silence = Silence(self._limits.ping_seconds, now(), self.last_received)
        while not self.closed:
            stamp = struct.pack("!d", now())
            # Not awaited to the end: a full socket must not stop the watch below.
            ping = asyncio.ensure_future(self._guard(self._socket.ping(stamp)))
            await asyncio.sleep(self._limits.ping_seconds)
            ping.cancel()
            silent = silence.observe(now(), self.last_received)
            if silent >= self._limits.lost_seconds:
                self.shut(
                    f"nothing heard from {self.peer.principal!r} at {self.peer.address} for "
                    f"{silent:.1f} s"
                )

    def _note_pong(self, stamp: bytes) -> None:
        if len(stamp) != 8:
            return
        rtt = now() - struct.unpack("!d", stamp)[0]
        if 0 <= rtt < 2 * self._limits.lost_seconds:
            self.last_rtt = rtt
            self._recent_rtts.append(rtt)
            self.rtt = min(self._recent_rtts)

    async def _guard(self, sending: Any) -> bool:
        """Await a send; a broken connection closes the channel instead of raising."""
        try:
            await sending
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            self.shut(f"connection to {self.peer.principal!r} lost: {error}")
            return False
        return True
