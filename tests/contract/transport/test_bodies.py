"""Data plane: payloads, refusals, backpressure, resuming. Every test runs over all transports."""

# These tests poll while something else runs.
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
import dataclasses
import random
from itertools import pairwise
from typing import Any

import pytest

from decoupled_diloco.errors import AccessError, ProtocolError, TransportError
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tokens import Tokens

MIB = 1 << 20
QUICK = Limits(ping_seconds=0.05, lost_seconds=0.6, stall_seconds=0.2, retries=2)


def body_of(nbytes: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(nbytes)))


@pytest.mark.parametrize("nbytes", [1, 1000, 300_000, 16 * MIB])
async def test_put(world: Any, nbytes: int) -> None:
    server, client, _, _ = await world.pair()
    body = body_of(nbytes)
    upload = server.bodies.expect("fragment 3/v7", nbytes, "learner-0")
    stats = await client.put(upload.url, body)
    arrived = await upload.body
    assert arrived.buffer == body
    assert (stats.nbytes, stats.retries) == (nbytes, 0)
    assert client.stats.data_bytes_sent == server.stats.data_bytes_received == nbytes
    arrived.release()
    assert server.pool.in_use == 0


@pytest.mark.parametrize("nbytes", [1, 1000, 300_000, 16 * MIB])
async def test_get(world: Any, nbytes: int) -> None:
    server, client, _, _ = await world.pair()
    body = body_of(nbytes)
    url = server.bodies.offer("fragment 3/v7", body, "digest-1")
    out = memoryview(bytearray(nbytes))
    stats = await client.get(url, out)
    assert out == body
    assert stats.digest == "digest-1"
    assert client.stats.data_bytes_received == server.stats.data_bytes_sent == nbytes


async def test_absolute_urls_and_bases(world: Any) -> None:
    first, second = await world.server(), await world.server()
    client = world.client()
    for server in (first, second):
        await client.connect(server.address, "learner", "learner-0")
    url = first.bodies.offer("a", body_of(10), "")
    second.bodies.offer("a", body_of(10, seed=1), "")
    out = memoryview(bytearray(10))
    await client.get(first.address + url, out)
    assert out == body_of(10)
    await client.get(url, out)  # The last one connected to.
    assert out == body_of(10, seed=1)
    await client.get(url, out, base=first.address)
    assert out == body_of(10)


async def test_offer_again_replaces_and_withdraw_ends(world: Any) -> None:
    server, client, _, _ = await world.pair()
    out = memoryview(bytearray(10))
    url = server.bodies.offer("a", body_of(10), "1")
    assert server.bodies.offer("a", body_of(10, seed=1), "2") == url
    assert (await client.get(url, out)).digest == "2"
    assert out == body_of(10, seed=1)
    server.bodies.withdraw("a")
    with pytest.raises(ProtocolError, match="was withdrawn"):
        await client.get(url, out)


async def test_get_of_another_length(world: Any) -> None:
    server, client, _, _ = await world.pair()
    url = server.bodies.offer("a", body_of(MIB), "")
    for expected in (MIB - 1, MIB + 1, 10, 3 * MIB):
        with pytest.raises(ProtocolError, match=r"1048576|does not match"):
            await client.get(url, memoryview(bytearray(expected)))


async def test_unknown_paths(world: Any) -> None:
    _, client, _, _ = await world.pair()
    with pytest.raises(ProtocolError, match="is not offered here"):
        await client.get("/bodies/none", memoryview(bytearray(10)))
    with pytest.raises(ProtocolError, match="is not expected here"):
        await client.put("/bodies/none", body_of(8 * MIB))


@pytest.mark.parametrize("nbytes", [MIB - 1, MIB + 1, 20 * MIB])
async def test_put_of_another_size_allocates_nothing(world: Any, nbytes: int) -> None:
    server, client, _, _ = await world.pair()
    upload = server.bodies.expect("a", MIB, "learner-0")
    with pytest.raises(ProtocolError, match="expects exactly 1048576 bytes"):
        await client.put(upload.url, body_of(nbytes))
    assert (server.pool.in_use, upload.received) == (0, 0)
    await client.put(upload.url, body_of(MIB))  # The right size is still accepted.
    (await upload.body).release()


async def test_a_put_may_be_shorter_where_a_range_of_sizes_is_expected(world: Any) -> None:
    """Its first request sets the size, and later requests must have the same size."""
    server, client, _, _ = await world.pair()
    upload = server.bodies.expect("a", MIB, "learner-0", 1000)
    for nbytes in (999, MIB + 1):
        with pytest.raises(ProtocolError, match="expects 1000 to 1048576 bytes"):
            await client.put(upload.url, body_of(nbytes))
    body = body_of(5000)
    await client.put(upload.url, body[:2000], first=0, total=5000)
    with pytest.raises(ProtocolError, match="expects exactly 5000 bytes"):
        await client.put(upload.url, body_of(3000), first=3000, total=6000)
    await client.put(upload.url, body[2000:], first=2000, total=5000)
    arrived = await upload.body
    assert arrived.buffer == body
    arrived.release()
    assert server.pool.in_use == 0


async def test_put_to_the_payload_of_another_learner(world: Any) -> None:
    server = await world.server(tokens=Tokens(principals={"a": "token-a", "b": "token-b"}))
    upload = server.bodies.expect("x", 10, "a")
    other = world.client(token="token-b")
    await other.connect(server.address, "learner", "b")
    with pytest.raises(AccessError, match="'b' may not write"):
        await other.put(upload.url, body_of(10))


async def test_payloads_require_the_token_too(world: Any) -> None:
    server = await world.server(tokens=Tokens("secret"))
    url = server.bodies.offer("x", body_of(10), "")
    client = world.client(token="wrong")
    with pytest.raises(AccessError):
        await client.connect(server.address, "learner", "a")
    with pytest.raises(AccessError):
        await client.get(url, memoryview(bytearray(10)))


async def test_replayed_put(world: Any) -> None:
    server, client, _, _ = await world.pair()
    upload = server.bodies.expect("a", MIB, "learner-0")
    await client.put(upload.url, body_of(MIB))
    body = await upload.body
    with pytest.raises(ProtocolError, match="arrived already"):
        await client.put(upload.url, body_of(MIB, seed=1))
    assert body.buffer == body_of(MIB)
    body.release()


async def test_an_upload_cancelled_before_it_starts(world: Any) -> None:
    server, client, _, _ = await world.pair()
    upload = server.bodies.expect("a", MIB, "learner-0")
    upload.cancel("the round was given up")
    with pytest.raises(ProtocolError, match="the round was given up"):
        await client.put(upload.url, body_of(MIB))
    with pytest.raises(TransportError, match="the round was given up"):
        await upload.body


async def test_an_upload_cancelled_while_it_waits_for_memory(world: Any) -> None:
    server, client, _, _ = await world.pair(pool_bytes=MIB)
    hog = await server.pool.acquire(MIB)
    upload = server.bodies.expect("a", MIB, "learner-0")
    putting = asyncio.create_task(client.put(upload.url, body_of(MIB)))
    while not server.pool.waiting:
        await asyncio.sleep(0.01)
    upload.cancel("too late")
    with pytest.raises(ProtocolError, match="too late"):
        await asyncio.wait_for(putting, 5)
    assert server.pool.waiting == 0
    hog.release()
    assert server.pool.in_use == 0


async def test_cancel_releases_a_payload_that_was_not_taken(world: Any) -> None:
    server, client, _, _ = await world.pair()
    upload = server.bodies.expect("a", MIB, "learner-0")
    await client.put(upload.url, body_of(MIB))
    assert server.pool.in_use == MIB
    upload.cancel()
    assert server.pool.in_use == 0


async def test_cancelling_a_wait_does_not_cancel_the_upload(world: Any) -> None:
    server, client, _, _ = await world.pair()
    upload = server.bodies.expect("a", MIB, "learner-0")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(upload.body, 0.01)
    await client.put(upload.url, body_of(MIB))
    (await upload.body).release()


async def test_a_payload_is_sent_and_fetched_in_parts(world: Any) -> None:
    """Separate calls transfer the parts in any order, as several sync ranks do."""
    server, client, _, _ = await world.pair()
    whole, cuts = body_of(3 * MIB), (0, MIB // 2, 2 * MIB, 3 * MIB)
    upload = server.bodies.expect("a", 3 * MIB, "learner-0")
    url = server.bodies.offer("b", whole, "")
    out = memoryview(bytearray(3 * MIB))
    for first, end in reversed(list(pairwise(cuts))):
        stats = await client.put(upload.url, whole[first:end], first=first, total=3 * MIB)
        assert stats.nbytes == end - first
        await client.get(url, out[first:end], first=first, total=3 * MIB)
    body = await upload.body
    assert body.buffer == whole == out
    body.release()
    with pytest.raises(ProtocolError, match="bytes"):
        await client.get(url, out[:MIB], first=0, total=2 * MIB)


async def test_many_transfers_at_once_in_both_directions(world: Any) -> None:
    server, client, _, _ = await world.pair()

    async def put(number: int) -> None:
        upload = server.bodies.expect(f"up/{number}", MIB, "learner-0")
        await client.put(upload.url, body_of(MIB, number))
        body = await upload.body
        assert body.buffer == body_of(MIB, number)
        body.release()

    async def get(number: int) -> None:
        url = server.bodies.offer(f"down/{number}", body_of(MIB, number), "")
        out = memoryview(bytearray(MIB))
        await client.get(url, out)
        assert out == body_of(MIB, number)

    await asyncio.gather(*(work(number) for work in (put, get) for number in range(16)))
    assert server.pool.in_use == 0


@pytest.mark.parametrize("pool_mib", [16, 3])
async def test_eight_payloads_through_a_pool_for_fewer(world: Any, pool_mib: int) -> None:
    """Backpressure lasts longer than the stall interval and never exceeds the pool or one body."""
    server, client, mine, theirs = await world.pair(pool_bytes=pool_mib * MIB)
    bodies = [body_of(8 * MIB, number) for number in range(8)]
    most = 0

    async def put(number: int) -> None:
        nonlocal most
        upload = server.bodies.expect(f"{number}", 8 * MIB, "learner-0")
        sending = asyncio.create_task(client.put(upload.url, bodies[number]))
        body = await upload.body
        most = max(most, server.pool.in_use)
        await asyncio.sleep(0.06)
        assert body.buffer == bodies[number]
        body.release()
        await sending

    async with asyncio.timeout(15):
        await asyncio.gather(*(put(number) for number in range(8)))
    assert most <= max(pool_mib, 8) * MIB
    assert server.pool.in_use == 0
    assert not mine.closed
    assert not theirs.closed


async def test_peer_disappears_mid_put_then_resumes(world: Any) -> None:
    """Bytes that have arrived are not sent again."""
    server, client, _, _ = await world.pair()
    nbytes = 16 * MIB
    body = body_of(nbytes)
    upload = server.bodies.expect("a", nbytes, "learner-0")
    putting = asyncio.create_task(client.put(upload.url, body))
    while upload.received == 0:
        await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await putting
    await asyncio.sleep(0.05)
    before = upload.received
    assert 0 < before < nbytes
    stats = await client.put(upload.url, body)
    assert stats.retries == 1
    arrived = await upload.body
    assert arrived.buffer == body
    assert server.stats.data_bytes_received == nbytes
    arrived.release()


async def test_peer_disappears_mid_put_for_good(world: Any) -> None:
    server, client, _, _ = await world.pair()
    upload = server.bodies.expect("a", 16 * MIB, "learner-0")
    putting = asyncio.create_task(client.put(upload.url, body_of(16 * MIB)))
    while upload.received == 0:
        await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(TransportError, match=r"of 16777216 bytes arrived .* then nothing for 0\.6"):
        await asyncio.wait_for(upload.body, 5)
    assert server.pool.in_use == 0
    with pytest.raises(ProtocolError, match="was abandoned"):
        await client.put(upload.url, body_of(16 * MIB))


async def test_stop_while_transfers_are_in_flight(world: Any) -> None:
    server, client, _, _ = await world.pair(pool_bytes=MIB)
    hog = await server.pool.acquire(MIB)
    upload = server.bodies.expect("a", 8 * MIB, "learner-0")
    waiting = asyncio.create_task(client.put(upload.url, body_of(8 * MIB)))
    while not server.pool.waiting:
        await asyncio.sleep(0.01)
    await asyncio.wait_for(server.stop(), 5)
    with pytest.raises(TransportError):
        await asyncio.wait_for(waiting, 10)
    with pytest.raises(TransportError, match="the server stops"):
        await upload.body
    hog.release()
    assert server.pool.in_use == 0


async def test_more_payloads_than_connections_and_memory(world: Any) -> None:
    """Transfers that wait for memory must not hold connections that an active one needs."""
    limits = dataclasses.replace(QUICK, streams_per_principal=8)
    server = await world.server(limits=limits, pool_bytes=2 * MIB)
    client = world.client(limits=limits)
    await client.connect(server.address, "learner", "learner-0")
    if world.kind == "http":  # As on a long link: use the largest number of stripes.
        client.rtt = lambda target: 0.1

    async def put(number: int) -> None:
        upload = server.bodies.expect(f"{number}", 2 * MIB, "learner-0")
        sending = asyncio.create_task(client.put(upload.url, body_of(2 * MIB, number)))
        body = await upload.body
        assert body.buffer == body_of(2 * MIB, number)
        body.release()
        await sending

    async with asyncio.timeout(10):
        await asyncio.gather(*(put(number) for number in range(4)))


async def test_the_limit_on_fetches_of_a_payload_applies_per_principal(world: Any) -> None:
    server = await world.server(limits=dataclasses.replace(QUICK, copies_per_principal=3))
    greedy, honest = world.client(), world.client()
    for client, name in ((greedy, "learner-0"), (honest, "learner-1")):
        await client.connect(server.address, "learner", name)
    body = body_of(300_000)
    url = server.bodies.offer("whole/7", body, "")
    other = server.bodies.offer("whole/8", body, "")
    out = memoryview(bytearray(len(body)))
    for _ in range(3):
        await greedy.get(url, out)
    with pytest.raises(TransportError, match=r"'learner-0' has fetched .*whole/7 3 times, the lim"):
        await greedy.get(url, out)
    await honest.get(url, out)
    await greedy.get(other, out)
    assert server.stats.data_bytes_sent == 5 * len(body)
    server.bodies.withdraw("whole/7")
    await greedy.get(
        server.bodies.offer("whole/7", body, ""), out
    )  # another version is another payload
