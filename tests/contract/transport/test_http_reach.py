"""HTTP only: diagnosis of any server from outside."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from decoupled_diloco.transport import probe, reachability
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.reachability import Seen, check_server, listens
from decoupled_diloco.transport.tokens import Tokens

HEALTH = {"shard": 0, "run": "test"}


@asynccontextmanager
async def shard(tokens: Tokens | None = None) -> AsyncIterator[tuple[HttpServer, list[Channel]]]:
    channels: list[Channel] = []

    async def keep(channel: Channel) -> None:
        channels.append(channel)
        await channel.receive()

    server = HttpServer(
        tokens=tokens, on_channel=keep, health=lambda: HEALTH, about=lambda: {"addresses": []}
    )
    await server.start()
    yield server, channels
    await server.stop()


@asynccontextmanager
async def stranger(answer: bytes, *, endless: bool = False) -> AsyncIterator[str]:
    """A server that answers every request with the same bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            while endless:
                writer.write(bytes(1 << 16))
                await writer.drain()
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()


@asynccontextmanager
async def silent() -> AsyncIterator[str]:
    """A server that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def trouble(seen: Seen) -> tuple[str, str]:
    assert seen.trouble is not None
    return seen.trouble.step, seen.trouble.cause


async def test_a_healthy_shard_passes_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "RATE_SECONDS", 0.05)
    async with shard(Tokens("secret")) as (server, channels):
        seen = await check_server(server.address, "secret")
        assert seen.trouble is None
        assert await listens(server.address) is None
        assert server.stats.data_bytes_sent == server.stats.data_bytes_received == 0
    assert (seen.ip, seen.health, seen.run) == ("127.0.0.1", HEALTH, {"addresses": []})
    assert seen.clock_ahead_seconds is not None
    assert abs(seen.clock_ahead_seconds) < 1.0
    assert len(seen.round_trips) == reachability.ROUND_TRIPS
    assert seen.up_bytes_per_second
    assert seen.up_bytes_per_second > 0
    assert seen.down_bytes_per_second
    assert seen.down_bytes_per_second > 0
    (channel,) = channels
    assert seen.upgraded
    assert channel.closed
    assert channel.peer.principal.startswith("doctor-"), "it never uses a learner's name"


async def test_a_rejected_token_ends_the_diagnosis() -> None:
    async with shard(Tokens("secret")) as (server, channels):
        for token in ("wrong", None, "sécret"):
            seen = await check_server(server.address, token)
            assert trouble(seen) == ("run", "token")
            assert seen.round_trips
        assert not channels


async def test_a_personal_token_identifies_its_principal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "RATE_SECONDS", 0.05)
    async with shard(Tokens(principals={"a": "one", "b": "two"})) as (server, _):
        seen = await check_server(server.address, "two")
        assert (seen.trouble, seen.principal) == (None, "b")


async def test_a_closed_port_and_an_unknown_host() -> None:
    async with stranger(b"") as address:
        pass
    assert trouble(await check_server(address, None)) == ("connect", "refused")
    refused = await listens(address)
    assert refused is not None
    assert refused.cause == "refused"
    assert trouble(await check_server("http://no-such-host.invalid:1", None)) == ("name", "name")


@pytest.mark.parametrize("host", ["[::1", "a..b", "x" * 80, "[::zz]"])
async def test_invalid_host_names(host: str) -> None:
    assert trouble(await check_server(f"http://{host}:1", None)) == ("name", "name")
    refused = await listens(f"http://{host}:1")
    assert refused is not None
    assert refused.cause == "name"


async def test_a_server_with_other_measurements_is_busy_not_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "PROBES_MAX", 0)
    async with shard() as (server, _):
        seen = await check_server(server.address, None)
    assert trouble(seen) == ("up", "busy")
    assert seen.upgraded
    assert "measurements are under way" in str(seen.trouble)


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: "


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/healthz\r\nContent-Length: 0\r\n\r\n",
        LENGTH + b"2\r\n\r\n{}",
        LENGTH + b"1\r\n\r\n{",
        LENGTH + b"9\r\n\r\n{}",
        b"",
    ],
)
async def test_answers_of_other_servers(answer: bytes) -> None:
    async with stranger(answer) as address:
        assert trouble(await check_server(address, "secret")) == ("health", "stranger")


async def test_an_endless_answer() -> None:
    begin = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    async with stranger(begin, endless=True) as address:
        assert trouble(await check_server(address, "secret")) == ("health", "stranger")


async def test_silence_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "ANSWER_SECONDS", 0.1)
    async with silent() as address:
        assert trouble(await check_server(address, None)) == ("health", "silent")


async def test_the_whole_diagnosis_has_a_time_limit() -> None:
    async with silent() as address:
        seen = await check_server(address, None, seconds=0.2)
    assert trouble(seen) == ("time", "silent")
    assert seen.connect_seconds is not None, "earlier results are kept"
