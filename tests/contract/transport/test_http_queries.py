"""HTTP only: documents are given to so many readers at once, and not for ever to who reads none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest

from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.http_server import QUERIES_MAX, HttpServer
from decoupled_diloco.transport.limits import Limits

STALL_SECONDS = 0.1
BODY = bytes(range(256)) * (48 << 10)  # 12 MiB: more than the kernel takes for who reads nothing


async def nothing(channel: Channel) -> None:
    """Control connections are not what is tested here."""


async def document(query: Mapping[str, str]) -> Document:
    return Document(BODY, {"next": str(len(BODY))})


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    limits = Limits(stall_seconds=STALL_SECONDS)
    server = HttpServer(on_channel=nothing, limits=limits, queries={"/document": document})
    await server.start()
    yield server
    await server.stop()


async def ask(server: HttpServer) -> socket.socket:
    """Asks for the document over a socket of its own, with little room for the answer."""
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    asking.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(asking, ("127.0.0.1", int(server.address.rpartition(":")[2])))
    await loop.sock_sendall(asking, b"GET /document HTTP/1.1\r\nHost: x\r\n\r\n")
    await loop.sock_recv(asking, 64)
    return asking


async def status(server: HttpServer) -> int:
    async with (
        aiohttp.ClientSession(server.address) as session,
        session.get("/document") as response,
    ):
        if response.status == 200:
            assert await response.read() == BODY
            assert response.headers["X-Fact-next"] == str(len(BODY))
        return response.status


async def rest(asking: socket.socket) -> int:
    """How many bytes still come before the connection ends."""
    count = 0
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.get_running_loop().sock_recv(asking, 1 << 20):
            count += len(piece)
    return count


async def test_who_reads_nothing_takes_a_place_for_a_while_only(server: HttpServer) -> None:
    held = [await ask(server) for _ in range(QUERIES_MAX)]
    try:
        assert await status(server) == 429
        for _ in range(30):
            await asyncio.sleep(STALL_SECONDS)
            if await status(server) == 200:
                break
        else:
            pytest.fail("no place becomes free")
        await asyncio.sleep(10 * STALL_SECONDS)  # The others' time is up a little later.
        async with asyncio.timeout(30.0):
            for asking in held:  # What the kernel holds can still be read, no more.
                assert await rest(asking) < len(BODY) - (1 << 20)
    finally:
        for asking in held:
            asking.close()


async def test_who_reads_slowly_gets_everything(server: HttpServer) -> None:
    asking = await ask(server)
    taken = 64
    with asking:
        while taken < len(BODY):
            piece = await asyncio.get_running_loop().sock_recv(asking, 1 << 20)
            assert piece, "it was cut off"
            taken += len(piece)
            if taken % 7 == 0:
                await asyncio.sleep(STALL_SECONDS / 20)
