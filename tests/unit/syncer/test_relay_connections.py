"""Connections of relays that arrive at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

from decoupled_diloco.errors import TransportError
from decoupled_diloco.protocol.messages import RelayHello
from decoupled_diloco.syncer.relay_connections import RelayConnections, RelaySession
from decoupled_diloco.transport.limits import Limits


class Line:
    """A channel on which nothing arrives until it closes, as closing does: not at once."""

    peer = SimpleNamespace(represents=(), address="here", principal="site-a")
    last_received = -100.0

    def __init__(self) -> None:
        self._end = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._end.is_set()

    def send(self, message: Any) -> None:
        """Ignore the answer."""

    async def receive(self) -> Any:
        await self._end.wait()
        raise TransportError("closed")

    async def close(self, reason: str = "") -> None:
        self._end.set()
        await asyncio.sleep(0)


async def test_of_two_connections_that_replace_an_older_one_exactly_one_stays() -> None:
    """A relay that dials a shard while it looks for another one would wait for it forever."""
    heard: list[str] = []

    def begins(session: RelaySession) -> None:
        heard.append(f"begins {session.hello.nonce} {session.hello.shard}")

    def ends(session: RelaySession) -> None:
        heard.append(f"ends {session.hello.nonce} {session.hello.shard}")

    async def child(channel: Any) -> None:
        raise AssertionError("no child dials")

    relays = RelayConnections(
        child, Limits(), begins=begins, received=lambda name, message: None, ends=ends
    )

    async def dial(line: Line, nonce: str, shard: int) -> None:
        hello = RelayHello("site-a", nonce, shard, ())
        with contextlib.suppress(TransportError):
            await relays.serve(cast("Any", line), hello, lambda name: hello)

    lines = [Line() for _ in range(3)]
    tasks = [asyncio.create_task(dial(lines[0], "before", 2))]
    await asyncio.sleep(0)
    tasks += [
        asyncio.create_task(dial(lines[1 + n], "now", shard)) for n, shard in enumerate((2, 0))
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    begun = ["begins before 2", "ends before 2", "begins now 2", "ends now 2", "begins now 0"]
    assert heard == begun
    assert [line.closed for line in lines] == [True, True, False]
    await lines[2].close()
    await asyncio.gather(*tasks)
    assert heard == [*begun, "ends now 0"]
    assert relays.sessions == {}
