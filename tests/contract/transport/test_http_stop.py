"""HTTP only: a server that stops does not wait for peers that have stopped reading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

import pytest

from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.tokens import Tokens

UPGRADE = (
    "GET /control HTTP/1.1\r\nHost: a\r\nX-Principal: learner-0\r\nX-Role: learner\r\n"
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
STEP_BYTES = 1 << 17


class Hasty(Tokens):
    """Cuts every connection while a request is being authorized, as the end of a process does."""

    server: HttpServer

    def recognize(self, *shown: Any) -> None:
        self.server._cut_off()
        super().recognize(*shown)

    def authorize(self, *shown: Any) -> str:
        self.server._cut_off()
        return super().authorize(*shown)


@pytest.mark.parametrize("path", ["/control", "/document", "/probe?bytes=9", "/bodies/one"])
async def test_a_peer_that_disconnects_before_the_answer_is_not_an_error(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def nothing(channel: Channel) -> None:
        raise AssertionError("the connection is gone")

    async def document(query: Mapping[str, str]) -> Document:
        return Document(b"x", {})

    tokens = Hasty()
    server = tokens.server = HttpServer(
        tokens=tokens, on_channel=nothing, queries={"/document": document}
    )
    await server.start()
    server.bodies.offer("one", memoryview(b"body"), "digest")
    port = int(server.address.rsplit(":", 1)[1])
    with caplog.at_level(logging.WARNING):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(UPGRADE.replace("/control", path, 1).encode())
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        await server.stop()
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize("messages", [0, 200])
async def test_a_peer_that_reads_nothing_does_not_delay_the_stop(messages: int) -> None:
    served = asyncio.Event()

    async def send_messages(channel: Channel) -> None:
        for _ in range(messages):
            channel.send({"text": "x" * STEP_BYTES})
            await asyncio.sleep(0)
        served.set()
        await channel.receive()

    server = HttpServer(on_channel=send_messages)
    await server.start()
    _, writer = await asyncio.open_connection(
        "127.0.0.1", int(server.address.rsplit(":", 1)[1]), limit=1 << 16
    )
    writer.write(UPGRADE.encode())
    writer.transport.pause_reading()
    await served.wait()
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await server.stop()
    assert time.monotonic() - began < 0.9
    writer.transport.abort()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
