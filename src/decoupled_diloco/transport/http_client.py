"""The HTTP client: dials out, and transfers payloads over connections besides the control plane."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from decoupled_diloco.errors import (
    AccessError,
    DilocoError,
    ProtocolError,
    RunEndedError,
    TransportError,
)
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.transport.byte_ranges import (
    Range,
    RangeSet,
    Window,
    read_content_range,
    read_list,
    write_content_range,
    write_range,
)
from decoupled_diloco.transport.channel import SMALL_BODY_BYTES, WebSocketChannel, window_bits
from decoupled_diloco.transport.http_server import (
    BBR,
    CONTROL,
    KEEP_ALIVE_SECONDS,
    NEAR_RTT_SECONDS,
    READ_BUFFER_BYTES,
    set_congestion_control,
)
from decoupled_diloco.transport.interface import (
    PIECE_BYTES,
    Locator,
    Peer,
    Silence,
    Stats,
    TransferStats,
)
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import PREFIX
from decoupled_diloco.transport.range_transfer import Slots, StripeController, Transfer, retryable
from decoupled_diloco.transport.routing import proxy_for, way_to
from decoupled_diloco.transport.tls import (
    LiveTls,
    TLSConfig,
    hung_up_problem,
    left_seconds_of,
    peer_certificate,
    tls_problem,
)
from decoupled_diloco.transport.tokens import is_loopback, refusal_error

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 0.1
"""Time in which encrypted connections that are not complete yet may close."""

FIRST_PIECE_BYTES = 64 << 10
"""Pieces begin small and grow with the link's speed, so that progress is visible on a slow link."""
STALL_RTTS = 20
REPLACED_MAX = 3
"""Times that a GET starts again because the payload was replaced during the transfer."""


class HttpClient:
    """A `Client` over HTTP.

    Args:
        token: Bearer token, sent only to servers that this client has connected to and to
            `trusted`.
        congestion: Congestion control for sockets that send payloads over a long link; None keeps
            the kernel's default.
        trusted: Further addresses (`http://host:port`) that may receive the token.
        principal: Principal for requests before the first connection.
        tls: CA and client certificate for ``https://`` addresses.
        locator: Resolves the current addresses of servers and which of them may receive the token;
            default: servers do not move.
        ended: Returns a sentence if the end of the run is recorded, otherwise an empty string.
            Called when a server cannot be reached.
        told_plain: Suppresses the warning about sending a token unencrypted to another machine.

    Raises:
        ConfigError: A file of `tls` cannot be used.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        congestion: str | None = BBR,
        trusted: Iterable[str] = (),
        principal: str = "",
        tls: TLSConfig | None = None,
        locator: Locator | None = None,
        ended: Callable[[], str] | None = None,
        told_plain: bool = False,
        rng: random.Random | None = None,
    ) -> None:
        self.stats = Stats()
        self._tls = None if tls is None else LiveTls(tls)
        self._locator = locator
        self._ended = ended
        self._expiry_watch: asyncio.Task[None] | None = None
        self._told_plain = told_plain
        self._token = token
        self._principal = principal
        self._limits = limits or Limits()
        self._congestion = congestion
        self._rng = rng or runtime().rng()
        self._trusted = {URL(address).origin() for address in trusted}
        self._principals: dict[URL, str] = {}
        self._base: URL | None = None
        self._channels: dict[URL, set[WebSocketChannel]] = {}
        self._controllers: dict[tuple[URL, str], StripeController] = {}
        self._slots: dict[URL, Slots] = {}
        self._ways: dict[URL, dict[str, Any]] = {}
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    @property
    def certificate_ends_at(self) -> float | None:
        return None if self._tls is None else self._tls.ends_at

    def trust(self, address: str) -> None:
        """Send the token to the server at this address from now on."""
        self._trusted.add(_origin(address))

    async def connect(
        self, address: str, role: str, principal: str, *, lost_seconds: float | None = None
    ) -> WebSocketChannel:
        try:
            return await self._connect(address, role, principal, lost_seconds)
        except AccessError:
            raise
        except TransportError as error:
            ended = "" if self._ended is None else await asyncio.to_thread(self._ended)
            if ended:
                raise RunEndedError(f"{ended} ({error})") from error
            raise

    async def _connect(
        self, address: str, role: str, principal: str, lost_seconds: float | None
    ) -> WebSocketChannel:
        address = await self._now(address)
        origin = _origin(address)
        self._base = origin
        self._principals[origin] = principal
        self._trusted.add(origin)
        headers = {**self._headers(origin), "X-Role": role}
        self._watch_certificate(origin)
        try:
            async with asyncio.timeout(self._limits.lost_seconds):
                socket = await self._session("control").ws_connect(
                    origin.with_path(CONTROL),
                    **self._way(origin, headers),
                    autoping=False,
                    compress=window_bits(role),
                    max_msg_size=self._limits.message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
        except aiohttp.WSServerHandshakeError as error:
            raise refusal_error(
                error.status, _reason(error.status, error.headers), address
            ) from None
        except TimeoutError:
            raise TransportError(
                f"{address} did not answer within {self._limits.lost_seconds:g} s"
            ) from None
        except DilocoError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            shown = self._tls.context() if self._tls is not None and self._tls.shows else None
            problem = await encryption_problem(error, origin, address, shown)
            if problem is not None:
                raise problem from error
            raise TransportError(f"cannot reach {address}: {in_words(error)}") from error
        self._check_certificate(socket, address)
        limits = self._limits
        if lost_seconds is not None:
            limits = replace(limits, lost_seconds=lost_seconds)
        channel = WebSocketChannel(socket, Peer(principal, role, str(origin)), limits, self.stats)
        channels = self._channels.setdefault(origin, set())
        channels.add(channel)
        channel.on_closed = lambda: channels.discard(channel)
        channel.start()
        return channel

    async def put(
        self,
        url: str,
        body: memoryview,
        *,
        base: str = "",
        first: int = 0,
        total: int | None = None,
    ) -> TransferStats:
        target = self._resolve(url, await self._now(base))
        part = Window(body, first, total)
        # The channel is chosen without an await before it is used: one that was free a moment ago
        # may carry another request.
        channel, began = self._channel_for(target, part), now()
        if channel and await self._request(channel, target, {"put": _path(target)}, part.view):
            self.stats.data_bytes_sent += len(part)
            return TransferStats(len(part), now() - began)
        put = _Put(self, target, part)
        transfer = self._transfer(target, put, part)
        transfer.resumed = channel is not None  # part of it may have arrived over the channel
        count, seconds = await transfer.run(self._controller(target, "PUT"), self.rtt(target))
        return TransferStats(transfer.nbytes, seconds, count, transfer.retries, put.congestion)

    async def get(
        self, url: str, out: memoryview, *, base: str = "", first: int = 0, total: int | None = None
    ) -> TransferStats:
        target = self._resolve(url, await self._now(base))
        part = Window(out, first, total)
        channel, began = self._channel_for(target, part), now()
        asked: dict[str, object] = {"get": _path(target), "nbytes": len(part)}
        if channel and (found := await self._request(channel, target, asked)):
            answer, body = found
            if not answer.get("nbytes") == len(part) == len(body):
                raise _other_size(target, answer.get("nbytes"), len(part))
            part.view[:] = body
            self.stats.data_bytes_received += len(body)
            digest = str(answer.get("digest", ""))
            return TransferStats(len(part), now() - began, digest=digest)
        for _ in range(REPLACED_MAX):
            get = _Get(self, target, part)
            transfer = self._transfer(target, get, part)
            try:
                count, seconds = await transfer.run(
                    self._controller(target, "GET"), self.rtt(target)
                )
            except _ReplacedError:
                continue
            return TransferStats(
                transfer.nbytes, seconds, count, transfer.retries, get.congestion, get.digest or ""
            )
        raise ProtocolError(f"{target} was replaced {REPLACED_MAX} times while it was fetched")

    async def size(self, url: str, *, base: str = "") -> int:
        target = self._resolve(url, await self._now(base))
        async with self.request("GET", target, {"Range": write_range(0, 1)}) as response:
            announced = read_content_range(response.headers.get("Content-Range", ""))
            if announced is None:
                raise ProtocolError(f"GET {target}: the answer has no valid Content-Range")
            return announced[2]

    async def close(self) -> None:
        if self._expiry_watch is not None:
            self._expiry_watch.cancel()
            self._expiry_watch = None
        channels = [channel for some in self._channels.values() for channel in some]
        await asyncio.gather(*(channel.close("the client closes") for channel in channels))
        while self._sessions:
            await close_session(self._sessions.popitem()[1])
        if self._tls is not None:
            # Connections that were cancelled in their handshake also close before the loop ends.
            await asyncio.sleep(GOODBYE_SECONDS)

    def rtt(self, target: URL) -> float | None:
        """Return the round-trip time to a server in seconds, if a channel has measured it."""
        rtts = [channel.rtt for channel in self._channels.get(target.origin(), ())]
        return min((rtt for rtt in rtts if rtt is not None), default=None)

    async def _now(self, address: str) -> str:
        """Return the current address of a server; a connected server has not moved."""
        if self._locator is None or not address:
            return address
        with suppress(TransportError):
            if self._channels.get(_origin(present := self._locator.now(address))):
                return present
        for one in await self._locator.locate():
            self.trust(one)
        return self._locator.now(address)

    def _resolve(self, url: str, base: str) -> URL:
        try:
            target = URL(url, encoded=True)
        except ValueError as error:
            raise ProtocolError(f"{url!r:.200} is not a valid payload URL: {error}") from None
        if target.is_absolute():
            return target
        origin = _origin(base) if base else self._base
        assert origin is not None, f"call connect() first, or pass base for relative url={url!r}"
        return origin.join(target)

    def _headers(self, target: URL) -> dict[str, str]:
        """Return the identifying headers; the token only for servers that may receive it."""
        origin = target.origin()
        if origin not in self._trusted:
            return {}
        principal = self._principals.get(origin)
        if principal is None and self._base is not None:
            principal = self._principals[self._base]
        headers = {"X-Principal": principal or self._principal}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        return headers

    def _channel_for(self, target: URL, part: Window) -> WebSocketChannel | None:
        """Return a channel that can carry a payload instead of a separate request, if any."""
        if part.view.nbytes != len(part) or len(part) > SMALL_BODY_BYTES:
            return None
        origin = target.origin()
        for channel in self._channels.get(origin, ()):
            if channel.takes_body and channel.peer.principal == self._principals[origin]:
                return channel
        return None

    async def _request(
        self,
        channel: WebSocketChannel,
        target: URL,
        header: dict[str, object],
        body: memoryview | bytes = b"",
    ) -> tuple[dict[str, Any], memoryview] | None:
        """Return the server's answer over a channel; None if a separate request may still work."""
        try:
            answer, body = await channel.request(header, body)
            if "status" in answer:
                status, reason = answer["status"], answer.get("reason")
                if not (isinstance(status, int) and isinstance(reason, str)):
                    raise ProtocolError(f"{target}: the server rejected without a reason")
                raise refusal_error(status, reason, str(target))
        except TransportError as error:
            if not retryable(error):
                raise
            return None
        return answer, body

    def _transfer(self, target: URL, mover: _Put | _Get, part: Window) -> Transfer:
        # Half of the server's limit, so that connections that end late do not exceed it.
        slots = self._slots.setdefault(
            target.origin(), Slots(self._limits.streams_per_principal // 2)
        )
        nbytes, retries = len(part.view), self._limits.retries
        return Transfer(nbytes, mover, retries, self._rng, slots, part.first)

    def _controller(self, target: URL, method: str) -> StripeController:
        return self._controllers.setdefault((target.origin(), method), StripeController())

    def _way(self, target: URL, headers: Mapping[str, str]) -> dict[str, Any]:
        if self._tls is not None:  # not cached: its files may have been replaced
            return way_to(target, headers, self._tls.context())
        origin = target.origin()
        if origin not in self._ways:
            self._ways[origin] = way_to(origin, {})
        way = self._ways[origin]
        return {**way, "headers": {**way["headers"], **headers}}

    def _watch_certificate(self, origin: URL) -> None:
        """Warn about an unencrypted token, and start watching the own certificate's expiry."""
        if self._tls is not None and self._expiry_watch is None:
            self._expiry_watch = asyncio.create_task(self._tls.watch())
        open_secret = self._token is not None and origin.scheme == "http"
        if open_secret and not self._told_plain and not is_loopback(origin.host or ""):
            self._told_plain = True
            logger.warning(
                "%s is dialed without encryption: anyone on the network path can read the token "
                "and the model: use TLS (ddiloco certs), a VPN or a tunnel",
                origin,
            )

    def _check_certificate(self, socket: Any, address: str) -> None:
        certificate = peer_certificate(socket)
        if self._tls is not None and certificate:
            self._tls.warn_of_expiry(f"the certificate of {address}", left_seconds_of(certificate))

    def _session(self, plane: str) -> aiohttp.ClientSession:
        """Return the session of a plane; created late, because it belongs to the running loop."""
        if plane not in self._sessions:
            self._sessions[plane] = new_session()
        return self._sessions[plane]

    @asynccontextmanager
    async def request(
        self, method: str, target: URL, headers: dict[str, str], data: Any = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a data-plane request; errors become this package's, rejections keep their reason."""
        try:
            async with self._session("data").request(
                method,
                target,
                data=data,
                allow_redirects=False,
                **self._way(target, {**self._headers(target), **headers}),
            ) as response:
                if response.status >= 300:
                    reason = _reason(response.status, response.headers)
                    raise refusal_error(response.status, reason, str(target))
                yield response
        except DilocoError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            problem = tls_problem(error, str(target.origin()))
            if problem is not None:
                raise problem from error
            raise TransportError(f"{method} {target} failed: {in_words(error)}") from error

    def note_activity(self, target: URL) -> None:
        for channel in self._channels.get(target.origin(), ()):
            channel.note_activity()

    def watch(self, target: URL) -> _StallWatch:
        return _StallWatch(
            max(self._limits.stall_seconds, STALL_RTTS * (self.rtt(target) or 0.0)), target
        )

    def congestion(self, target: URL) -> str | None:
        """Return the congestion control to use for sending to a server."""
        rtt = self.rtt(target)
        return self._congestion if rtt is not None and rtt > NEAR_RTT_SECONDS else None


class _ControlSocket(aiohttp.ClientWebSocketResponse):
    """A WebSocket whose connection is aborted after it is closed.

    Both sides have exchanged close frames by then. TLS would send one more close_notify, and an
    event loop that ends in the meantime would leave the connection open.
    """

    async def close(self, *, code: int = aiohttp.WSCloseCode.OK, message: bytes = b"") -> bool:
        connection = self._response.connection
        transport = None if connection is None else connection.transport
        try:
            return await super().close(code=code, message=message)
        finally:
            secure = self._response.url.scheme in ("https", "wss")
            if secure and isinstance(transport, asyncio.WriteTransport):
                transport.abort()


class _Put:
    """Sends the ranges of one payload."""

    def __init__(self, client: HttpClient, target: URL, body: Window) -> None:
        self.congestion = ""
        self._client = client
        self._target = target
        self._body = body

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        headers = {"Content-Range": write_content_range(start, stop, len(self._body))}
        if resumed:
            headers["X-Take-Over"] = "1"
        watch = self._client.watch(self._target)
        payload = _Pieces(self, self._body[start:stop], watch)

        async def alive() -> bool:
            return await self._moves(start, stop, watch)

        async with (
            watch.guard(alive),
            self._client.request("PUT", self._target, headers, payload) as response,
        ):
            await response.read()

    async def gaps(self, start: int, stop: int) -> list[Range]:
        state, received = await self._request(self._client.watch(self._target).seconds)
        return [] if state == "arrived" else received.missing(start, stop)

    async def _moves(self, start: int, stop: int, watch: _StallWatch) -> bool:
        """Ask the server, after no byte moved here, whether it receives or waits for memory."""
        try:
            state, received = await self._request(watch.seconds)
        except (TransportError, ProtocolError):
            return False
        left = sum(right - left for left, right in received.missing(start, stop))
        return state in ("queued", "arrived") or watch.shrinks(left)

    async def _request(self, seconds: float) -> tuple[str, RangeSet]:
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.request("HEAD", self._target, {}) as response,
            ):
                received = read_list(response.headers.get("X-Received", ""))
                return response.headers.get("X-State", ""), RangeSet(received)
        except TimeoutError:
            raise TransportError(f"{self._target}: no answer within {seconds:.1f} s") from None

    def sent(self, nbytes: int) -> None:
        self._client.stats.data_bytes_sent += nbytes

    def tune(self, writer: AbstractStreamWriter) -> None:
        """Set the congestion control of the connection that a payload is about to use."""
        transport = getattr(writer, "transport", None)
        self.congestion = set_congestion_control(transport, self._client.congestion(self._target))


class _Pieces(aiohttp.Payload):
    """Writes a memoryview in pieces, without copying it."""

    def __init__(self, put: _Put, view: memoryview, watch: _StallWatch) -> None:
        super().__init__(view)
        self._put = put
        self._view = view
        self._watch = watch
        self._size = len(view)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("a payload is bytes")

    async def write(self, writer: AbstractStreamWriter) -> None:
        self._put.tune(writer)
        position, size = 0, FIRST_PIECE_BYTES
        while position < len(self._view):
            piece = self._view[position : position + size]
            before = now()
            await writer.write(piece)
            seconds = now() - before
            position += len(piece)
            self._watch.moved += 1
            self._put.sent(len(piece))
            if seconds < 0.1:
                size = min(2 * size, PIECE_BYTES)
            elif seconds > 0.5:
                size = max(size // 2, FIRST_PIECE_BYTES)

    async def write_with_length(
        self, writer: AbstractStreamWriter, content_length: int | None
    ) -> None:
        await self.write(writer)


def _other_size(target: URL, announced: object, expected: int) -> ProtocolError:
    size = announced if isinstance(announced, int) else "an unknown number of"
    return ProtocolError(f"GET {target}: the payload has {size} bytes, {expected} are expected")


class _ReplacedError(Exception):
    """The payload changed between two ranges of one GET."""


class _Get:
    """Fetches the ranges of one payload into a buffer."""

    def __init__(self, client: HttpClient, target: URL, out: Window) -> None:
        self.congestion = ""
        self.digest: str | None = None
        self._client = client
        self._target = target
        self._out = out
        self._arrived = RangeSet()

    async def move(self, start: int, stop: int, resumed: bool) -> None:
        headers = {}
        if (start, stop) != (0, len(self._out)):
            headers["Range"] = write_range(start, stop)
        watch = self._client.watch(self._target)
        position = start
        try:
            async with (
                watch.guard(None),
                self._client.request("GET", self._target, headers) as response,
            ):
                self._check(response, start, stop)
                while position < stop:
                    piece, _ = await response.content.readchunk()
                    if not piece:
                        raise TransportError(f"GET {self._target}: the connection ended early")
                    end = position + len(piece)
                    if end > stop:
                        raise ProtocolError(f"GET {self._target}: more bytes than announced")
                    self._out[position:end] = piece
                    position = end
                    watch.moved += 1
                    self._client.stats.data_bytes_received += len(piece)
                    self._client.note_activity(self._target)
        finally:
            self._arrived.add(start, position)

    async def gaps(self, start: int, stop: int) -> list[Range]:
        return self._arrived.missing(start, stop)

    def _check(self, response: aiohttp.ClientResponse, start: int, stop: int) -> None:
        """Compare the announced range with the requested one."""
        announced = read_content_range(response.headers.get("Content-Range", ""))
        if announced is None and response.status == 200:
            announced = (0, response.content_length or 0, response.content_length or 0)
        if announced is None or announced[2] != len(self._out):
            size = None if announced is None else announced[2]
            raise _other_size(self._target, size, len(self._out))
        if announced[:2] != (start, stop):
            raise ProtocolError(f"GET {self._target}: received another range than requested")
        digest = response.headers.get("ETag", "").strip('"')
        if self.digest is not None and digest != self.digest:
            raise _ReplacedError
        self.digest = digest
        self.congestion = response.headers.get("X-Congestion", "")


class _StallWatch:
    """Ends a request when no byte moved for a whole interval."""

    def __init__(self, seconds: float, target: URL) -> None:
        self.seconds = seconds
        self.moved = 0
        self._target = target
        self._left: int | None = None
        self._gave_up = False

    def shrinks(self, left: int) -> bool:
        """Whether fewer bytes are missing than at the previous call."""
        before, self._left = self._left, left
        return before is None or left < before

    @asynccontextmanager
    async def guard(self, alive: Callable[[], Awaitable[bool]] | None) -> AsyncIterator[None]:
        """Watch the block; awaits `alive` before it aborts, because a full pool is not a stall."""
        task = asyncio.current_task()
        assert task is not None
        loop, step = asyncio.get_running_loop(), self.seconds / 5
        silence = Silence(step, now())
        confirming: asyncio.Task[None] | None = None
        timer: asyncio.TimerHandle

        def check() -> None:  # by a timer: one task per request would cost twice as much
            nonlocal timer, confirming
            if silence.observe(now(), self.moved) < self.seconds:
                timer = loop.call_later(step, check)
            elif alive is None:
                give_up()
            else:
                confirming = loop.create_task(confirm(alive))

        async def confirm(alive: Callable[[], Awaitable[bool]]) -> None:
            nonlocal timer, silence
            if await alive():
                silence = Silence(step, now(), self.moved)
                timer = loop.call_later(step, check)
            else:
                give_up()

        def give_up() -> None:
            self._gave_up = True
            task.cancel()

        timer = loop.call_later(step, check)
        try:
            yield
        except asyncio.CancelledError:
            if self._gave_up:
                # The watch cancelled the task, so this is a stall and not a cancelled transfer.
                task.uncancel()
                raise TransportError(
                    f"{self._target}: no byte moved for {self.seconds:.1f} s"
                ) from None
            raise
        finally:
            timer.cancel()
            if confirming is not None:
                confirming.cancel()


@lru_cache(maxsize=1024)
def _origin(address: str) -> URL:
    try:
        return URL(address).origin()
    except ValueError as error:
        raise TransportError(f"{address!r:.200} is not a valid address: {error}") from None


def new_session() -> aiohttp.ClientSession:
    """Return a session of the running loop. Every request of this project goes through one."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS / 2),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None, sock_read=None),
        auto_decompress=False,
        read_bufsize=READ_BUFFER_BYTES,
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        ws_response_class=_ControlSocket,
    )


async def close_session(session: aiohttp.ClientSession) -> None:
    if isinstance(session.connector, aiohttp.TCPConnector):
        # Nothing is left to send. TLS would send a close_notify, and the loop may end before that.
        await session.connector.close(abort_ssl=True)
    await session.close()


async def read_answer(response: aiohttp.ClientResponse, bytes_max: int) -> bytes | None:
    """Return the answer of an arbitrary server; None if it exceeds `bytes_max` bytes."""
    answer = bytearray()
    async for piece in response.content.iter_any():
        answer += piece
        if len(answer) > bytes_max:
            return None
    return bytes(answer)


async def encryption_problem(
    error: Exception, target: URL, where: str, shown: ssl.SSLContext | None
) -> TransportError | None:
    """Return a description of a TLS failure; None if the error has another cause.

    Args:
        where: Name of the server in the description.
        shown: The context of the failed connection, if a certificate was presented.
    """
    problem = tls_problem(error, where)
    # aiohttp wraps a reset in its own error class, which is not a `ConnectionResetError`.
    is_reset = isinstance(error, OSError) and error.errno in (errno.ECONNRESET, errno.EPIPE)
    hung_up = is_reset or isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError)
    if problem is None and hung_up and proxy_for(target) is None:
        problem = await hung_up_problem(target, where, shown)
    return problem


def _path(target: URL) -> str:
    return target.raw_path.removeprefix(PREFIX)


def _reason(status: int, headers: Any) -> str:
    reason = (headers or {}).get("X-Reason")
    return str(reason) if reason else f"the server answered {status}"


def in_words(error: Exception) -> str:
    """Return the operating system's words for an error; the library's would name its settings."""
    cause = getattr(error, "os_error", error)
    number = getattr(cause, "errno", None)
    if isinstance(cause, ssl.SSLError | socket.gaierror) or not number or number < 0:
        return getattr(cause, "strerror", None) or str(cause) or type(error).__name__
    return os.strerror(number)
