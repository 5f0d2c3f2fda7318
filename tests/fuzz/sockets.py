"""Targets: a shard's server with arbitrary requests, and clients with arbitrary answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.wire import decode
from decoupled_diloco.show.page.site import Access, Site
from decoupled_diloco.syncer.tapes import TapeDocuments
from decoupled_diloco.transport.fetch import fetch
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.reachability import check_server
from decoupled_diloco.transport.tls import ServerTLSConfig
from decoupled_diloco.transport.tokens import Tokens
from fuzz.harness import Target

WAIT_SECONDS = 4.0
ANSWER_SECONDS = 0.01
"""Time to wait for an answer before the client closes its side of the connection."""

LIMITS = Limits(stall_seconds=0.2, lost_seconds=1.0, ping_seconds=0.1, retries=0)
BODY = b"0123456789"
HEAD = b"Host: x\r\nAuthorization: Bearer secret\r\nX-Principal: learner-0\r\nX-Role: learner\r\n"
UPGRADE = (
    b"GET /control HTTP/1.1\r\n" + HEAD + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def frame(kind: int, data: bytes) -> bytes:
    """Return a client's WebSocket frame with a mask of zeros."""
    size = len(data)
    length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return bytes([0x80 | kind]) + length + bytes(4) + data


REQUESTS = (
    b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PUT /bodies/up HTTP/1.1\r\n" + HEAD + b"Content-Length: 10\r\n\r\n" + BODY,
    b"PUT /bodies/up HTTP/1.1\r\n" + HEAD + b"Content-Length: 4\r\n"
    b"Content-Range: bytes 2-5/10\r\nX-Take-Over: 1\r\n\r\n2345",
    b"PUT /bodies/up HTTP/1.1\r\n"
    + HEAD
    + b"Transfer-Encoding: chunked\r\n\r\na\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    b"HEAD /bodies/up HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"GET /bodies/down HTTP/1.1\r\n" + HEAD + b"Range: bytes=2-5\r\n\r\n",
    b"GET /run HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n",
    b"GET /tape?process=shard-0&from=0&detail=1 HTTP/1.1\r\n" + HEAD + b"\r\n",
    b"PUT /probe HTTP/1.1\r\n" + HEAD + b"Content-Length: 3\r\nExpect: 100-continue\r\n\r\nabc",
    b"GET / HTTP/1.1\r\nHost: localhost:7070\r\nCookie: ddiloco-7070=9999999999.abc\r\n\r\n",
    b"POST /page/sign-in HTTP/1.1\r\nHost: x\r\nOrigin: http://x\r\nContent-Length: 12\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\n\r\nsecret=wrong",
    b"GET /page/events HTTP/1.1\r\nHost: [::1]:7070\r\nLast-Event-ID: a-1\r\n\r\n",
    UPGRADE
    + frame(1, b'{"type":"StepReport","step":1,"tokens":2,"seconds":0.5}')
    + frame(9, b"12345678"),
    UPGRADE + frame(1, b'{"type":"Leave","reason":"x"}') + frame(8, b"\x03\xe8bye"),
)
ANSWERS = (
    b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\nETag: "x"\r\nX-Fact-next: 3\r\n\r\n' + BODY,
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 28\r\n"
    b"Date: Tue, 01 Jan 2030 00:00:00 GMT\r\n\r\n" + b'{"shard": 0, "run": "a"}    ',
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/10\r\nContent-Length: 10\r\n\r\n"
    + BODY,
    b"HTTP/1.1 403 Forbidden\r\nX-Reason: no\r\nX-Principal: a\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\nX-State: receiving\r\nX-Received: 0-4,5-9\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n\x81\x02{}",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\n" + BODY + b"\r\n0\r\n\r\n",
)


class Complaints(logging.Handler):
    """Collects logged errors: an unauthenticated peer must not be able to fill the log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def raise_any(self) -> None:
        if self.texts:
            text, self.texts = self.texts[0], []
            raise RuntimeError(f"logged as an error: {text[-1500:]}")


class Served:
    """A shard's server in a separate event loop, which offers one payload and expects another."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.complaints = Complaints()
        logging.getLogger().addHandler(self.complaints)
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        tokens = Tokens("secret")
        (folder / "shard-0.jsonl").write_text("{}\n")
        tapes = TapeDocuments("a", 0, ("http://x",), {"shard-0": folder / "shard-0.jsonl"})
        site = Site(Access(tokens), None, "http://127.0.0.1:1", dict)
        certificates = CertificateFolder(folder / "certificates")
        certificates.begin([], 30)
        files = ServerTLSConfig(
            *(folder / "certificates" / f"syncer.{kind}" for kind in ("pem", "key"))
        )
        self.plain, self.encrypted = (
            HttpServer(
                tokens=tokens,
                on_channel=self._receive,
                limits=LIMITS,
                queries={"/tape": tapes},
                website=site,
                tls=tls,
                pool_bytes=1 << 20,
            )
            for tls in (None, files)
        )
        asyncio.run_coroutine_threadsafe(self._start(), self.loop).result(WAIT_SECONDS)

    async def _start(self) -> None:
        for server in (self.plain, self.encrypted):
            await server.start()
            server.bodies.offer("down", memoryview(BODY), "digest")
        self._expect()

    def _expect(self) -> None:
        self.plain.bodies.expect("up", len(BODY), "learner-0").when_ended = lambda _: (
            self.loop.call_soon(self._expect)
        )

    async def _receive(self, channel: Channel) -> None:
        with contextlib.suppress(DilocoError):
            while True:
                decode(await channel.receive(), get_args(messages.FromLearner))

    def send(self, server: HttpServer, data: bytes) -> bytes:
        """Send data on a new connection and return the whole answer."""
        port = int(server.address.rsplit(":", 1)[1])
        answer = b""
        connection = socket.create_connection(("127.0.0.1", port), WAIT_SECONDS)
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
            connection.settimeout(ANSWER_SECONDS)
            with contextlib.suppress(TimeoutError):  # an incomplete request gets no answer
                answer += connection.recv(1 << 16)
            connection.settimeout(WAIT_SECONDS)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                answer += piece
        self.complaints.raise_any()
        status = answer[9:12]
        if answer.startswith(b"HTTP/1.") and status >= b"500" and status != b"503":
            raise RuntimeError(f"answered {answer[:300]!r}")
        return answer


class Answering:
    """A server that answers every connection with the same bytes and closes it."""

    def __init__(self) -> None:
        self.data = b""
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(WAIT_SECONDS)
                connection.recv(1 << 16)
                connection.sendall(self.data)

    def answered(self, request: Callable[[str], object]) -> Callable[[bytes], object]:
        def read(data: bytes) -> None:
            self.data = data
            request(self.address)

        return read


def of_sockets(folder: Path) -> list[Target]:
    """Return the targets for both sides of every connection."""
    folder.mkdir()
    served, answering = Served(folder), Answering()
    hellos = [client_hello()]
    return [
        Target("http", lambda data: served.send(served.plain, data), REQUESTS, ()),
        Target(
            "tls-hello", lambda data: served.send(served.encrypted, data), hellos, (), share=0.5
        ),
        Target(
            "fetch-answer",
            answering.answered(_fetch),
            ANSWERS,
            (DilocoError,),
            strict=False,
            share=0.5,
        ),
        Target(
            "client-answer",
            answering.answered(_transfer),
            ANSWERS,
            (DilocoError,),
            strict=False,
            share=0.1,
        ),
        Target(
            "doctor-answer",
            answering.answered(_look),
            ANSWERS,
            (DilocoError,),
            strict=False,
            share=0.1,
        ),
    ]


def client_hello() -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def _fetch(address: str) -> None:
    fetch(address, "/tape", {"process": "a"}, "secret")


def _transfer(address: str) -> None:
    async def all_of_it() -> None:
        client = HttpClient(token="secret", limits=LIMITS)
        try:
            for attempt in _attempts(client, address):
                with contextlib.suppress(DilocoError):
                    await attempt
        finally:
            await client.close()

    asyncio.run(all_of_it())


def _attempts(client: HttpClient, address: str) -> Iterator[Any]:
    yield client.connect(address, "learner", "learner-0")
    yield client.get(f"{address}/bodies/x", memoryview(bytearray(10)))
    yield client.put(f"{address}/bodies/x", memoryview(BODY))


def _look(address: str) -> None:
    asyncio.run(check_server(address, "secret"))
