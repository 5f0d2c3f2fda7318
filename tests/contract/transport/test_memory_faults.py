"""Memory transport only: transfers and channels under seeded faults."""

from __future__ import annotations

import random

import pytest

from decoupled_diloco.errors import TransportError
from decoupled_diloco.transport.backoff import Backoff, reconnecting
from decoupled_diloco.transport.interface import Channel
from memory_transport import Faults, MemoryClient, MemoryNetwork, MemoryServer

MIB = 1 << 20


async def echo(channel: Channel) -> None:
    while True:
        channel.send(await channel.receive())


@pytest.mark.parametrize("seed", [1, 2])
async def test_payloads_survive_cuts(seed: int) -> None:
    network = MemoryNetwork()
    server = MemoryServer(network, on_channel=echo)
    await server.start()
    client = MemoryClient(network, rng=random.Random(seed))
    await client.connect(server.address, "learner", "a")
    network.faults = Faults(random.Random(seed), cut_body=0.1)
    body = memoryview(random.Random(seed).randbytes(12 * MIB))
    upload = server.bodies.expect("x", len(body), "a")
    stats = await client.put(upload.url, body)
    arrived = await upload.body
    assert arrived.buffer == body
    assert server.stats.data_bytes_received == len(body)
    out = memoryview(bytearray(len(body)))
    stats_of_get = await client.get(server.bodies.offer("y", body, ""), out)
    assert out == body
    assert stats.retries + stats_of_get.retries > 0
    arrived.release()
    await client.close()
    await server.stop()


async def run_with_cuts(seed: int) -> tuple[int, list[float]]:
    """Send 200 messages through a network with cuts; return their number and the delays."""
    network = MemoryNetwork(Faults(random.Random(seed), cut=0.05, refuse=0.3))
    server = MemoryServer(network, on_channel=echo)
    await server.start()
    client = MemoryClient(network)
    backoff = Backoff(random.Random(seed), floor=0.001, cap=0.002)
    cuts, number, delays = 0, 0, []
    while number < 200:
        channel = await reconnecting(
            client, [server.address], "learner", "a", backoff,
            on_failure=lambda error, delay: delays.append(delay),
        )  # fmt: skip
        try:
            while number < 200:
                channel.send({"number": number})
                assert await channel.receive() == {"number": number}
                number += 1
        except TransportError:
            cuts += 1
    await client.close()
    await server.stop()
    return cuts, delays


async def test_cut_channels_can_be_replaced_and_a_seed_repeats() -> None:
    cuts, delays = await run_with_cuts(1)
    assert cuts > 3
    assert delays
    assert (cuts, delays) == await run_with_cuts(1)
