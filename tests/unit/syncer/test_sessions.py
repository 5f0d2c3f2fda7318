"""A shard believes no number of a cut that cannot be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.cuts import LEAD_MAX
from decoupled_diloco.protocol.events import CutHeard, Greeted
from decoupled_diloco.syncer.sessions import Sessions
from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.memory import MemoryClient, MemoryNetwork, MemoryServer


async def greet(cut: int) -> list[Any]:
    """What a shard that knows of cut 7 is told when somebody greets with this number."""
    told: list[Any] = []
    served = asyncio.get_running_loop().create_future()
    sessions = Sessions(
        handle=told.append,
        said=lambda learner, message: None,
        spawn=lambda work: asyncio.ensure_future(work),
        cut=lambda: 7,
    )

    hello = say.Hello("a", 1, "n", "learner", 0, 0, None, ())

    async def serve(channel: Channel) -> None:
        try:
            await sessions.serve(channel, hello, cut)
        except Exception as error:
            served.set_result(error)

    network = MemoryNetwork()
    server = MemoryServer(network, on_channel=serve)
    await server.start()
    channel = await MemoryClient(network).connect(server.address, "learner", "a")
    await asyncio.sleep(0.05)
    await channel.close("goodbye")
    error = await served
    await server.stop()
    if not isinstance(error, TransportError):
        raise error
    return told


def test_a_newer_number_is_heard_before_the_greeting() -> None:
    told = asyncio.run(greet(8))
    assert told[0] == CutHeard(8)
    assert isinstance(told[1], Greeted)
    assert not any(isinstance(event, CutHeard) for event in asyncio.run(greet(7)))


def test_a_number_far_ahead_breaks_the_connection_and_changes_nothing() -> None:
    assert asyncio.run(greet(7 + LEAD_MAX))[0] == CutHeard(7 + LEAD_MAX)
    with pytest.raises(ProtocolError, match="cannot be: the newest known here is 7"):
        asyncio.run(greet(8 + LEAD_MAX))
