"""HTTP only: documents have a limited number of readers, and stalled readers are cut off."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest

from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.http_server import QUERIES_MAX, HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.limits import Limits

STALL_SECONDS = 0.3  # all readers must have begun before the first one is cut off
BODY = bytes(range(256)) * (48 << 10)  # 12 MiB: more than the kernel buffers for a stalled reader


async def nothing(channel: Channel) -> None:
    """Ignore control connections, which are not tested here."""


async def document(query: Mapping[str, str]) -> Document:
    return Document(BODY, {"next": str(len(BODY))})


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    limits = Limits(stall_seconds=STALL_SECONDS)
    server = HttpServer(on_channel=nothing, limits=limits, queries={"/document": document})
    await server.start()
    yield server
    await server.stop()


async def request(server: HttpServer) -> socket.socket:
    """Request the document over a new socket with a small receive buffer."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    reader.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(reader, ("127.0.0.1", int(server.address.rpartition(":")[2])))
    await loop.sock_sendall(reader, b"GET /document HTTP/1.1\r\nHost: x\r\n\r\n")
    await loop.sock_recv(reader, 64)
    return reader


async def status(server: HttpServer) -> int:
    async with (
        aiohttp.ClientSession(server.address) as session,
        session.get("/document") as response,
    ):
        if response.status == 200:
            assert await response.read() == BODY
            assert response.headers["X-Fact-next"] == str(len(BODY))
        return response.status


async def rest(reader: socket.socket) -> int:
    """Count the bytes that still arrive before the connection ends."""
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.get_running_loop().sock_recv(reader, 1 << 20):
            count += len(piece)
    return count


async def test_a_reader_that_reads_nothing_is_cut_off(server: HttpServer) -> None:
    held = [await request(server) for _ in range(QUERIES_MAX)]
    try:
        assert await status(server) == 429
        for _ in range(30):
            await asyncio.sleep(STALL_SECONDS)
            if await status(server) == 200:
                break
        else:
            pytest.fail("no reader was cut off")
        await asyncio.sleep(10 * STALL_SECONDS)  # The other readers are cut off a little later.
        async with asyncio.timeout(30.0):
            for reader in held:  # Only data in the kernel's buffers can still be read.
                assert await rest(reader) < len(BODY) - (1 << 20)
    finally:
        for reader in held:
            reader.close()


async def test_a_slow_reader_gets_everything(server: HttpServer) -> None:
    reader = await request(server)
    taken = 64
    with reader:
        while taken < len(BODY):
            piece = await asyncio.get_running_loop().sock_recv(reader, 1 << 20)
            assert piece, "it was cut off"
            taken += len(piece)
            if taken % 7 == 0:
                await asyncio.sleep(STALL_SECONDS / 20)
