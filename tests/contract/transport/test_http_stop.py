"""HTTP only: a server that stops does not wait for peers that have stopped reading."""

from __future__ import annotations

import asyncio
import time

import pytest

from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.http import HttpServer

UPGRADE = (
    "GET /control HTTP/1.1\r\nHost: a\r\nX-Principal: learner-0\r\nX-Role: learner\r\n"
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
STEP_BYTES = 1 << 17


@pytest.mark.parametrize("messages", [0, 200])
async def test_a_peer_that_reads_nothing_does_not_hold_it(messages: int) -> None:
    served = asyncio.Event()

    async def say_much(channel: Channel) -> None:
        for _ in range(messages):
            channel.send({"text": "x" * STEP_BYTES})
            await asyncio.sleep(0)
        served.set()
        await channel.receive()

    server = HttpServer(on_channel=say_much)
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
