"""HTTP only: peers that do not use our client and break every rule."""

# These tests poll while something else runs.
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.transport.channel import SMALL_BODY_BYTES, split_body, with_body
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tokens import Tokens

LIMITS = Limits(
    ping_seconds=0.05, lost_seconds=0.3, stall_seconds=0.2, retries=2, connections=20,
    streams_per_principal=3,
)  # fmt: skip
HEADERS = {"Authorization": "Bearer secret", "X-Principal": "learner-0", "X-Role": "learner"}
MIB = 1 << 20


class Target:
    """A server, the channels that it accepted, and a session for handwritten HTTP requests."""

    def __init__(self) -> None:
        self.accepted: asyncio.Queue[Channel] = asyncio.Queue()
        self.server = HttpServer(
            tokens=Tokens("secret"),
            on_channel=self.keep,
            limits=LIMITS,
            pool_bytes=16 * MIB,
            health=lambda: {"round": 7},
        )
        self.session: Any = None

    async def keep(self, channel: Channel) -> None:
        self.accepted.put_nowait(channel)
        while not channel.closed:
            await asyncio.sleep(0.01)

    async def ask(self, method: str, path: str, **options: Any) -> tuple[int, str, Any]:
        options["headers"] = {**HEADERS, **options.get("headers", {})}
        async with self.session.request(method, self.server.address + path, **options) as response:
            return response.status, await response.text(), response.headers

    async def raw(self, text: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a separate connection and write any text."""
        host, port = self.server.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        lines = [*text.splitlines(), *(f"{key}: {value}" for key, value in HEADERS.items())]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        return reader, writer


@pytest.fixture
async def target() -> AsyncIterator[Target]:
    target = Target()
    await target.server.start()
    async with aiohttp.ClientSession() as session:
        target.session = session
        yield target
    await target.server.stop()


async def test_health_needs_no_token(target: Target) -> None:
    async with target.session.get(target.server.address + "/healthz") as response:
        assert (response.status, await response.json()) == (200, {"round": 7})


@pytest.mark.parametrize(
    ("headers", "body", "status", "text"),
    [
        ({"Content-Range": "bytes 0-9/2000000"}, b"x" * 10, 413, "expects exactly 1048576"),
        ({"Content-Range": "bytes 0-9/1048576"}, b"x" * 11, 416, "does not match"),
        ({"Content-Range": "bytes 9-0/1048576"}, b"x" * 10, 416, "does not match"),
        ({"Content-Range": "bytes 1048570-1048579/1048576"}, b"x" * 10, 416, "does not match"),
        ({"Content-Range": "bytes 0-9/9999999999999999999999"}, b"x" * 10, 416, "does not match"),
        ({"Content-Range": "nonsense"}, b"x", 416, "does not match"),
        ({"Content-Encoding": "gzip"}, b"x" * MIB, 415, "without Content-Encoding"),
        ({}, b"", 413, "expects exactly"),
        ({"Authorization": "Bearer wrong"}, b"x" * MIB, 401, "not belong to this run"),
        ({"Authorization": "Basic c2VjcmV0"}, b"x" * MIB, 401, "requires the run's secret"),
        ({"X-Principal": "learner-1"}, b"x" * MIB, 403, "'learner-1' may not write"),
        ({"X-Principal": "é"}, b"x" * MIB, 400, "is not a valid name"),
        ({"Origin": "http://evil.example"}, b"x" * MIB, 403, "browsers may not use this path"),
    ],
)
async def test_invalid_puts_allocate_nothing(
    target: Target, headers: dict[str, str], body: bytes, status: int, text: str
) -> None:
    upload = target.server.bodies.expect("a", MIB, "learner-0")
    got = await target.ask("PUT", upload.url, headers=headers, data=body)
    assert got[0] == status
    assert text in got[1]
    assert target.server.pool.in_use == 0
    assert upload.received == 0
    upload.cancel()


async def test_a_put_without_a_length_is_refused(target: Target) -> None:
    upload = target.server.bodies.expect("a", MIB, "learner-0")

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * MIB

    status, text, _ = await target.ask("PUT", upload.url, data=pieces())
    assert (status, "Content-Length" in text) == (411, True)


async def test_overlapping_ranges_are_refused_and_the_rest_is_kept(target: Target) -> None:
    upload = target.server.bodies.expect("a", 10, "learner-0")
    put = {"Content-Range": "bytes 0-5/10"}
    assert (await target.ask("PUT", upload.url, headers=put, data=b"012345"))[0] == 204
    for text, body in (("bytes 5-9/10", b"xxxxx"), ("bytes 0-5/10", b"xxxxxx")):
        status, why, _ = await target.ask(
            "PUT", upload.url, headers={"Content-Range": text}, data=body
        )
        assert (status, "overlap" in why) == (409, True)
    _, _, headers = await target.ask("HEAD", upload.url)
    assert (headers["X-State"], headers["X-Received"]) == ("receiving", "0-6")
    rest = {"Content-Range": "bytes 6-9/10"}
    assert (await target.ask("PUT", upload.url, headers=rest, data=b"6789"))[0] == 204
    body = await upload.body
    assert body.buffer == b"0123456789"
    body.release()
    assert (await target.ask("HEAD", upload.url))[2]["X-State"] == "arrived"


async def test_a_truncated_put_keeps_its_prefix_until_it_is_abandoned(target: Target) -> None:
    upload = target.server.bodies.expect("a", 10, "learner-0")
    _, writer = await target.raw(f"PUT {upload.url} HTTP/1.1\nHost: x\nContent-Length: 10")
    writer.write(b"0123")
    while upload.received < 4:
        await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()
    with pytest.raises(TransportError, match="4 of 10 bytes arrived from 'learner-0'"):
        await asyncio.wait_for(upload.body, 5)
    assert target.server.pool.in_use == 0


async def test_too_many_transfers_of_one_principal(target: Target) -> None:
    upload = target.server.bodies.expect("a", 100, "learner-0")
    held = []
    for number in range(3):
        held.append(
            await target.raw(
                f"PUT {upload.url} HTTP/1.1\nHost: x\nContent-Length: 10\n"
                f"Content-Range: bytes {10 * number}-{10 * number + 9}/100"
            )
        )
    await asyncio.sleep(0.05)
    part = {"Content-Range": "bytes 50-59/100"}
    status, text, _ = await target.ask("PUT", upload.url, headers=part, data=b"0123456789")
    assert (status, "has 3 transfers open" in text) == (429, True)
    for _, writer in held:
        writer.close()
        await writer.wait_closed()
    upload.cancel()


@pytest.mark.parametrize("text", ["bytes=0-10", "bytes=5-", "bytes=-5", "bytes=0-1,3-4", "x"])
async def test_ranges_that_do_not_fit_an_offer(target: Target, text: str) -> None:
    url = target.server.bodies.offer("a", memoryview(b"0123456789"), "")
    status, why, _ = await target.ask("GET", url, headers={"Range": text})
    assert (status, "does not match" in why) == (416, True)


async def test_other_methods_and_places(target: Target) -> None:
    assert (await target.ask("DELETE", "/bodies/a"))[0] == 405
    assert (await target.ask("GET", "/etc/passwd"))[0] == 404
    assert (await target.ask("GET", "/bodies/../../etc/passwd"))[0] == 404
    assert (await target.ask("GET", "/control"))[0] == 400


async def test_headers_are_bounded(target: Target) -> None:
    assert (await target.ask("GET", "/" + "x" * 20_000))[0] == 400
    assert (await target.ask("GET", "/", headers={"X-Big": "x" * 20_000}))[0] == 400


async def test_connections_are_bounded(target: Target) -> None:
    host, port = target.server.address.removeprefix("http://").split(":")
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(LIMITS.connections)]
    await asyncio.sleep(0.05)
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"20 connections, its limit" in answer
    for _, other in [*idle, (reader, writer)]:
        other.close()
        await other.wait_closed()
    await asyncio.sleep(0.05)
    assert (await target.ask("GET", "/healthz"))[0] == 200


async def open_control(target: Target, **options: Any) -> tuple[Any, Any]:
    socket = await target.session.ws_connect(
        target.server.address + "/control", headers=HEADERS, **options
    )
    return socket, await target.accepted.get()


async def reason_of(channel: Any) -> str:
    try:
        async with asyncio.timeout(5):
            while True:
                await channel.receive()
    except TransportError as error:
        return str(error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not json", "is not JSON"),
        ("[1, 2]", "JSON list, not an object"),
        ("[" * 200_000, "is not JSON"),
        ('{"n": ' + "9" * 10_000 + "}", "is not JSON"),
        (b"bin", "shorter than its header"),
        (b"\0\0\0\x09binary", "shorter than its header"),
        (b"\0\0\0\x06binary", "is not JSON"),
        (b"\0\0\0\x02[]", "JSON list, not an object"),
        (b"\0\0\0\x02{}", "has neither 'put' nor 'get'"),
        (b'\0\0\0\x09{"get":1}', "has neither 'put' nor 'get'"),
        ("x" * (2 * MIB), "protocol violation"),
    ],
)
async def test_violations_close_the_channel(target: Target, text: Any, reason: str) -> None:
    socket, channel = await open_control(target)
    await (socket.send_bytes(text) if isinstance(text, bytes) else socket.send_str(text))
    why = await reason_of(channel)
    assert "protocol violation" in why
    assert reason in why
    await socket.close()


async def test_a_second_payload_before_the_first_is_answered_closes_the_channel(
    target: Target,
) -> None:
    socket, channel = await open_control(target)
    memory = await target.server.pool.acquire(target.server.pool.nbytes)
    target.server.bodies.expect("a", 4, "learner-0")
    put = with_body({"put": "a"}, b"body")
    await socket.send_bytes(put)  # it waits for memory
    await socket.send_bytes(put)
    assert "an unsolicited binary frame" in await reason_of(channel)
    memory.release()
    await socket.close()


async def test_an_offer_that_is_too_large_for_a_channel_is_not_sent_over_it(
    target: Target,
) -> None:
    socket, _ = await open_control(target)
    size = SMALL_BODY_BYTES + 1
    target.server.bodies.offer("a", memoryview(bytes(size)), "digest")
    await socket.send_bytes(with_body({"get": "a", "nbytes": size}))
    header, body = split_body((await socket.receive()).data)
    assert (header, len(body)) == ({"nbytes": size, "digest": "digest"}, 0)
    await socket.close()


async def test_one_more_channel_than_allowed_closes_the_principal_s_oldest(target: Target) -> None:
    opened = [await open_control(target) for _ in range(LIMITS.channels_per_principal)]
    assert not any(channel.closed for _, channel in opened)
    opened.append(await open_control(target))
    assert "more than 8 control channels" in await reason_of(opened[0][1])
    assert not any(channel.closed for _, channel in opened[1:])
    for socket, _ in opened:
        await socket.close()


async def test_a_peer_that_never_answers_is_lost(target: Target) -> None:
    socket, channel = await open_control(target, autoping=False)
    assert "nothing received from 'learner-0'" in await reason_of(channel)
    await socket.close()


async def test_a_peer_that_vanishes_is_lost_at_once(target: Target) -> None:
    client = HttpClient(token="secret", limits=dataclasses.replace(LIMITS, lost_seconds=30))
    mine = await client.connect(target.server.address, "learner", "learner-0")
    theirs = await target.accepted.get()
    mine._socket._response.connection.transport.abort()
    assert "lost" in await reason_of(theirs)
    assert "lost" in await reason_of(mine)
    await client.close()


async def test_bytes_of_a_payload_renew_the_channel() -> None:
    """Pings are a minute apart here, so only the payload's bytes count."""
    accepted: asyncio.Queue[Channel] = asyncio.Queue()

    async def keep(channel: Channel) -> None:
        accepted.put_nowait(channel)
        while not channel.closed:
            await asyncio.sleep(0.01)

    limits = Limits(ping_seconds=60)
    server = HttpServer(on_channel=keep, limits=limits)
    client = HttpClient(limits=limits)
    await server.start()
    mine = await client.connect(server.address, "learner", "learner-0")
    theirs = await accepted.get()
    await asyncio.sleep(0.1)
    before = mine.last_received, theirs.last_received
    upload = server.bodies.expect("a", MIB, "learner-0")
    await client.put(upload.url, memoryview(bytes(MIB)))
    (await upload.body).release()
    assert theirs.last_received > before[1] + 0.05
    await client.get(server.bodies.offer("b", memoryview(bytes(10)), ""), memoryview(bytearray(10)))
    assert mine.last_received > before[0] + 0.05
    await client.close()
    await server.stop()


@asynccontextmanager
async def impostor(answer: bytes, seen: list[str]) -> AsyncIterator[str]:
    """A server that sends one answer and nothing more until the client leaves; yields its URL."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(answer)
            await reader.read()
        finally:
            writer.close()
            await writer.wait_closed()
            ended.set()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/a"
    await asyncio.wait_for(ended.wait(), 5)
    listener.close()
    await listener.wait_closed()


async def test_the_token_is_not_sent_to_unknown_servers(target: Target) -> None:
    """An absolute URL may name any host. Only servers that the client dialed receive the token."""
    seen: list[str] = []
    async with impostor(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody", seen) as url:
        client = HttpClient(token="secret", limits=LIMITS)
        await client.connect(target.server.address, "learner", "learner-0")
        out = memoryview(bytearray(4))
        await client.get(url, out)
        assert out == b"body"
        assert "secret" not in seen[0]
        await client.close()


async def test_a_transfer_from_a_server_that_stops_sending_is_abandoned() -> None:
    async with impostor(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nbody", []) as url:
        client = HttpClient(limits=dataclasses.replace(LIMITS, retries=0))
        with pytest.raises(TransportError, match=r"no byte moved for 0\.2 s"):
            await client.get(url, memoryview(bytearray(1000)))
        await client.close()


async def test_redirects_are_not_followed(target: Target) -> None:
    """A redirect could send the token, or a request, to a server that was not configured."""
    answer = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    async with impostor(answer, []) as url:
        client = HttpClient(limits=LIMITS)
        with pytest.raises(ProtocolError, match="302"):
            await client.get(url, memoryview(bytearray(10)))
        await client.close()
