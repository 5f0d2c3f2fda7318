"""One world per transport: the same tests run over both."""

# These tests poll while something else runs.
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import encrypted
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel, Client
from decoupled_diloco.transport.limits import Limits
from memory_transport import MemoryClient, MemoryNetwork, MemoryServer

QUICK = Limits(ping_seconds=0.05, lost_seconds=0.6, stall_seconds=0.2, retries=2)


class World:
    """Creates servers and clients of one kind, and stops them at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.network = MemoryNetwork()
        self.accepted: asyncio.Queue[Channel] = asyncio.Queue()
        self.servers: list[Any] = []
        self.clients: list[Any] = []

    async def server(self, **options: Any) -> Any:
        options.setdefault("on_channel", self.keep)
        options.setdefault("limits", QUICK)
        options.setdefault("pool_bytes", 64 << 20)
        server: Any
        if self.kind == "https":
            options.setdefault("tls", encrypted.served(encrypted.folder()))
        if self.kind != "memory":
            server = HttpServer(**options)
        else:
            server = MemoryServer(self.network, **options)
        await server.start()
        self.servers.append(server)
        return server

    def client(self, **options: Any) -> Any:
        options.setdefault("limits", QUICK)
        client: Client
        if self.kind == "https":
            options.setdefault("tls", encrypted.dialled(encrypted.folder()))
        if self.kind != "memory":
            client = HttpClient(**options)
        else:
            client = MemoryClient(self.network, **options)
        self.clients.append(client)
        return client

    async def pair(self, principal: str = "learner-0", **options: Any) -> tuple[Any, ...]:
        """Return a server, a client, and both ends of a channel."""
        server = await self.server(**options)
        client = self.client()
        mine = await client.connect(server.address, "learner", principal)
        return server, client, mine, await self.accepted.get()

    async def keep(self, channel: Channel) -> None:
        """Hand an accepted channel to the test, and keep it until it closes."""
        self.accepted.put_nowait(channel)
        while not channel.closed:
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for end in self.clients:
            await end.close()
        for server in self.servers:
            await server.stop()


@pytest.fixture(params=["memory", "http", "https"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    world = World(request.param)
    yield world
    await world.stop()
