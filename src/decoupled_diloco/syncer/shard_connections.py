"""A shard's connections to learners and observers, and the messages sent to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast, get_args

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.features.checkpoint import LEAD_MAX
from decoupled_diloco.protocol.messages import CheckpointHeard
from decoupled_diloco.protocol.wire import decode, number_of, numbered
from decoupled_diloco.shell.driver import Driver, at_decision, executes
from decoupled_diloco.transport.interface import Channel, Encoded
from decoupled_diloco.transport.multiplex import SubChannel

ShardDriver = Driver[messages.SyncerEvent, messages.SyncerEffect]

GREETING_SECONDS = 10.0
"""Time limit for the first message of a new connection: as long as a connection may be silent."""

_FROM_LEARNER = get_args(messages.FromLearner)


@dataclass
class Session:
    """The current connection of a learner or observer.

    ``heard`` is the instant of the newest byte that `Sessions.received_since` has reported.
    """

    channel: Channel
    role: messages.Role
    epoch: int
    connection: int
    heard: float = 0.0


@dataclass
class Greeting:
    """A connection that the machine has received, and has neither accepted nor rejected yet."""

    channel: Channel
    learner: str
    role: messages.Role
    is_gone: bool = False


class Sessions:
    """Connections by learner name; the newest one that the machine accepted counts.

    Args:
        driver: The driver of the shard's machine.
        received: Receives the learner's name and each message on its current connection.
        evicted: Receives the learner's name and the reason of each eviction.
    """

    def __init__(
        self,
        driver: ShardDriver,
        received: Callable[[str, messages.FromLearner], None],
        evicted: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.greeting: dict[int, Greeting] = {}
        self._driver = driver
        self._received = received
        self._evicted = evicted
        self._connections = 0

    async def serve(self, channel: Channel, hello: messages.Hello, checkpoint: int) -> None:
        """Serve a connection from its first message until it closes.

        Args:
            hello: The first message.
            checkpoint: The number of the newest checkpoint at the sender of that message.

        Raises:
            ProtocolError: A message is not one of a learner's, or the name belongs to an observer.
            TransportError: The connection closed.
        """
        known = self.sessions.get(hello.learner)
        if known is not None and known.role != hello.role:
            raise ProtocolError(f"{hello.learner!r} is connected as {known.role}: use another name")
        self._connections += 1
        connection = self._connections
        self.greeting[connection] = Greeting(channel, hello.learner, hello.role)
        self._observe_checkpoint(checkpoint)
        relay = channel.relay if isinstance(channel, SubChannel) else ""
        self._driver.deliver(messages.Connected(hello.learner, hello, connection, relay))
        try:
            while True:
                data = await channel.receive()
                checkpoint = number_of(data)
                message = cast("messages.FromLearner", decode(data, _FROM_LEARNER))
                self._observe_checkpoint(checkpoint)  # break: message-before-checkpoint
                if self._is_current(hello.learner, connection):
                    self._received(hello.learner, message)
        finally:
            if connection in self.greeting:  # the machine's answer has not been executed yet
                self.greeting[connection].is_gone = True
            else:
                self._end(hello.learner, connection)

    @executes(messages.Accept, sliced=True)
    def _accept(self, order: messages.Accept) -> None:
        """Accept a connection, and close an older connection with the same name."""
        connection, learner = order.connection, order.learner
        greeting = self.greeting.pop(connection)
        older = self.sessions.get(learner)
        if older is not None:
            self._driver.spawn(
                older.channel.close("replaced by a newer connection with the same name")
            )
        self.sessions[learner] = Session(greeting.channel, greeting.role, order.epoch, connection)
        if greeting.is_gone:
            self._end(learner, connection)

    def _end(self, learner: str, connection: int) -> None:
        """End a connection; the machine is notified unless it knows a newer connection."""
        if not self._is_current(learner, connection):
            return
        del self.sessions[learner]
        if not any(greeting.learner == learner for greeting in self.greeting.values()):
            self._driver.deliver(messages.Lost(learner))

    @at_decision(messages.Reject)
    def _refusal(self, order: messages.Reject) -> dict[str, Any]:
        refusal = messages.Refusal(order.reason, order.final)
        return numbered(refusal, self._driver.machine.state.checkpoint)

    @executes(messages.Reject, sliced=True)
    def _reject(self, order: messages.Reject, refusal: dict[str, Any]) -> None:
        channel = self.greeting.pop(order.connection).channel
        channel.send(refusal)
        self._driver.spawn(channel.close(order.reason))

    def send(self, learner: str, message: dict[str, Any]) -> None:
        """Send a message to a learner, if it is connected."""
        session = self.sessions.get(learner)
        if session is not None:
            session.channel.send(message)

    def broadcast(self, message: dict[str, Any]) -> Iterator[None]:
        """Send the same text to all peers that are connected now, one peer per step."""
        text = Encoded(message)
        for session in tuple(self.sessions.values()):
            session.channel.send(text)
            yield

    @executes(messages.Evict, sliced=True)
    def _evict(self, order: messages.Evict) -> None:
        self._evicted(order.learner, order.reason)
        session = self.sessions.pop(order.learner, None)
        if session is not None:
            self._driver.spawn(session.channel.close(order.reason))

    def received_since(self, seconds: float) -> tuple[str, ...]:
        """Return the peers that sent a byte more than ``seconds`` after their last report."""
        heard = []
        for learner, session in self.sessions.items():
            if session.channel.last_received > session.heard + seconds:
                session.heard = session.channel.last_received
                heard.append(learner)
        return tuple(heard)

    def last_heard(self) -> dict[str, float]:
        """Return the instant of the last byte from each connected peer."""
        return {name: session.channel.last_received for name, session in self.sessions.items()}

    def _observe_checkpoint(self, checkpoint: int) -> None:
        """Have the machine take its part of a newer checkpoint before it handles the message.

        A message that was sent after its sender took a checkpoint must not change what this shard's
        part of that checkpoint contains.
        """
        known = self._driver.machine.state.checkpoint
        if checkpoint > known + LEAD_MAX:
            raise ProtocolError(
                f"checkpoint={checkpoint} is not valid: the newest one known here is {known}"
            )
        if checkpoint > known:
            self._driver.deliver(CheckpointHeard(checkpoint))

    def _is_current(self, learner: str, connection: int) -> bool:
        session = self.sessions.get(learner)
        # break: older-connection-accepted
        return session is not None and session.connection == connection


async def first_message(channel: Channel) -> dict[str, object]:
    """Return the first message on a new connection.

    Raises:
        ProtocolError: No message arrived in time.
    """
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            return await channel.receive()
    except TimeoutError:
        raise ProtocolError(
            f"the connection sent no first message within {GREETING_SECONDS:g} s"
        ) from None
