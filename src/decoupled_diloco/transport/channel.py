"""The two ends of a control channel over a WebSocket, and the bounded queues behind them.

Messages are text frames. A small body may go over the channel as well, as a binary frame: for a
body of some kilobytes a request of its own costs more CPU than its bytes. A binary frame is four
bytes with the length of a header (big-endian), the header (a JSON object) and the body. The client
asks, the server answers, and there is one request on a channel at a time, so that messages never
wait for more than one body:

    PUT   {"put": PATH} body            answered  {}
    GET   {"get": PATH, "nbytes": N}    answered  {"nbytes": N, "digest": TEXT} body
    either refused: {"status": an HTTP status, "reason": a sentence}
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
from decoupled_diloco.transport.base import Channel, Encoded, OnChannel, Peer, Silence, Stats
from decoupled_diloco.transport.limits import Limits

logger = logging.getLogger(__name__)

WebSocket = aiohttp.ClientWebSocketResponse[bool] | web.WebSocketResponse
SMALL_BODY_BYTES = 96 << 10
"""The largest body that may go over a channel: on 0.1 Mbit/s it delays what comes after it by
8 s, less than the silence after which a channel is lost."""
SLOW_SECONDS = 0.25
"""A channel that needs longer for a small body carries no further one: messages would wait."""
BROKEN = (aiohttp.ClientError, ConnectionError, RuntimeError)
"""What sending to a connection that is gone raises."""
FLUSH_SECONDS = 1.0
"""How long `close` waits for a peer to take what is in the outbox, and to say goodbye."""


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
        """Whether another message should not be put in."""
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


def decode(text: str | bytes) -> dict[str, Any]:
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


def with_body(header: dict[str, object], body: memoryview | bytes = b"") -> bytes:
    """Return a binary frame."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((struct.pack("!I", len(text)), text, body))


def split_body(frame: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and the body of a binary frame.

    Raises:
        ProtocolError: it is none.
    """
    end = 4 + int.from_bytes(frame[:4], "big")
    if end > len(frame):
        raise ProtocolError(f"a binary frame of {len(frame)} bytes is shorter than its header")
    return decode(frame[4:end]), memoryview(frame)[end:]


Answer = Callable[[dict[str, Any], memoryview], Awaitable[bytes]]
"""Answers a request for a small body with a binary frame."""


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


class _Rest:
    """A coroutine that has begun, to be awaited from its first wait on."""

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
        answer: A server's, to requests for small bodies.
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
        self._asked: asyncio.Future[bytes] | None = None
        self._sending: _Rest | None = None
        self._is_slow = False

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
        self._put(text)

    def _put(self, frame: str | bytes) -> None:
        """Send a frame, at once if none waits before it: a turn of the loop costs as much again."""
        if self._sending is not None or self._outbox:
            self._outbox.put(frame)
            return
        self._sending = self._begin(frame)
        if self._sending is not None:
            self._outbox.changed.set()

    def _begin(self, frame: str | bytes) -> _Rest | None:
        """Send a frame as far as the peer takes it, and return what is left to await."""
        if isinstance(frame, bytes):
            sending = self._socket.send_bytes(frame)
        else:
            self._stats.control_bytes_sent += len(frame)
            sending = self._socket.send_str(frame)
        try:
            return _Rest(sending, sending.send(None))
        except StopIteration:
            return None
        except BROKEN as error:
            self._broke(error)
            return None

    @property
    def takes_body(self) -> bool:
        """Whether a client may ask for a small body, or send one, over this channel now."""
        return not (self.closed or self._is_slow or self._sending or self._asked is not None)

    async def ask(
        self, header: dict[str, object], body: memoryview | bytes = b""
    ) -> tuple[dict[str, Any], memoryview]:
        """Send a request for a small body, where `takes_body`, and return the answer.

        Raises:
            TransportError: the channel was closed; the server may have carried the request out.
        """
        asked = self._asked = asyncio.get_running_loop().create_future()
        began = now()
        self._put(with_body(header, body))
        try:
            frame = await asked
        finally:
            self._is_slow = self._is_slow or now() - began > SLOW_SECONDS
        return split_body(frame)

    def _arrived(self, frame: bytes) -> None:
        """A binary frame: a request to a server, or the answer to a client's."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            if not asked.done():  # else it is not awaited any more
                asked.set_result(frame)
        elif self._answer is not None and self._answering is None:
            self._answering = asyncio.create_task(self._reply(self._answer, frame))
        else:
            self._violated("a binary frame that nothing asked for")

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
        if self._asked is not None:
            if not self._asked.done():
                self._asked.set_exception(TransportError(f"channel closed: {reason}"))
            self._asked = None
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
            elif kind is aiohttp.WSMsgType.BINARY:
                self.heard()
                self._arrived(frame.data)
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
        if frame.type is aiohttp.WSMsgType.CLOSE:
            return f"closed by {who}: {frame.extra or f'code {frame.data}'}"
        if isinstance(frame.data, aiohttp.WebSocketError):
            return f"protocol violation by {who}: {frame.data}"
        return f"connection to {who} lost{f': {frame.data}' if frame.data else ''}"

    async def _write(self) -> None:
        """Send the outbox; goes on after `shut` until it is empty."""
        while True:
            while self._sending is not None or self._outbox:
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
        except BROKEN as error:
            self._broke(error)
            return False
        return True

    def _broke(self, error: Exception) -> None:
        self.shut(f"connection to {self.peer.principal!r} lost: {error}")
