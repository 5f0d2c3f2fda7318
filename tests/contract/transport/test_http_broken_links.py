"""HTTP only: payloads over several connections, through a proxy that breaks them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.limits import Limits

MIB = 1 << 20
LIMITS = Limits(stall_seconds=0.3, retries=8)


class Proxy:
    """Forwards connections, each of which breaks after a random number of bytes.

    Bytes in flight at the break are lost, as if a router had died.
    """

    def __init__(self, port: int, rng: random.Random) -> None:
        self.rng = rng
        self.port = port
        self.broken = 0
        self.breaking = False
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        budget = [self.rng.randrange(300_000, 3 * MIB)]
        ways = [
            asyncio.create_task(self.forward(reader, there_writer, budget)),
            asyncio.create_task(self.forward(there_reader, writer, budget)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for end in (writer, there_writer):
                end.transport.abort()
                await asyncio.gather(end.wait_closed(), return_exceptions=True)
            self.tasks.discard(task)

    async def forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: list[int]
    ) -> None:
        while data := await reader.read(1 << 16):
            budget[0] -= len(data)
            if self.breaking and budget[0] < 0:
                self.broken += 1
                return
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def proxied(seed: int) -> AsyncIterator[tuple[HttpServer, HttpClient, Proxy]]:
    async def keep(channel: Channel) -> None:
        with pytest.raises(TransportError):
            await channel.receive()

    server = HttpServer(on_channel=keep, limits=LIMITS)
    await server.start()
    proxy = Proxy(int(server.address.rsplit(":", 1)[1]), random.Random(seed))
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    client = HttpClient(limits=LIMITS, rng=random.Random(seed))
    address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    await client.connect(address, "learner", "learner-0")
    client.rtt = lambda target: 0.03  # type: ignore[method-assign]  # As if far away: many stripes.
    proxy.breaking = True
    yield server, client, proxy
    proxy.breaking = False
    await client.close()
    await server.stop()
    listener.close()
    for task in list(proxy.tasks):
        task.cancel()
    await asyncio.gather(*proxy.tasks, return_exceptions=True)


@pytest.mark.parametrize("seed", [1, 2])
async def test_bodies_survive_broken_connections(seed: int) -> None:
    body = memoryview(random.Random(seed).randbytes(24 * MIB))
    async with proxied(seed) as (server, client, proxy):
        upload = server.bodies.expect("a", len(body), "learner-0")
        sent = await client.put(upload.url, body)
        arrived = await upload.body
        assert arrived.buffer == body
        arrived.release()
        broken = proxy.broken
        out = memoryview(bytearray(len(body)))
        fetched = await client.get(server.bodies.offer("b", body, "d"), out)
        assert out == body
        assert (sent.stripes, fetched.stripes) == (16, 16)
        assert sent.retries > 0
        assert fetched.retries > 0
        assert 0 < broken < proxy.broken
        # Resumed ranges carry what was missing, give or take a piece in flight per break.
        assert client.stats.data_bytes_received == len(body)
        assert server.stats.data_bytes_received <= len(body) + broken * MIB
        assert server.pool.in_use == 0


async def test_a_put_without_any_answer_is_abandoned() -> None:
    """The network is silent: nothing comes back over any connection, old or new."""
    over = asyncio.Event()

    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        writer.transport.abort()

    listener = await asyncio.start_server(keep_silent, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    client = HttpClient(limits=Limits(stall_seconds=0.1, retries=2))
    with pytest.raises(TransportError, match="no answer within"):
        async with asyncio.timeout(20):
            await client.put("/bodies/a", memoryview(b"body"), base=address)
    await client.close()
    over.set()
    listener.close()
    await listener.wait_closed()


async def test_a_payload_replaced_during_a_get_is_never_mixed() -> None:
    async def keep(channel: Channel) -> None:
        with pytest.raises(TransportError):
            await channel.receive()

    server = HttpServer(on_channel=keep)
    await server.start()
    client = HttpClient()
    await client.connect(server.address, "learner", "learner-0")
    client.rtt = lambda target: 0.03  # type: ignore[method-assign]
    bodies = [memoryview(bytes([number]) * (4 * MIB)) for number in range(20)]
    url = server.bodies.offer("a", bodies[0], "0")
    out = memoryview(bytearray(4 * MIB))

    async def replace() -> None:
        for number, body in enumerate(bodies):
            server.bodies.offer("a", body, str(number))
            await asyncio.sleep(0.005)

    replacing = asyncio.create_task(replace())
    outcomes = []
    while not replacing.done():
        try:
            stats = await client.get(url, out)
        except ProtocolError as error:
            outcomes.append(str(error))
        else:
            assert out == bodies[int(stats.digest)]
            outcomes.append("whole")
    assert all(outcome == "whole" or "was replaced" in outcome for outcome in outcomes)
    await client.get(url, out)
    assert out == bodies[-1]
    await client.close()
    await server.stop()
