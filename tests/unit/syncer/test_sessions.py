"""A shard rejects checkpoint numbers that are not possible, and follows its connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.features.checkpoint import LEAD_MAX
from decoupled_diloco.protocol.messages import Accept, CheckpointHeard, Connected, Lost
from decoupled_diloco.protocol.wire import numbered
from decoupled_diloco.syncer.shard_connections import Sessions, ShardDriver
from decoupled_diloco.transport.interface import Channel
from memory_transport import MemoryClient, MemoryNetwork, MemoryServer


class Told:
    """Stands in for the driver: records the events for the machine."""

    def __init__(self, checkpoint: int) -> None:
        self.facts: list[Any] = []
        self.machine = SimpleNamespace(state=SimpleNamespace(checkpoint=checkpoint))

    def deliver(self, event: Any) -> None:
        self.facts.append(event)

    def spawn(self, work: Any) -> Any:
        return asyncio.ensure_future(work)


def sessions_of(
    driver: Told, said: Callable[[str, Any], None] = lambda learner, message: None
) -> Sessions:
    return Sessions(cast("ShardDriver", driver), said)


def let_in(sessions: Sessions, connection: int, learner: str) -> None:
    sessions._accept(Accept(connection, learner, 1, "it may"))


async def greet(checkpoint: int) -> list[Any]:
    """Return the events of a shard that knows checkpoint 7, when a greeting has this number."""
    driver = Told(7)
    served = asyncio.get_running_loop().create_future()
    sessions = sessions_of(driver)

    hello = messages.Hello("a", 1, "n", "learner", 0, 0, None, ())

    async def serve(channel: Channel) -> None:
        try:
            await sessions.serve(channel, hello, checkpoint)
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
    return driver.facts


def test_a_newer_number_is_handled_before_the_greeting() -> None:
    told = asyncio.run(greet(8))
    assert told[0] == CheckpointHeard(8)
    assert isinstance(told[1], Connected)
    assert not any(isinstance(event, CheckpointHeard) for event in asyncio.run(greet(7)))


async def test_a_newer_number_is_handled_before_its_message() -> None:
    class Talkative(Line):
        said = [numbered(messages.StepReport(1, 8, 1.0), 8)]  # noqa: RUF012

        async def receive(self) -> dict[str, object]:
            return self.said.pop() if self.said else await super().receive()

    class LetsIn(Told):
        def deliver(self, event: Any) -> None:
            super().deliver(event)
            if isinstance(event, Connected):
                let_in(sessions, event.connection, "a")

    driver = LetsIn(7)
    told = driver.facts
    sessions = sessions_of(driver, lambda learner, message: told.append(message))
    hello = messages.Hello("a", 1, "n", "learner", 0, 0, None, ())
    serving = asyncio.ensure_future(sessions.serve(cast("Channel", Talkative()), hello, 7))
    while not any(isinstance(event, messages.StepReport) for event in told):  # noqa: ASYNC110
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert [type(event) for event in told[:3]] == [Connected, CheckpointHeard, messages.StepReport]


def test_a_number_far_ahead_closes_the_connection_and_changes_nothing() -> None:
    assert asyncio.run(greet(7 + LEAD_MAX))[0] == CheckpointHeard(7 + LEAD_MAX)
    with pytest.raises(ProtocolError, match="is not valid: the newest one known here is 7"):
        asyncio.run(greet(8 + LEAD_MAX))


class Line:
    """The near end of a connection: records sent messages, receives nothing until closed."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.last_received = 0.0
        self._closed = asyncio.Event()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> dict[str, object]:
        await self._closed.wait()
        raise TransportError("it is gone")

    async def close(self, reason: str = "") -> None:
        self._closed.set()


class Syncer:
    """Sessions of a machine that has received the greetings and has not answered yet."""

    def __init__(self) -> None:
        self.driver = Told(0)
        self.tasks: list[asyncio.Task[None]] = []
        self.sessions = sessions_of(self.driver)

    async def greet(self, learner: str) -> Line:
        line = Line()
        hello = messages.Hello(learner, 1, "n", "learner", 0, 0, None, ())
        serving = self.sessions.serve(cast("Channel", line), hello, 0)
        self.tasks.append(asyncio.ensure_future(serving))
        await asyncio.sleep(0)
        return line

    async def part(self, line: Line) -> None:
        await line.close()
        await asyncio.wait(self.tasks, timeout=0.01, return_when=asyncio.FIRST_COMPLETED)

    def disconnected(self) -> list[str]:
        return [event.peer for event in self.driver.facts if isinstance(event, Lost)]

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_broadcast_is_one_text_for_all_connected_peers() -> None:
    syncer = Syncer()
    lines = [await syncer.greet(f"l{number}") for number in range(50)]
    for number in range(50):
        let_in(syncer.sessions, number + 1, f"l{number}")
    for _ in syncer.sessions.broadcast({"type": "Ending"}):
        pass
    sent = [message for line in lines for message in line.sent]
    assert len(sent) == 50
    assert len({id(message) for message in sent}) == 1, "encoded once, not once per peer"
    assert sent[0].text == '{"type":"Ending"}'
    await syncer.end()


async def test_a_peer_that_leaves_before_it_is_accepted_is_lost_once_it_is_accepted() -> None:
    syncer = Syncer()
    line = await syncer.greet("a")
    await syncer.part(line)
    assert syncer.disconnected() == []
    let_in(syncer.sessions, 1, "a")
    assert syncer.disconnected() == ["a"]
    assert syncer.sessions.sessions == {}
    await syncer.end()


async def test_a_peer_that_connected_again_is_not_lost() -> None:
    syncer = Syncer()
    line = await syncer.greet("a")
    await syncer.part(line)
    await syncer.greet("a")
    let_in(syncer.sessions, 1, "a")
    let_in(syncer.sessions, 2, "a")
    assert syncer.disconnected() == []
    assert syncer.sessions.sessions["a"].connection == 2
    await syncer.end()
