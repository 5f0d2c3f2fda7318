"""After a pause, a shard handles arrived messages before it expires leases (rule 13)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.processes import open_tape
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.wire import encode
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.transport.interface import Channel
from memory_transport import MemoryClient, MemoryNetwork, MemoryServer

LATE_SECONDS = 0.1
"""Too short for a shard to notice that it was paused."""


class Standing(Runtime):
    """The shard's clock: it stands still except when the test moves it."""

    at = 1000.0

    def now(self) -> float:
        return self.at


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the shard has no event for it
            await asyncio.sleep(0)


@asynccontextmanager
async def a_shard(folder: Path) -> AsyncIterator[tuple[Shard, Channel]]:
    """Create a shard with its coordinator, and the connection of an admitted learner."""
    network, tapes = MemoryNetwork(), list[TapeWriter]()

    def tape(process: str, header: Mapping[str, Any]) -> TapeWriter:
        tapes.append(open_tape(folder, process, header))
        return tapes[-1]

    shard = Shard(
        RunConfig(run={"name": "late", "folder": folder, "max_steps": 40}),
        0,
        addresses=("memory://127.0.0.1:7000",),
        folder=folder,
        server=lambda served: MemoryServer(network, port=7000, on_channel=served),
        client=MemoryClient(network),
        tape=tape("shard-0", {"machine": "shard", "shard": 0}),
        coordinator_tape=partial(tape, "coordinator"),
    )
    running, client = asyncio.ensure_future(shard.run()), MemoryClient(network)
    await until(lambda: bool(network.servers))
    channel = await client.connect(shard.address, "learner", "a")
    channel.send(encode(messages.Hello("a", 1, "nonce", "learner", 0, 0, None, ())))
    await until(lambda: "a" in shard.machine.state.members)
    try:
        yield shard, channel
    finally:
        shard.stop()
        await running
        await client.close()
        for each in tapes:
            each.close()


async def is_kept_after_a_pause(folder: Path, *received: messages.FromLearner) -> bool:
    """Whether a learner is still live after its lease expired and these messages arrived."""
    loop = asyncio.get_running_loop()
    with within(Standing()) as clock:
        async with a_shard(folder) as (shard, channel):
            # From here on only the messages can renew the lease.
            shard._sessions.sessions["a"].heard = float("inf")
            deadline = shard.machine.deadline()
            assert deadline is not None
            clock.at = deadline + LATE_SECONDS
            shard.driver._armed_for = None  # the loop's clock has not moved
            shard.driver._go_on()
            for message in received:
                loop.call_later(0, channel.send, encode(message))
            before = shard.machine.state.lease_check_at
            await until(lambda: shard.machine.state.lease_check_at != before)
            return "a" in shard.machine.state.members


async def test_arrived_messages_are_handled_before_the_tick(tmp_path: Path) -> None:
    """The timer fires in the same turn of the loop in which the report arrives, and before it."""
    assert await is_kept_after_a_pause(tmp_path, messages.StepReport(1, 8, 1.0))


async def test_a_silent_learner_loses_its_lease(tmp_path: Path) -> None:
    assert not await is_kept_after_a_pause(tmp_path)
