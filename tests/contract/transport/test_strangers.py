"""HTTP only: connections that show no secret have little time, and are few."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import encrypted
from decoupled_diloco.errors import AccessError, TransportError
from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tls import Tls
from decoupled_diloco.transport.tokens import Tokens
from process.strangers import HELLO_BYTES

LIMITS = Limits(ping_seconds=0.1, lost_seconds=0.6, strangers=5)
PATIENT = dataclasses.replace(LIMITS, lost_seconds=30.0)
WRONG = b"GET /run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer no\r\nX-Principal: a\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
BOTH = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


class House:
    """A server, and what dials it."""

    def __init__(self, server: HttpServer, tls: bool) -> None:
        self.server, self.tls = server, tls
        self.opened: list[Connection] = []

    def client(self, token: str = "secret") -> HttpClient:
        tls = Tls(encrypted.folder() / "authority.pem") if self.tls else None
        return HttpClient(token=token, limits=PATIENT, tls=tls)

    @property
    def address(self) -> str:
        return self.server.address.replace("127.0.0.1", "localhost")

    async def dial(self, says: bytes = b"") -> Connection:
        """A connection of somebody's own; in plain text, so only half open where TLS is spoken."""
        port = int(self.server.address.rsplit(":", 1)[1])
        connection = await asyncio.open_connection("127.0.0.1", port)
        connection[1].write(says)
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
    """What is said before a connection is closed, which must be soon."""
    async with asyncio.timeout(seconds):
        try:
            return await connection[0].read()
        except ConnectionError:
            return b""


@BOTH
@pytest.mark.parametrize("says", [b"", b"GET /run HTTP/1.1\r\nX-Slow: ", HELLO_BYTES])
async def test_who_says_nothing_whole_is_closed(says: bytes, tls: bool) -> None:
    async with house(LIMITS, tls) as here:
        await ends(await here.dial(says))


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


async def test_what_needs_no_secret_keeps_no_connection() -> None:
    async with house(LIMITS, False) as here:
        connection = await here.dial(HEALTH)

        async def ask() -> None:
            while True:
                await asyncio.sleep(0.1)
                connection[1].write(HEALTH)

        asking = asyncio.create_task(ask())
        try:
            answers = await ends(connection)
        finally:
            asking.cancel()
        assert answers.count(b"200 OK") > 2


async def test_a_wrong_token_costs_its_connection() -> None:
    async with house(PATIENT, False) as here:
        answer = await ends(await here.dial(WRONG))
        assert b"401" in answer
        assert b"connection: close" in answer.lower()


@BOTH
async def test_one_stranger_more_closes_the_oldest(tls: bool) -> None:
    async with house(PATIENT, tls) as here:
        first = await here.dial()
        await asyncio.sleep(0.1)
        others = [await here.dial() for _ in range(PATIENT.strangers)]
        await ends(first)
        with pytest.raises(TimeoutError):
            await ends(others[-1], 0.3)


@BOTH
async def test_who_has_shown_the_secret_stays(tls: bool) -> None:
    """A channel, and the idle connection of a body, outlive strangers and their time."""
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
async def test_a_learner_gets_in_beside_strangers_who_dial_on_and_on(tls: bool) -> None:
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
