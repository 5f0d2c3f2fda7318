"""Small payloads use the control channel, and a separate request if the channel fails."""

# These tests poll while something else runs.
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decoupled_diloco.errors import AccessError, ProtocolError
from decoupled_diloco.transport import channel as channels
from decoupled_diloco.transport.channel import SMALL_BODY_BYTES, WebSocketChannel
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer


class Pair:
    """A server, a client with a channel, and the separate requests for payloads."""

    def __init__(self, server: HttpServer, client: HttpClient, requests: list[str]) -> None:
        self.server = server
        self.client = client
        self.requests = requests
        self.channel: WebSocketChannel

    async def put(self, path: str, body: bytes) -> bytes:
        """Send a payload that the server expects, and return what arrived."""
        upload = self.server.bodies.expect(path, len(body), "learner-0")
        await self.client.put(upload.url, memoryview(body))
        arrived = await upload.body
        copy = bytes(arrived.buffer)
        arrived.release()
        return copy

    async def get(self, path: str, body: bytes) -> tuple[bytes, str]:
        """Offer a payload, fetch it, and return it with its digest."""
        url = self.server.bodies.offer(path, memoryview(body), f"digest of {path}")
        out = bytearray(len(body))
        stats = await self.client.get(url, memoryview(out))
        return bytes(out), stats.digest


@pytest.fixture
async def pair(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    async def keep(channel: Any) -> None:
        while not channel.closed:
            await asyncio.sleep(0.01)

    requests: list[str] = []
    request = HttpClient.request

    def noted(client: HttpClient, method: str, *arguments: Any) -> Any:
        requests.append(method)
        return request(client, method, *arguments)

    monkeypatch.setattr(HttpClient, "request", noted)
    server = HttpServer(on_channel=keep)
    await server.start()
    found = Pair(server, HttpClient(), requests)
    found.channel = await found.client.connect(server.address, "learner", "learner-0")
    yield found
    await found.client.close()
    await server.stop()


SMALL, LARGE = bytes(range(256)) * 64, bytes(SMALL_BODY_BYTES + 1)


async def test_a_small_payload_needs_no_separate_request(pair: Pair) -> None:
    assert await pair.put("a", SMALL) == SMALL
    assert await pair.get("b", SMALL) == (SMALL, "digest of b")
    assert pair.requests == []
    for stats in (pair.client.stats, pair.server.stats):
        assert (stats.data_bytes_sent, stats.data_bytes_received) == (len(SMALL), len(SMALL))


async def test_a_large_payload_and_a_part_have_separate_requests(pair: Pair) -> None:
    assert await pair.put("a", LARGE) == LARGE
    assert await pair.get("b", LARGE) == (LARGE, "digest of b")
    url = pair.server.bodies.offer("c", memoryview(SMALL), "")
    await pair.client.get(url, memoryview(bytearray(10)), first=5, total=len(SMALL))
    assert pair.requests == ["PUT", "GET", "GET"]


async def test_the_second_of_two_payloads_at_once_has_a_separate_request(pair: Pair) -> None:
    found = await asyncio.gather(*(pair.put(f"p{i}", SMALL) for i in range(2)))
    assert found == [SMALL, SMALL]
    assert pair.requests == ["PUT"]


async def test_refusals_are_the_same_as_for_requests(pair: Pair) -> None:
    other = pair.server.bodies.expect("other", 4, "learner-1")
    short = pair.server.bodies.expect("short", 3, "learner-0")
    address = pair.server.address
    without_channel = HttpClient(principal="learner-0", trusted=[address])
    for url in (other.url, short.url, "/bodies/unknown"):
        found = []
        for client in (pair.client, without_channel):
            with pytest.raises((AccessError, ProtocolError)) as refused:
                await client.put(url, memoryview(b"body"), base=address)
            found.append((refused.type, str(refused.value)))
        assert found[0] == found[1]
    await without_channel.close()
    four = pair.server.bodies.offer("four", memoryview(b"four"), "")
    with pytest.raises(ProtocolError, match="the payload has 4 bytes, 5 are expected"):
        await pair.client.get(four, memoryview(bytearray(5)))
    with pytest.raises(ProtocolError, match=r"is not offered here \(404\)"):
        await pair.client.get("/bodies/unknown", memoryview(bytearray(5)))


async def test_a_payload_that_arrived_before_the_channel_broke_is_not_sent_again(
    pair: Pair,
) -> None:
    upload = pair.server.bodies.expect("a", len(SMALL), "learner-0")
    upload.when_ended = lambda arrived: pair.channel.shut("cut")
    await pair.client.put(upload.url, memoryview(SMALL))
    assert pair.requests == ["HEAD"]
    arrived = await upload.body
    assert bytes(arrived.buffer) == SMALL
    arrived.release()


async def test_a_payload_whose_channel_breaks_first_is_sent_by_a_request(pair: Pair) -> None:
    memory = await pair.server.pool.acquire(pair.server.pool.nbytes)
    upload = pair.server.bodies.expect("a", len(SMALL), "learner-0")
    sending = asyncio.create_task(pair.client.put(upload.url, memoryview(SMALL)))
    while upload._phase() != "queued":
        await asyncio.sleep(0)
    pair.channel.shut("cut")
    memory.release()
    await sending
    assert pair.requests == ["HEAD", "PUT"] or pair.requests == ["HEAD"]
    arrived = await upload.body
    assert bytes(arrived.buffer) == SMALL
    arrived.release()


async def test_a_channel_still_works_after_a_canceled_transfer(pair: Pair) -> None:
    memory = await pair.server.pool.acquire(pair.server.pool.nbytes)
    upload = pair.server.bodies.expect("a", len(SMALL), "learner-0")
    sending = asyncio.create_task(pair.client.put(upload.url, memoryview(SMALL)))
    while upload._phase() != "queued":
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert not pair.channel.takes_body, "the server answers one at a time"
    memory.release()
    (await upload.body).release()
    while not pair.channel.takes_body:
        await asyncio.sleep(0)
    assert await pair.get("b", SMALL) == (SMALL, "digest of b")
    assert pair.requests == []


async def test_a_slow_channel_carries_no_further_payload(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SLOW_SECONDS", 0.0)
    assert await pair.put("a", SMALL) == SMALL
    assert await pair.put("b", SMALL) == SMALL
    assert pair.requests == ["PUT"]


async def test_messages_stay_in_order_beside_a_payload(pair: Pair) -> None:
    """A peer that does not read for a while receives everything in the order of sending."""
    server_side = pair.server._channels["learner-0"][0]
    for number in range(200):
        server_side.send({"number": number, "text": "x" * 10_000})
    assert await pair.get("b", SMALL) == (SMALL, "digest of b")
    assert [(await pair.channel.receive())["number"] for _ in range(200)] == list(range(200))
