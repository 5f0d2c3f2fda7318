"""The HTTP server: control over WebSockets, payloads over PUT and GET, `/healthz`, on one port.

GET  /control         upgrades to a WebSocket; headers Authorization, X-Principal, X-Role
PUT  /bodies/PATH     a payload or, with Content-Range, a part of one
HEAD /bodies/PATH     progress of a PUT, for a client that resumes: X-State, X-Received
GET  /bodies/PATH     a payload or, with Range, a part of one; ETag is the digest
GET  /healthz         a JSON object, without a token
GET  /run             the run's settings, addresses and layout, as JSON
GET, PUT /probe       bytes for a measurement of the link, see `probe`

A `Website` answers browsers at separate paths, with its own sign-in.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import socket
import sys
import termios
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
from aiohttp import web

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.transport.admission import ConnectionAdmission
from decoupled_diloco.transport.byte_ranges import (
    Range,
    read_content_range,
    read_range,
    write_content_range,
    write_list,
)
from decoupled_diloco.transport.channel import (
    NOTHING_MORE,
    SMALL_BODY_BYTES,
    WebSocketChannel,
    handle,
    window_bits,
    with_body,
)
from decoupled_diloco.transport.documents import (
    FACT_PREFIX,
    Document,
    NoSuchDocumentError,
    Order,
    Query,
    Restrict,
    Website,
)
from decoupled_diloco.transport.interface import PIECE_BYTES, Health, OnChannel, Peer, Stats
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.payload_store import PREFIX, BodyBooks, Offer, Stream
from decoupled_diloco.transport.pool import ReceivePool
from decoupled_diloco.transport.probe import PROBE, Probes
from decoupled_diloco.transport.tls import LiveTls, ServerTLSConfig, names_of
from decoupled_diloco.transport.tokens import RequestRefusal, Tokens, check_role

logger = logging.getLogger(__name__)

CERTIFICATE_LEFT = "certificate_left_seconds"
"""Key in `/healthz`: seconds until the certificate expires."""

CONTROL = "/control"
RUN = "/run"
READ_BUFFER_BYTES = 1 << 20
QUERIES_MAX = 16
"""Concurrent queries of all peers together; an answer may have a few MiB."""
LINGER_SECONDS = 2.0
"""Time during which the rest of a rejected request is discarded, so that the client can read the
rejection."""
STOP_SECONDS = 0.3
"""Time that a stopping server waits for its peers to receive their close frames. A peer that has
stopped reading never does, and must not keep the process alive."""
KEEP_ALIVE_SECONDS = 300.0
"""Data connections outlive the pauses between syncs, because a new connection is in slow start."""


BBR = "bbr"
NEAR_RTT_SECONDS = 0.002
"""Below this round-trip time BBR is not used: on loopback or a LAN its pacing costs more than it
gains."""


class HttpServer:
    """A `Server` over HTTP.

    Args:
        on_channel: Runs for each control connection; the channel closes when it returns.
        queries: Answers GETs with parameters at further paths, for a peer with any token.
        orders: Answers POSTs at further paths, for a peer with any token.
        tls: Files for HTTPS; default: plain HTTP.
        website: Answers browsers.
        restrict: Returns what a peer may see of the answer to a query. Default: all.

    Raises:
        ConfigError: An address that other machines can reach has no auth token, or a file of
            `tls` cannot be used.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tokens: Tokens | None = None,
        on_channel: OnChannel,
        health: Health = dict,
        about: Callable[[], object] = dict,
        pool_bytes: int = 1 << 30,
        limits: Limits | None = None,
        congestion: str | None = BBR,
        queries: Mapping[str, Query] | None = None,
        orders: Mapping[str, Order] | None = None,
        tls: ServerTLSConfig | None = None,
        website: Website | None = None,
        restrict: Restrict = lambda names, path, document: document,
    ) -> None:
        self.stats = Stats()
        self._website = website
        self._restrict = restrict
        self._queries, self._orders = dict(queries or {}), dict(orders or {})
        self._host = host
        self._port = port
        self._tokens = tokens or Tokens()
        self._tokens.check_bind(host)
        self._tls = None if tls is None else LiveTls(tls)
        self._expiry_watch: asyncio.Task[None] | None = None
        self._on_channel = on_channel
        self._health = health
        self._about = about
        self._probes = Probes()
        self._open_queries = 0
        self._limits = limits or Limits()
        self._congestion = congestion
        self.pool = ReceivePool(pool_bytes)
        self.bodies = BodyBooks(self.pool, self._limits)
        self._channels: dict[str, list[WebSocketChannel]] = {}
        self._handlers: set[asyncio.Task[Any]] = set()
        self._web: web.Server | None = None
        self._listener: asyncio.Server | None = None

    @property
    def address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self._port}"

    @property
    def certificate_ends_at(self) -> float | None:
        return None if self._tls is None else self._tls.ends_at

    async def start(self) -> None:
        self._web = web.Server(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            logger=_REQUESTS,
            auto_decompress=False,
            max_line_size=self._limits.header_bytes,
            max_field_size=self._limits.header_bytes,
            read_bufsize=READ_BUFFER_BYTES,
            lingering_time=LINGER_SECONDS,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
        )
        self._admission = ConnectionAdmission(
            self._web,
            strangers=self._limits.strangers,
            seconds=self._limits.lost_seconds,
            goodbye_seconds=STOP_SECONDS,
            context=None if self._tls is None else self._tls.context,
        )
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                self._accept, self._host, self._port, backlog=512
            )
        except OSError as error:
            raise TransportError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error}"
            ) from error
        self._port = self._listener.sockets[0].getsockname()[1]
        if self._tls is not None:
            self._expiry_watch = asyncio.create_task(self._tls.watch())

    async def stop(self) -> None:
        if self._listener is None or self._web is None:
            return
        self._listener.close()
        self._admission.close()
        if self._expiry_watch is not None:
            self._expiry_watch.cancel()
        if self._website is not None:
            await self._website.shut_down()
        channels = [channel for some in self._channels.values() for channel in some]
        self.bodies.stop("the server stops")
        cut_off = asyncio.get_running_loop().call_later(STOP_SECONDS, self._cut_off)
        await asyncio.gather(*(channel.close("the server stops") for channel in channels))
        # One iteration of the loop, so that handlers whose channel just closed can finish.
        await asyncio.sleep(0)
        for task in list(self._handlers):
            task.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        connections = [] if self._tls is None else list(self._web.connections)
        transports = [each.transport for each in connections]
        await self._web.shutdown(timeout=0.1)
        for transport in transports:  # TLS would wait for its peer's close_notify.
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        await self._listener.wait_closed()
        cut_off.cancel()
        self._listener = self._web = None

    def _cut_off(self) -> None:
        """Close every connection at once, so that no task waits for its peer any longer."""
        for connection in self._web.connections if self._web is not None else ():
            if isinstance(connection.transport, asyncio.WriteTransport):
                connection.transport.abort()

    def _accept(self) -> asyncio.BaseProtocol:
        assert self._web is not None
        if len(self._web.connections) + self._admission.opening >= self._limits.connections:
            return _Full(self._limits.connections)
        return self._admission()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            return await self._dispatch(request)
        except RequestRefusal as refusal:
            response = _refuse(refusal)
            if not self._admission.is_authenticated(request.transport):
                response.force_close()  # each guess at the secret costs a new connection
            return response
        except ConnectionError as error:
            if request.transport is not None and not request.transport.is_closing():
                raise
            logger.debug("%s %s: %s", request.method, request.rel_url.raw_path, error)
            return web.Response()  # the peer is gone; no one reads this
        finally:
            self._handlers.discard(task)

    async def _dispatch(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if path == "/healthz" and request.method == "GET":
            return web.Response(
                text=json.dumps(self._health_and_end()), content_type="application/json"
            )
        if self._website is not None and self._website.serves(path):
            if self._website.is_authenticated(request):
                self._admission.mark_authenticated(request.transport)
            return await self._website.answer(request)
        if "Origin" in request.headers:
            raise RequestRefusal(403, "browsers may not use this path: it is for learners")
        authorization = request.headers.get("Authorization")
        names = names_of(request.transport)
        is_query = path in self._queries and request.method == "GET"
        if is_query or (path in self._orders and request.method == "POST"):
            principal = self._tokens.recognize(authorization, names)
            self._admission.mark_authenticated(request.transport)
            proved = (*([principal] if principal else []), *(names or ()))
            if not is_query:
                return await self._give_document(request, await self._orders[path](proved))
            return await self._query(self._queries[path], request, proved)
        principal = self._tokens.authorize(
            authorization, request.headers.get("X-Principal", ""), names
        )
        self._admission.mark_authenticated(request.transport)
        if path == CONTROL and request.method == "GET":
            return await self._control(request, principal)
        if path.startswith(PREFIX):
            key = path[len(PREFIX) :]
            serve = {"PUT": self._put, "GET": self._get, "HEAD": self._head}.get(request.method)
            if serve is None:
                raise RequestRefusal(405, f"{request.method} is not served: use PUT, GET or HEAD")
            self._touch(principal)
            return await serve(request, principal, key)
        if path == PROBE:
            return await self._probes.serve(request)
        if path == RUN and request.method == "GET":
            text = json.dumps(self._about(), default=str)
            return web.Response(text=text, content_type="application/json")
        raise RequestRefusal(404, f"nothing is served at {path[:200]}")

    def _health_and_end(self) -> dict[str, object]:
        if self._tls is None:
            return self._health()
        return {**self._health(), CERTIFICATE_LEFT: self._tls.left_seconds}

    async def _query(
        self, query: Query, request: web.BaseRequest, names: tuple[str, ...]
    ) -> web.StreamResponse:
        if self._open_queries >= QUERIES_MAX:
            raise RequestRefusal(429, f"{QUERIES_MAX} queries are under way, the limit: try again")
        self._open_queries += 1
        path = request.rel_url.raw_path
        try:
            # Before the query, too: it may begin something.
            self._restrict(names, path, Document(b""))
            document = await query(dict(request.rel_url.query))
            document = self._restrict(names, path, document)
            return await self._give_document(request, document)
        except NoSuchDocumentError as error:
            raise RequestRefusal(404, str(error)) from None
        finally:
            self._open_queries -= 1

    async def _give_document(
        self, request: web.BaseRequest, document: Document
    ) -> web.StreamResponse:
        headers = {f"{FACT_PREFIX}{name}": value for name, value in document.facts.items()}
        headers["Content-Type"] = document.content_type
        response = web.StreamResponse(headers=headers)
        response.content_length = len(document.body)
        await self._give(request, response, memoryview(document.body))
        return response

    async def _give(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        body: memoryview,
        sent: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Write a response; abort if the peer accepts nothing for a long time."""
        await response.prepare(request)
        guard = _WriteGuard(request, 3 * self._limits.stall_seconds)
        try:
            for position in range(0, len(body), PIECE_BYTES):
                piece = body[position : position + PIECE_BYTES]
                sent(len(piece))  # before the write: part of it may arrive even if the write fails
                await response.write(piece)
            await response.write_eof()
        except ConnectionError as error:
            logger.debug("GET %s ended: %s", request.rel_url.raw_path, error)
        finally:
            guard.cancel()

    async def _control(self, request: web.BaseRequest, principal: str) -> web.StreamResponse:
        role = request.headers.get("X-Role", "")
        check_role(role)
        ws = web.WebSocketResponse(
            autoping=False,
            compress=bool(window_bits(role)),
            max_msg_size=self._limits.message_bytes,
            timeout=1.0,
        )
        try:
            await ws.prepare(request)
        except web.HTTPException as error:
            raise RequestRefusal(error.status, "the control plane is a WebSocket") from None
        except ValueError:  # raised for a key that is not ASCII
            raise RequestRefusal(400, "the control plane is a WebSocket") from None
        address = _address(request)
        channel = WebSocketChannel(
            ws,
            Peer(
                principal,
                role,
                address,
                lambda other: self._tokens.represents(
                    principal, other, names_of(request.transport)
                ),
            ),
            self._limits,
            self.stats,
            partial(self._answer, principal),
        )
        self._channels.setdefault(principal, []).append(channel)
        self._close_oldest(principal)
        channel.start()
        serving = asyncio.create_task(self._serve(channel))
        self._handlers.add(serving)
        serving.add_done_callback(self._handlers.discard)
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            # aiohttp cancels a request whose connection is gone. The handler of the channel is
            # notified through the channel instead, so that it can clean up.
            channel.shut(f"connection to {principal!r} at {channel.peer.address} lost")
            raise
        return ws

    def _close_oldest(self, principal: str) -> None:
        alive = [channel for channel in self._channels[principal] if not channel.closed]
        limit = self._limits.channels_per_principal
        for channel in alive[: max(0, len(alive) - limit)]:
            channel.shut(
                f"{principal!r} has more than {limit} control channels: this is its oldest"
            )

    async def _serve(self, channel: WebSocketChannel) -> None:
        """Run the handler of a channel, then close the channel."""
        principal = channel.peer.principal
        try:
            await handle(self._on_channel, channel)
        finally:
            channels = self._channels[principal]
            channels.remove(channel)
            if not channels:
                del self._channels[principal]
            await channel.close(NOTHING_MORE)

    async def _answer(self, principal: str, header: dict[str, Any], body: memoryview) -> bytes:
        """Execute a request for a small payload that arrived over a control channel."""
        key, fetched = header.get("put"), header.get("get")
        try:
            if isinstance(key, str):
                stream = self.bodies.open(key, principal, (0, len(body)), len(body), False)
                async with stream.receiving():
                    stream.write(body)
                    self.stats.data_bytes_received += len(body)
                await self.bodies.passed_on(key)
                return with_body({})
            if isinstance(fetched, str):
                await self.bodies.obtain(fetched)
                return self._offered(fetched, principal, header.get("nbytes"))
        except RequestRefusal as refusal:
            return with_body({"status": refusal.status, "reason": refusal.text})
        raise ProtocolError("a binary frame has neither 'put' nor 'get'")

    def _offered(self, key: str, principal: str, nbytes: object) -> bytes:
        offer = self.bodies.look_up(key)
        size = len(offer.body)
        if nbytes != size or size > SMALL_BODY_BYTES:
            return with_body({"nbytes": size, "digest": offer.digest})
        download = self.bodies.fetch(key, principal, (0, size))
        try:
            download.sent(size)
            self.stats.data_bytes_sent += size
            return with_body({"nbytes": size, "digest": offer.digest}, offer.body)
        finally:
            download.close()

    async def _put(self, request: web.BaseRequest, principal: str, key: str) -> web.StreamResponse:
        part, total = _part_of_put(request)
        stream = self.bodies.open(
            key, principal, part, total, take_over="X-Take-Over" in request.headers
        )
        async with stream.receiving():
            await self._receive(request, stream, principal)
        await self.bodies.passed_on(key)
        return web.Response(status=204)

    async def _receive(self, request: web.BaseRequest, stream: Stream, principal: str) -> None:
        content = request.content
        try:
            while stream.position < stream.stop:
                piece, _ = await content.readchunk()
                if not piece:
                    break
                stream.write(piece)
                self.stats.data_bytes_received += len(piece)
                self._touch(principal)
        except (aiohttp.ClientError, aiohttp.http.HttpProcessingError, OSError) as error:
            raise RequestRefusal(400, f"the connection was lost: {error}") from None
        stream.finish()

    async def _head(self, request: web.BaseRequest, principal: str, key: str) -> web.StreamResponse:
        state, received = self.bodies.state(key, principal)
        headers = {"X-State": state, "X-Received": write_list(received)}
        return web.Response(status=204, headers=headers)

    async def _get(self, request: web.BaseRequest, principal: str, key: str) -> web.StreamResponse:
        await self.bodies.obtain(key)
        offer = self.bodies.look_up(key)
        start, stop = _part_of_get(request, offer)
        response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        response.content_length = stop - start
        response.headers["Content-Range"] = write_content_range(start, stop, len(offer.body))
        response.headers["Accept-Ranges"] = "bytes"
        response.headers["ETag"] = f'"{offer.digest}"'
        response.headers["X-Congestion"] = set_congestion_control(
            request.transport, self._congestion if self._far(principal) else None
        )
        download = self.bodies.fetch(key, principal, (start, stop))

        def sent(count: int) -> None:
            download.sent(count)
            self.stats.data_bytes_sent += count

        try:
            await self._give(request, response, memoryview(offer.body)[start:stop], sent)
        finally:
            download.close()
        return response

    def _far(self, principal: str) -> bool:
        rtts = [channel.rtt for channel in self._channels.get(principal, ()) if channel.rtt]
        return bool(rtts) and min(rtts) > NEAR_RTT_SECONDS

    def _touch(self, principal: str) -> None:
        """Refresh only the newest channel: an older one may be dead and must time out."""
        channels = self._channels.get(principal)
        if channels:
            channels[-1].note_activity()


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether a request's error is a fault of this program, not malformed HTTP from its sender.

    aiohttp would log malformed input with a traceback and the bytes. Any unauthenticated peer could
    then fill the disk, and the token of a learner with a corrupted request line would be logged.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, aiohttp.http.HttpProcessingError)


_REQUESTS = logging.getLogger(f"{__name__}.requests")
_REQUESTS.addFilter(_is_ours)


class _WriteGuard:
    """Aborts a connection whose reader accepts nothing for a whole interval."""

    def __init__(self, request: web.BaseRequest, seconds: float) -> None:
        self._transport = request.transport
        self._seconds = seconds
        self._seen = (-1, -1)
        self._handle = asyncio.get_running_loop().call_later(seconds, self._check)

    def cancel(self) -> None:
        self._handle.cancel()

    def _check(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        assert isinstance(transport, asyncio.WriteTransport)
        waiting = (transport.get_write_buffer_size(), _unsent(transport))
        if waiting == self._seen:
            transport.abort()
            return
        self._seen = waiting
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._check)


class _Full(asyncio.Protocol):
    """Rejects a connection above the limit."""

    def __init__(self, limit: int) -> None:
        self._text = f"this server has {limit} connections, its limit: try again later"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(
            f"HTTP/1.1 503 Service Unavailable\r\nContent-Length: {len(self._text)}\r\n"
            f"X-Reason: {self._text}\r\nConnection: close\r\n\r\n{self._text}".encode()
        )
        transport.close()


def _part_of_put(request: web.BaseRequest) -> tuple[Range, int]:
    """Return the range in a PUT and the size of the whole payload.

    Raises:
        RequestRefusal: 411, 415 or 416.
    """
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestRefusal(415, "payloads are sent without Content-Encoding")
    length = request.content_length
    if length is None or "Transfer-Encoding" in request.headers:
        raise RequestRefusal(411, "a PUT requires a Content-Length")
    text = request.headers.get("Content-Range")
    if text is None:
        return (0, length), length
    content = read_content_range(text)
    if content is None or content[1] - content[0] != length:
        raise RequestRefusal(
            416, f"Content-Range {text[:100]!r} does not match a payload of {length} bytes"
        )
    return (content[0], content[1]), content[2]


def _part_of_get(request: web.BaseRequest, offer: Offer) -> Range:
    text = request.headers.get("Range")
    if text is None:
        return 0, len(offer.body)
    part = read_range(text)
    if part is None or part[1] > len(offer.body):
        raise RequestRefusal(
            416, f"Range {text[:100]!r} does not match a payload of {len(offer.body)} bytes"
        )
    return part


def _address(request: web.BaseRequest) -> str:
    """Return the sender of a request as `host:port`."""
    name = request.transport.get_extra_info("peername") if request.transport else None
    return f"{name[0]}:{name[1]}" if name else "unknown"


def _refuse(refusal: RequestRefusal) -> web.Response:
    """Answer with the reason, in the body and in a header (HEAD and WebSockets see only that)."""
    reason = " ".join(refusal.text.split()).encode("ascii", "replace").decode()[:1000]
    headers = {**refusal.headers, "X-Reason": reason}
    return web.Response(status=refusal.status, text=refusal.text, headers=headers)


def _unsent(transport: asyncio.WriteTransport) -> int:
    """Return the bytes in the kernel's send buffer that the peer has not acknowledged."""
    sock = transport.get_extra_info("socket")
    try:
        return int.from_bytes(
            fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4), sys.byteorder
        )
    except OSError:
        return 0


def set_congestion_control(transport: asyncio.BaseTransport | None, name: str | None) -> str:
    """Set the congestion control of a connection, such as `bbr`, and return the one in use.

    A kernel that does not offer it keeps its default; the caller reports what is in use. None also
    keeps the default.
    """
    sock = transport.get_extra_info("socket") if transport is not None else None
    option = getattr(socket, "TCP_CONGESTION", None)
    if sock is None or option is None:
        return ""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, option, 16)
    except OSError:
        return ""
    current = str(raw.split(b"\0", 1)[0].decode("ascii", "replace"))
    if name is None or current == name:
        return current
    try:
        sock.setsockopt(socket.IPPROTO_TCP, option, name.encode())
    except OSError:
        return current
    return name
