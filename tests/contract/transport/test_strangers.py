"""HTTP only: unauthenticated connections have a time limit and a number limit."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import encrypted
from decoupled_diloco.errors import AccessError, TransportError
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tls import TLSConfig
from decoupled_diloco.transport.tokens import Tokens
from process.stranger_clients import HELLO_BYTES

LIMITS = Limits(ping_seconds=0.1, lost_seconds=0.6, strangers=5)
PATIENT = dataclasses.replace(LIMITS, lost_seconds=30.0)
WRONG = b"GET /run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nX-Principal: a\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BOTH = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


class House:
    """A server with the connections to it."""

    def __init__(self, server: HttpServer, tls: bool) -> None:
        self.server, self.tls = server, tls
        self.opened: list[Connection] = []

    def client(self, token: str = "secret") -> HttpClient:
        tls = TLSConfig(encrypted.folder() / "authority.pem") if self.tls else None
        return HttpClient(token=token, limits=PATIENT, tls=tls)

    @property
    def address(self) -> str:
        return self.server.address.replace("127.0.0.1", "localhost")

    async def dial(self, data: bytes = b"") -> Connection:
        """Open a raw connection. It is plain text, so a TLS server sees an unfinished handshake."""
        port = int(self.server.address.rsplit(":", 1)[1])
        connection = await asyncio.open_connection("127.0.0.1", port)
        connection[1].write(data)
        self.opened.append(connection)
        return connection


@asynccontextmanager
async def house(limits: Limits, tls: bool) -> AsyncIterator[House]:
    async def keep(channel: Channel) -> None:
        while not channel.closed:
            await channel.receive()

    files = encrypted.served(encrypted.folder()) if tls else None
    server = HttpServer(tokens=Tokens("secret"), on_channel=keep, limits=limits, tls=files)
    await server.start()
    here = House(server, tls)
    try:
        yield here
    finally:
        for _, writer in here.opened:
            writer.transport.abort()
        await server.stop()


async def ends(connection: Connection, seconds: float = 5.0) -> bytes:
    """Return the data received until a connection is closed, which must be soon."""
    async with asyncio.timeout(seconds):
        try:
            return await connection[0].read()
        except ConnectionError:
            return b""


@BOTH
@pytest.mark.parametrize("data", [b"", b"GET /run HTTP/1.1\r\nX-Slow: ", HELLO_BYTES])
async def test_a_connection_without_a_complete_request_is_closed(data: bytes, tls: bool) -> None:
    async with house(LIMITS, tls) as here:
        await ends(await here.dial(data))


async def test_a_header_of_one_byte_at_a_time_is_closed() -> None:
    async with house(LIMITS, False) as here:
        connection = await here.dial(b"GET /healthz HTTP/1.1\r\nX-Slow: ")

        async def drip() -> None:
            while True:
                connection[1].write(b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        try:
            await ends(connection)
        finally:
            dripping.cancel()


async def test_requests_without_a_token_do_not_keep_a_connection_open() -> None:
    async with house(LIMITS, False) as here:
        connection = await here.dial(HEALTH)

        async def repeat() -> None:
            while True:
                await asyncio.sleep(0.1)
                connection[1].write(HEALTH)

        repeating = asyncio.create_task(repeat())
        try:
            answers = await ends(connection)
        finally:
            repeating.cancel()
        assert answers.count(b"200 OK") > 2


async def test_a_wrong_token_closes_its_connection() -> None:
    async with house(PATIENT, False) as here:
        answer = await ends(await here.dial(WRONG))
        assert b"401" in answer
        assert b"connection: close" in answer.lower()


@BOTH
async def test_one_unauthenticated_connection_too_many_closes_the_oldest(tls: bool) -> None:
    async with house(PATIENT, tls) as here:
        first = await here.dial()
        await asyncio.sleep(0.1)
        others = [await here.dial() for _ in range(PATIENT.strangers)]
        await ends(first)
        with pytest.raises(TimeoutError):
            await ends(others[-1], 0.3)


@BOTH
async def test_authenticated_connections_stay_open(tls: bool) -> None:
    """A channel and the idle connection of a payload outlive unauthenticated connections."""
    async with house(LIMITS, tls) as here:
        client = here.client()
        channel = await client.connect(here.address, "learner", "learner-0")
        url = here.server.bodies.offer("a", memoryview(b"0123456789"), "")
        await client.get(url, memoryview(bytearray(10)))
        for _ in range(3 * LIMITS.strangers):
            await here.dial(b"GET")
        await asyncio.sleep(2 * LIMITS.lost_seconds)
        assert not channel.closed, channel.reason
        await client.get(url, memoryview(bytearray(10)))
        late = here.client()
        assert not (await late.connect(here.address, "learner", "learner-1")).closed
        await late.close()
        await client.close()


@BOTH
async def test_a_learner_connects_during_a_flood_of_unauthenticated_connections(tls: bool) -> None:
    async with house(PATIENT, tls) as here:

        async def flood() -> None:
            while True:
                await here.dial(HELLO_BYTES)
                await asyncio.sleep(0.01)

        flooding = asyncio.create_task(flood())
        try:
            for _ in range(5):
                client = here.client()
                channel = await client.connect(here.address, "learner", "learner-0")
                assert not channel.closed
                await client.close()
            stranger = here.client("wrong")
            with pytest.raises((AccessError, TransportError)):
                await stranger.connect(here.address, "learner", "learner-0")
            await stranger.close()
        finally:
            flooding.cancel()
