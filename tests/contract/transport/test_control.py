"""Control plane: order, reasons, access, loss. Every test runs over all transports."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from typing import Any

import pytest

from decoupled_diloco.errors import AccessError, ConfigError, ProtocolError, TransportError
from decoupled_diloco.transport.backoff import Backoff, reconnecting
from decoupled_diloco.transport.interface import Channel
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tokens import Tokens


async def reason_of(channel: Any) -> str:
    """Read until the channel closes and return why."""
    async with asyncio.timeout(5):
        while True:
            try:
                await channel.receive()
            except TransportError as error:
                return str(error)


async def test_messages_arrive_in_order_both_ways(world: Any) -> None:
    _, _, mine, theirs = await world.pair()
    for number in range(500):
        mine.send({"number": number})
        theirs.send({"number": -number})
    assert [(await theirs.receive())["number"] for _ in range(500)] == list(range(500))
    assert [(await mine.receive())["number"] for _ in range(500)] == [-n for n in range(500)]


async def test_each_end_knows_its_peer(world: Any) -> None:
    server, _, mine, theirs = await world.pair("learner-7")
    assert (theirs.peer.principal, theirs.peer.role) == ("learner-7", "learner")
    assert mine.peer.address == server.address


async def test_text_and_numbers_survive(world: Any) -> None:
    _, _, mine, theirs = await world.pair()
    message = {"Θ": "é\u0000\n", "n": [1, -2.5, None, True], "nested": {"a": {}}}
    mine.send(message)
    assert await theirs.receive() == message


async def test_close_sends_its_reason_after_earlier_messages(world: Any) -> None:
    _, _, mine, theirs = await world.pair()
    mine.send({"last": True})
    await mine.close("the run is over")
    assert mine.closed
    assert await theirs.receive() == {"last": True}
    assert "the run is over" in await reason_of(theirs)
    assert theirs.closed
    theirs.send({"dropped": True})  # On a closed channel: no error, no effect.


async def test_server_side_close_reaches_the_client(world: Any) -> None:
    _, _, mine, theirs = await world.pair()
    await theirs.close("evicted: silent for 30 s")
    assert "evicted: silent for 30 s" in await reason_of(mine)


async def test_a_handler_that_returns_or_fails_closes_the_channel(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(channel: Channel) -> None:
        await channel.receive()
        raise RuntimeError("a bug")

    server = await world.server(on_channel=fail)
    channel = await world.client().connect(server.address, "learner", "learner-0")
    channel.send({})
    assert "the server failed on this channel" in await reason_of(channel)
    assert "a bug" in caplog.text


async def test_connecting_to_a_stopped_server(world: Any) -> None:
    server = await world.server()
    await server.stop()
    with pytest.raises(TransportError, match="cannot reach"):
        await world.client().connect(server.address, "learner", "learner-0")


@pytest.mark.parametrize("token", [None, "wrong", "é"])
async def test_wrong_token(world: Any, token: str | None) -> None:
    server = await world.server(tokens=Tokens("secret"))
    with pytest.raises(AccessError, match="token"):
        await world.client(token=token).connect(server.address, "learner", "learner-0")


async def test_run_token_admits_any_principal(world: Any) -> None:
    server = await world.server(tokens=Tokens("secret"))
    for principal in ("learner-0", "learner-1"):
        await world.client(token="secret").connect(server.address, "learner", principal)


async def test_token_is_bound_to_its_principal(world: Any) -> None:
    server = await world.server(tokens=Tokens(principals={"learner-0": "a", "learner-1": "b"}))
    await world.client(token="a").connect(server.address, "learner", "learner-0")
    with pytest.raises(AccessError, match="belongs to 'learner-0', not to 'learner-1'"):
        await world.client(token="a").connect(server.address, "learner", "learner-1")


async def test_bad_names_are_refused(world: Any) -> None:
    server = await world.server()
    with pytest.raises(ProtocolError, match="is not a valid name"):
        await world.client().connect(server.address, "learner", "../etc")
    with pytest.raises(ProtocolError, match="role 'king' is unknown"):
        await world.client().connect(server.address, "king", "learner-0")


async def test_open_server_beyond_loopback_is_a_config_error(world: Any) -> None:
    with pytest.raises(ConfigError, match=r"set an auth token, or bind to 127\.0\.0\.1"):
        await world.server(host="0.0.0.0")


async def test_address_in_use(world: Any) -> None:
    server = await world.server()
    with pytest.raises(TransportError, match="cannot listen on"):
        await world.server(port=int(server.address.rsplit(":", 1)[1]))


async def test_an_oversized_message_is_rejected_by_its_sender(world: Any) -> None:
    _, _, mine, theirs = await world.pair()
    with pytest.raises(ProtocolError, match="exceeds 1048576"):
        mine.send({"text": "x" * (2 << 20)})
    mine.send({"fine": True})
    assert await theirs.receive() == {"fine": True}


@pytest.mark.parametrize("role", ["learner", "relay"])
async def test_oversized_message_of_a_peer_closes_the_channel(role: str, world: Any) -> None:
    """Also one that a relay has compressed to a small one."""
    server = await world.server()
    client = world.client(limits=Limits(message_bytes=8 << 20))
    mine = await client.connect(server.address, role, "learner-0")
    theirs = await world.accepted.get()
    mine.send({"text": "x" * (2 << 20)})
    assert "protocol violation" in await reason_of(theirs)
    await reason_of(mine)


async def test_outbox_overflow_closes_the_channel_of_a_slow_peer(world: Any) -> None:
    _, _, mine, theirs = await world.pair()
    sent = 0
    while not mine.closed:
        mine.send({"text": "x" * 500_000})
        sent += 1
        assert sent < 1000
    assert "slow peer" in await reason_of(mine)
    assert "slow peer" in await reason_of(theirs)


async def test_a_silent_peer_that_answers_pings_is_not_lost(world: Any) -> None:
    _, _, mine, theirs = await world.pair()
    before = theirs.last_received
    await asyncio.sleep(0.9)  # Longer than QUICK.lost_seconds: pings keep both alive.
    assert not mine.closed
    assert not theirs.closed
    assert theirs.last_received > before + 0.7
    assert time.monotonic() - theirs.last_received < 0.5
    assert mine.rtt is not None
    assert mine.rtt < 0.5


async def test_reconnecting_waits_for_the_server(world: Any) -> None:
    server = await world.server()
    port = int(server.address.rsplit(":", 1)[1])
    await server.stop()
    delays: list[float] = []
    waiting = asyncio.create_task(
        reconnecting(
            world.client(),
            [server.address],
            "learner",
            "learner-0",
            Backoff(random.Random(3), floor=0.01, cap=0.05),
            on_failure=lambda error, delay: delays.append(delay),
        )
    )
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await world.server(port=port)
    channel = await asyncio.wait_for(waiting, 5)
    assert not channel.closed
    assert delays
    assert all(0.01 <= delay <= 0.05 for delay in delays)


async def test_reconnecting_stops_at_a_rejection(world: Any) -> None:
    server = await world.server(tokens=Tokens("secret"))
    with pytest.raises(AccessError):
        await reconnecting(world.client(token="wrong"), [server.address], "learner", "learner-0")


async def test_stop_closes_channels(world: Any) -> None:
    server, _, mine, _ = await world.pair()
    await server.stop()
    assert "the server stops" in await reason_of(mine)
    await server.stop()  # Twice is fine.


async def test_stats_count_both_ways(world: Any) -> None:
    server, client, mine, theirs = await world.pair()
    mine.send({"a": 1})
    await theirs.receive()
    assert client.stats.control_bytes_sent == server.stats.control_bytes_received == 7


async def test_full_inbox_pauses_reading_and_loses_nothing(world: Any) -> None:
    limits = dataclasses.replace(Limits(), inbox_messages=4, outbox_messages=200)
    _, _, mine, theirs = await world.pair(limits=limits)
    for number in range(100):
        mine.send({"number": number})
    await asyncio.sleep(0.1)
    assert [(await theirs.receive())["number"] for _ in range(100)] == list(range(100))
