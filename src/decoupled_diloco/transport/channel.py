"""Both ends of a control channel over a WebSocket, and their bounded queues.

Messages are text frames. A small payload may travel over the channel as well, as a binary frame:
for a few kilobytes, a separate request costs more CPU than the bytes themselves. A binary frame is
four bytes with the length of a header (big-endian), the header (a JSON object) and the payload. The
client sends requests and the server answers. A channel carries one request at a time, so that a
message never waits for more than one payload:

    PUT   {"put": PATH} payload         answered  {}
    GET   {"get": PATH, "nbytes": N}    answered  {"nbytes": N, "digest": TEXT} payload
    either rejected: {"status": an HTTP status, "reason": a sentence}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import aiohttp
from aiohttp import web

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.runtime import now
from decoupled_diloco.transport.interface import Channel, Encoded, OnChannel, Peer, Silence, Stats
from decoupled_diloco.transport.limits import Limits

logger = logging.getLogger(__name__)

WebSocket = aiohttp.ClientWebSocketResponse[bool] | web.WebSocketResponse
SMALL_BODY_BYTES = 96 << 10
"""Largest payload that may travel over a channel. On 0.1 Mbit/s it delays the next message by 8 s,
less than the silence after which a channel is lost."""
SLOW_SECONDS = 0.25
"""A channel that needs longer for a small payload carries no more of them: messages would wait."""
BROKEN = (aiohttp.ClientError, ConnectionError, RuntimeError)
"""Exceptions of a send on a connection that is gone."""
FLUSH_SECONDS = 1.0
"""Time that `close` waits for a peer to receive the outbox; twice this for its close frame."""


def window_bits(role: str) -> int:
    """Return log2 of deflate's window on the control connection of a role; 0: no compression.

    A relay carries the messages of many learners, which resemble each other, over a long link.
    Elsewhere, compression would cost more time than it saves.
    """
    return 15 if role == "relay" else 0


class Mailbox:
    """A bounded queue of encoded messages with one reader."""

    def __init__(self, messages_max: int, bytes_max: int) -> None:
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._queue: deque[str | bytes] = deque()
        self.nbytes = 0
        self.changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def full(self) -> bool:
        """Whether the queue is at its limit; check it before `put`."""
        return len(self._queue) >= self._messages_max or self.nbytes >= self._bytes_max

    def put(self, text: str | bytes) -> None:
        self._queue.append(text)
        self.nbytes += len(text)
        self.changed.set()

    def pop(self) -> str | bytes:
        text = self._queue.popleft()
        self.nbytes -= len(text)
        self.changed.set()
        return text

    async def wait(self) -> None:
        """Wait for the next `put`, `pop` or `changed.set()`."""
        self.changed.clear()
        await self.changed.wait()


def encode(message: dict[str, object] | Encoded, limits: Limits) -> str:
    """Return the JSON text of an outgoing message.

    Raises:
        ProtocolError: It is too large.
    """
    text = (message if isinstance(message, Encoded) else Encoded(message)).text
    if len(text) > limits.message_bytes:
        raise ProtocolError(
            f"control message of {len(text)} bytes exceeds {limits.message_bytes}: "
            "send large data as a payload"
        )
    return text


def decode(text: str | bytes) -> dict[str, Any]:
    """Return the message that a peer sent.

    Raises:
        ProtocolError: It is not a JSON object.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ProtocolError(f"a control message is a JSON {type(message).__name__}, not an object")
    return message


def with_body(header: dict[str, object], body: memoryview | bytes = b"") -> bytes:
    """Return a binary frame with this header and payload."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((struct.pack("!I", len(text)), text, body))


def split_body(frame: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the payload of a binary frame.

    Raises:
        ProtocolError: The frame is malformed.
    """
    end = 4 + int.from_bytes(frame[:4], "big")
    if end > len(frame):
        raise ProtocolError(f"a binary frame of {len(frame)} bytes is shorter than its header")
    return decode(frame[4:end]), memoryview(frame)[end:]


Answer = Callable[[dict[str, Any], memoryview], Awaitable[bytes]]
"""Answers a request for a small payload with a binary frame."""


async def handle(on_channel: OnChannel, channel: Channel) -> None:
    """Run a server's channel handler; a failure is logged and closes the channel."""
    try:
        await on_channel(channel)
    except TransportError:
        pass  # The channel closed while the handler used it; its reason has the cause.
    except Exception:
        logger.exception("the handler of %s failed", channel.peer.principal)
        channel.shut("the server failed on this channel; see its log")


NOTHING_MORE = "the server has nothing more to send"
"""Reason for closing a channel whose handler has returned."""


class _Rest:
    """Awaitable remainder of a coroutine that was already started by `send(None)`."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits: Any) -> None:
        self._coroutine = coroutine
        self._waits = waits

    def __await__(self) -> Generator[Any, Any, None]:
        while True:
            result = yield self._waits
            try:
                self._waits = self._coroutine.send(result)
            except StopIteration:
                return


class WebSocketChannel:
    """A `Channel` over an open WebSocket; `start` begins to read, write and ping.

    Args:
        answer: For a server: answers requests for small payloads.
    """

    def __init__(
        self,
        socket: WebSocket,
        peer: Peer,
        limits: Limits,
        stats: Stats,
        answer: Answer | None = None,
    ) -> None:
        self.peer = peer
        self.last_received = now()
        self.rtt: float | None = None
        self.last_rtt: float | None = None  # benchmarks read it
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
        self._answer = answer
        self._answering: asyncio.Task[None] | None = None
        self._pending: asyncio.Future[bytes] | None = None
        self._sending: _Rest | None = None
        self._is_slow = False

    def start(self) -> None:
        """Begin to serve the socket, until it or the channel is closed."""
        self._main = asyncio.create_task(self._serve())

    def note_activity(self) -> None:
        """Record that a byte arrived from the peer, here or on the data plane."""
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
        self._put(text)

    def _put(self, frame: str | bytes) -> None:
        """Send a frame, at once if the outbox is empty: a loop iteration would double the cost."""
        if self._sending is not None or self._outbox:
            self._outbox.put(frame)
            return
        self._sending = self._begin(frame)
        if self._sending is not None:
            self._outbox.changed.set()

    def _begin(self, frame: str | bytes) -> _Rest | None:
        """Start to send a frame; return the rest to await, None if it was sent at once."""
        if isinstance(frame, bytes):
            sending = self._socket.send_bytes(frame)
        else:
            self._stats.control_bytes_sent += len(frame)
            sending = self._socket.send_str(frame)
        try:
            # One step of the coroutine, without a task: it usually completes, because the socket's
            # buffer has space.
            return _Rest(sending, sending.send(None))
        except StopIteration:
            return None
        except BROKEN as error:
            self._broke(error)
            return None

    @property
    def takes_body(self) -> bool:
        """Whether a client may request or send a small payload over this channel now."""
        return not (self.closed or self._is_slow or self._sending or self._pending is not None)

    async def request(
        self, header: dict[str, object], body: memoryview | bytes = b""
    ) -> tuple[dict[str, Any], memoryview]:
        """Send a request for a small payload, if `takes_body`, and return the answer.

        Raises:
            TransportError: The channel was closed; the server may have executed the request.
        """
        pending = self._pending = asyncio.get_running_loop().create_future()
        began = now()
        self._put(with_body(header, body))
        try:
            frame = await pending
        finally:
            self._is_slow = self._is_slow or now() - began > SLOW_SECONDS
        return split_body(frame)

    def _arrived(self, frame: bytes) -> None:
        """Handle a binary frame: a request to a server, or the answer to a client."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if not pending.done():  # otherwise no task awaits it any more
                pending.set_result(frame)
        elif self._answer is not None and self._answering is None:
            self._answering = asyncio.create_task(self._reply(self._answer, frame))
        else:
            self._violated("an unsolicited binary frame")

    async def _reply(self, answer: Answer, frame: bytes) -> None:
        try:
            reply = await answer(*split_body(frame))
        except ProtocolError as error:
            self._violated(str(error))
        else:
            self._answering = None
            self._put(reply)

    def _violated(self, how: str) -> None:
        self.shut(f"protocol violation by {self.peer.principal!r} at {self.peer.address}: {how}")

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
        # `_main` must not wait for itself.
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
        if self._pending is not None:
            if not self._pending.done():
                self._pending.set_exception(TransportError(f"channel closed: {reason}"))
            self._pending = None
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
                    await asyncio.wait([loops[1]])  # the writer, which empties the outbox
            # While the reader runs: if it were cancelled first, aiohttp would close the connection
            # without waiting for the peer's close frame. If the peer then sends something, its
            # connection is reset, and it does not read our last messages any more.
            await self._close_socket()
        finally:
            self.shut("cancelled")
            tasks = loops if self._answering is None else [*loops, self._answering]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close_socket()

    async def _close_socket(self) -> None:
        # A close frame carries at most 123 bytes of reason.
        farewell = self.reason.encode(errors="replace")[:120].decode(errors="ignore").encode()
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, TimeoutError, RuntimeError):
            async with asyncio.timeout(2 * FLUSH_SECONDS):
                await self._socket.close(code=aiohttp.WSCloseCode.OK, message=farewell)

    async def _read(self) -> None:
        """Move frames into the inbox; pause while it is full."""
        while not self.closed:
            frame = await self._socket.receive()
            kind = frame.type
            if kind is aiohttp.WSMsgType.TEXT:
                self.note_activity()
                self._stats.control_bytes_received += len(frame.data)
                self._inbox.put(frame.data)
                # Not reading the socket is the backpressure: TCP then stops the peer.
                while self._inbox.full and not self.closed:
                    await self._inbox.wait()
            elif kind is aiohttp.WSMsgType.BINARY:
                self.note_activity()
                self._arrived(frame.data)
            elif kind is aiohttp.WSMsgType.PING:
                self.note_activity()
                await self._guard(self._socket.pong(frame.data))
            elif kind is aiohttp.WSMsgType.PONG:
                self.note_activity()
                self._note_pong(frame.data)
            else:
                self.shut(self._farewell(frame))

    def _farewell(self, frame: Any) -> str:
        """Return why the socket ended, according to its last frame."""
        peer = f"{self.peer.principal!r} at {self.peer.address}"
        if frame.type is aiohttp.WSMsgType.CLOSE:
            return f"closed by {peer}: {frame.extra or f'code {frame.data}'}"
        if isinstance(frame.data, aiohttp.WebSocketError):
            return f"protocol violation by {peer}: {frame.data}"
        return f"connection to {peer} lost{f': {frame.data}' if frame.data else ''}"

    async def _write(self) -> None:
        """Send the outbox; after `shut`, continue until it is empty."""
        while True:
            while self._sending is not None or self._outbox:
                # A frame that `_put` has begun goes first: frames must not interleave.
                if self._sending is None:
                    self._sending = self._begin(self._outbox.pop())
                elif await self._guard(self._sending):
                    self._sending = None
                else:
                    return
            if self.closed:
                return
            await self._outbox.wait()

    async def _ping_peer(self) -> None:
        """Ping once per second; close the channel after a long silence."""
        silence = Silence(self._limits.ping_seconds, now(), self.last_received)
        while not self.closed:
            stamp = struct.pack("!d", now())
            # Not awaited: a full socket would block the ping, and with it the check below.
            ping = asyncio.ensure_future(self._guard(self._socket.ping(stamp)))
            await asyncio.sleep(self._limits.ping_seconds)
            ping.cancel()
            silent = silence.observe(now(), self.last_received)
            if silent >= self._limits.lost_seconds:
                self.shut(
                    f"nothing received from {self.peer.principal!r} at {self.peer.address} for "
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
        except BROKEN as error:
            self._broke(error)
            return False
        return True

    def _broke(self, error: Exception) -> None:
        self.shut(f"connection to {self.peer.principal!r} lost: {error}")
