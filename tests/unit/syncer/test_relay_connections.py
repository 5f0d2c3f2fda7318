"""Connections of relays that arrive at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from decoupled_diloco.errors import TransportError
from decoupled_diloco.protocol.messages import RelayHello
from decoupled_diloco.syncer.relay_connections import RelayConnections, RelaySession
from decoupled_diloco.transport.interface import Peer, Stats
from decoupled_diloco.transport.limits import Limits
from memory_transport import MemoryChannel, MemoryNetwork


async def test_of_two_connections_that_replace_an_older_one_exactly_one_stays() -> None:
    """A relay that dials a shard while it looks for another one would wait for it forever."""
    heard: list[str] = []

    def begins(session: RelaySession) -> None:
        heard.append(f"begins {session.hello.shard}")

    def ends(session: RelaySession) -> None:
        heard.append(f"ends {session.hello.shard}")

    async def child(channel: Any) -> None:
        raise AssertionError("no child dials")

    relays = RelayConnections(
        child, Limits(), begins=begins, received=lambda name, message: None, ends=ends
    )

    async def dial(channel: MemoryChannel, shard: int) -> None:
        hello = RelayHello("site-a", "nonce", shard, ())
        with contextlib.suppress(TransportError):
            await relays.serve(channel, hello, lambda name: hello)

    peer = Peer("site-a", "relay", "here")
    channels = [MemoryChannel(MemoryNetwork(), peer, Limits(), Stats()) for _ in range(3)]
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
