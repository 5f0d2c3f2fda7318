"""Connections of relays that arrive at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.protocol.messages import RelayAccepted, RelayHello
from decoupled_diloco.protocol.wire import encode
from decoupled_diloco.syncer.relay_connections import RelayConnections, RelaySession
from decoupled_diloco.transport.interface import Peer, Stats
from decoupled_diloco.transport.limits import Limits
from memory_transport import MemoryChannel, MemoryNetwork

PEER = Peer("site-a", "relay", "here")


def channel_of_relay() -> MemoryChannel:
    return MemoryChannel(MemoryNetwork(), PEER, Limits(), Stats())


async def child(channel: Any) -> None:
    raise AssertionError("no child dials")


async def test_of_two_connections_that_replace_an_older_one_exactly_one_stays() -> None:
    """A relay that dials a shard while it looks for another one would wait for it forever."""
    heard: list[str] = []

    def begins(session: RelaySession) -> None:
        heard.append(f"begins {session.hello.shard}")

    def ends(session: RelaySession) -> None:
        heard.append(f"ends {session.hello.shard}")

    relays = RelayConnections(
        child, Limits(), begins=begins, received=lambda name, message: None, ends=ends
    )

    async def dial(channel: MemoryChannel, shard: int) -> None:
        hello = RelayHello("site-a", "nonce", shard, ())
        with contextlib.suppress(TransportError):
            await relays.serve(channel, hello, lambda name: RelayAccepted(shard, name, ()))

    channels = [channel_of_relay() for _ in range(3)]
    older, first, second = channels
    tasks = [asyncio.create_task(dial(older, 0))]
    await asyncio.sleep(0)
    tasks += [asyncio.create_task(dial(first, 1)), asyncio.create_task(dial(second, 2))]
    for _ in range(20):
        await asyncio.sleep(0)
    begun = ["begins 0", "ends 0", "begins 1", "ends 1", "begins 2"]
    assert heard == begun
    assert [channel.closed for channel in channels] == [True, True, False]
    await second.close()
    await asyncio.gather(*tasks)
    assert heard == [*begun, "ends 2"]
    assert relays.sessions == {}


async def test_a_relay_that_means_another_shard_keeps_its_connection() -> None:
    """A relay that starts dials all addresses as shard 0, until one tells it the addresses."""
    ended: list[RelaySession] = []
    relays = RelayConnections(
        child,
        Limits(),
        begins=lambda session: None,
        received=lambda name, message: None,
        ends=ended.append,
    )

    def accepted(connection: str) -> RelayAccepted:
        return RelayAccepted(1, connection, ("shard-0:1", "shard-1:1"))

    right, wrong = channel_of_relay(), channel_of_relay()
    task = asyncio.create_task(relays.serve(right, RelayHello("site-a", "nonce", 1), accepted))
    await asyncio.sleep(0)
    with pytest.raises(ProtocolError, match="this is shard 1, not 0"):
        await relays.serve(wrong, RelayHello("site-a", "nonce", 0), accepted)
    assert await wrong.receive() == {"frames": [["own", encode(accepted(""))]]}
    assert relays.sessions["site-a"].channel is right
    assert not right.closed
    assert not ended
    await right.close()
    with pytest.raises(TransportError):
        await task
