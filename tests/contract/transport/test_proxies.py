"""Proxies of the environment: used for every other machine, and never for this one."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator

import pytest

import encrypted
from decoupled_diloco.errors import ConfigError, TransportError
from decoupled_diloco.transport.channel import SMALL_BODY_BYTES
from decoupled_diloco.transport.documents import Document
from decoupled_diloco.transport.fetch import fetch
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.reachability import check_server
from network.connect_proxy import copy

NAME = "syncer.example"
"""Only the proxy can resolve this name."""


class Proxy:
    """Forwards requests for any host to one server, and records the hosts."""

    def __init__(self, port: int) -> None:
        self.requests: list[str] = []
        self.passwords: list[str] = []
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:  # The doctor measures the round-trip time only.
            writer.close()
            return
        lines = head.split("\r\n")
        method, target, _ = lines[0].split(" ")
        self.requests.append(f"{method} {target}")
        for line in lines:
            if line.lower().startswith("proxy-authorization: basic "):
                self.passwords.append(base64.b64decode(line.split(" ")[2]).decode())
        there, here = await asyncio.open_connection("127.0.0.1", self._port)
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            path = "/" + target.split("/", 3)[3]
            here.write(head.replace(target, path, 1).encode())
        await asyncio.gather(copy(reader, here), copy(there, writer))


@pytest.fixture(params=["http", "https"])
async def world(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, Proxy, HttpServer]]:
    """The address at which a server is reachable only through the proxy."""
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)

    async def keep(channel: Channel) -> None:
        await channel.receive()

    async def document(query: object) -> Document:
        return Document(b"text")

    scheme = request.param
    server = HttpServer(
        on_channel=keep,
        queries={"/document": document},
        health=lambda: {"shard": 0},
        tls=encrypted.served(encrypted.folder()) if scheme == "https" else None,
    )
    await server.start()
    proxy = Proxy(int(server.address.rsplit(":", 1)[1]))
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    monkeypatch.setenv(f"{scheme}_proxy", f"http://me:word@127.0.0.1:{port}")
    yield f"{scheme}://{NAME}:7070", proxy, server
    await server.stop()
    listener.close()
    await listener.wait_closed()


async def test_all_requests_use_the_proxy(world: tuple[str, Proxy, HttpServer]) -> None:
    address, proxy, server = world
    secure = address.startswith("https")
    tls = encrypted.dialled(encrypted.folder()) if secure else None
    client = HttpClient(tls=tls)
    channel = await client.connect(address, "learner", "learner-0")
    body = bytes(SMALL_BODY_BYTES + 1)  # too large for the channel: it has a separate request
    server.bodies.offer("one", memoryview(body), "digest")
    out = memoryview(bytearray(len(body)))
    await client.get("/bodies/one", out)
    await channel.close()
    await client.close()
    found = await asyncio.to_thread(fetch, address, "/document", {}, None, tls)
    assert (bytes(out), found.body) == (body, b"text")
    way = f"CONNECT {NAME}:7070" if secure else f"GET http://{NAME}:7070/"
    assert len(proxy.requests) == 3
    assert all(each.startswith(way) for each in proxy.requests), proxy.requests
    assert proxy.passwords == ["me:word"] * 3


async def test_the_doctor_uses_the_proxy_too(
    world: tuple[str, Proxy, HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoupled_diloco.transport.reachability.RATE_SECONDS", 0.05)
    address, proxy, _ = world
    tls = encrypted.dialled(encrypted.folder()) if address.startswith("https") else None
    seen = await check_server(address, None, tls=tls)
    assert seen.trouble is None
    assert proxy.requests


async def test_this_machine_is_dialled_directly(world: tuple[str, Proxy, HttpServer]) -> None:
    address, proxy, server = world
    tls = encrypted.dialled(encrypted.folder()) if address.startswith("https") else None
    client = HttpClient(tls=tls)
    await client.connect(server.address, "learner", "learner-0")
    await client.close()
    await asyncio.to_thread(fetch, server.address, "/document", {}, None, tls)
    assert not proxy.requests


async def test_no_proxy_is_honored(
    world: tuple[str, Proxy, HttpServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, proxy, _ = world
    monkeypatch.setenv("no_proxy", NAME)
    client = HttpClient()
    with pytest.raises(TransportError):
        await client.connect(address, "learner", "learner-0")
    await client.close()
    with pytest.raises(TransportError):
        await asyncio.to_thread(fetch, address, "/document", {}, None)
    assert not proxy.requests


async def test_the_error_for_an_invalid_proxy_hides_its_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    for named in ("socks5://me:word@proxy:1080", "http://"):
        monkeypatch.setenv("http_proxy", named)
        client = HttpClient()
        with pytest.raises(
            ConfigError, match=r"http_proxy: .* is not of the form http://HOST:PORT"
        ) as caught:
            await client.connect(f"http://{NAME}:7070", "learner", "learner-0")
        assert "word" not in str(caught.value)
        await client.close()
