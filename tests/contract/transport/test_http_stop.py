"""HTTP only: a server that stops does not wait for peers that have stopped reading."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest

from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.http_client import HttpClient
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


def late_reader(listener: socket.socket) -> bytes:
    """Accept a control channel, send messages before reading any, and return what was sent."""
    peer, _ = listener.accept()
    with peer:
        request = peer.recv(1 << 16).decode()
        found = re.search(r"(?i)sec-websocket-key: (\S+)", request)
        assert found is not None
        unique = found[1] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(unique.encode()).digest()).decode()
        peer.sendall(
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
        )
        for _ in range(3):  # a connection that is closed resets after the second message
            peer.sendall(b"\x81\x02{}")
            time.sleep(0.2)
        arrived = peer.recv(1 << 16)
        peer.sendall(b"\x88\x02\x03\xe8")  # a close frame
        return arrived


def texts_in(frames: bytes) -> list[bytes]:
    """Return the text frames, without the pings between them, of a client's short frames."""
    texts = []
    while frames:
        start, stop = 6, 6 + (frames[1] & 0x7F)
        mask, masked = frames[2:start], frames[start:stop]
        if frames[0] & 0xF == 1:
            texts.append(bytes(byte ^ mask[i % 4] for i, byte in enumerate(masked)))
        frames = frames[stop:]
    return texts


async def test_a_last_message_arrives_although_the_peer_is_sending() -> None:
    """A connection that closes before the peer's close frame would be reset by its messages."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reading = asyncio.get_running_loop().run_in_executor(None, late_reader, listener)
        client = HttpClient()
        channel = await client.connect(
            f"http://127.0.0.1:{listener.getsockname()[1]}", "learner", "learner-0"
        )
        assert await channel.receive() == {}
        channel.send({"last": True})
        await channel.close("goodbye")
        frames = await reading
        await client.close()
    assert texts_in(frames) == [b'{"last":true}']
