"""HTTP only: link measurements and run information, which are limited and require a token."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator

import aiohttp
import pytest

from decoupled_diloco.transport import probe
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.probe import PROBE_BYTES_MAX, PROBES_MAX
from decoupled_diloco.transport.tokens import Tokens

HEADERS = {"Authorization": "Bearer secret", "X-Principal": "learner-0"}


async def nothing(channel: Channel) -> None:
    """Ignore control connections, which are not tested here."""


@pytest.fixture
async def server() -> AsyncIterator[HttpServer]:
    server = HttpServer(
        tokens=Tokens(principals={"learner-0": "secret"}),
        on_channel=nothing,
        about=lambda: {"name": "test"},
    )
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def session(server: HttpServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.address, headers=HEADERS) as session:
        yield session


async def test_a_probe_sends_and_receives_the_requested_number_of_bytes(
    session: aiohttp.ClientSession, server: HttpServer
) -> None:
    async with session.get(f"/probe?bytes={PROBE_BYTES_MAX}") as response:
        assert (response.status, await response.read()) == (200, bytes(PROBE_BYTES_MAX))
    async with session.put("/probe", data=io.BytesIO(bytes(PROBE_BYTES_MAX))) as response:
        assert response.status == 204
    assert server.stats.data_bytes_sent == server.stats.data_bytes_received == 0, (
        "these are not payload bytes"
    )


@pytest.mark.parametrize("count", ["", "0", "-1", "x", str(PROBE_BYTES_MAX + 1), "9" * 5000])
async def test_a_probe_sends_no_more_than_the_limit(
    session: aiohttp.ClientSession, count: str
) -> None:
    async with session.get(f"/probe?bytes={count}") as response:
        assert response.status == 413
        assert str(PROBE_BYTES_MAX) in await response.text()


async def test_a_probe_receives_no_more_than_the_limit(session: aiohttp.ClientSession) -> None:
    async with session.put("/probe", data=io.BytesIO(bytes(PROBE_BYTES_MAX + 1))) as response:
        assert response.status == 413
    async with session.delete("/probe") as response:
        assert response.status == 405


async def test_a_probe_has_a_time_limit(
    session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE_SECONDS_MAX", 0.1)

    async def slowly() -> AsyncIterator[bytes]:
        yield b"1"
        await asyncio.sleep(5)

    length = {"Content-Length": "2"}
    async with session.put("/probe", data=slowly(), headers=length) as response:
        assert response.status == 408


async def test_the_number_of_simultaneous_probes_is_limited(session: aiohttp.ClientSession) -> None:
    done = asyncio.Event()

    async def hold() -> AsyncIterator[bytes]:
        yield b"1"
        await done.wait()
        yield b"2"

    length = {"Content-Length": "2"}
    held = [
        asyncio.create_task(session.put("/probe", data=hold(), headers=length).__aenter__())
        for _ in range(PROBES_MAX)
    ]
    await asyncio.sleep(0.2)
    async with session.get("/probe?bytes=1") as response:
        assert response.status == 429
    done.set()
    assert {(await response).status for response in held} == {204}
    async with session.get("/probe?bytes=1") as response:
        assert response.status == 200


@pytest.mark.parametrize("path", ["/probe?bytes=1", "/run"])
async def test_probes_and_run_information_require_a_token(
    session: aiohttp.ClientSession, path: str
) -> None:
    async with session.get(path, headers={"Authorization": "Bearer wrong"}) as response:
        assert response.status == 401
    async with session.get(path, headers={"X-Principal": "other"}) as response:
        assert response.status == 403
        assert response.headers["X-Principal"] == "learner-0", "the token's owner is named"
    async with session.get(path, headers={"Origin": "http://evil"}) as response:
        assert response.status == 403


async def test_run_information_is_json(session: aiohttp.ClientSession) -> None:
    async with session.get("/run") as response:
        assert (response.status, await response.json()) == (200, {"name": "test"})
    async with session.put("/run", data=b"") as response:
        assert response.status == 404
