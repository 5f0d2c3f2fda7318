"""A shard's connections to learners and observers: which are there, and what they are sent."""

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

ShardDriver = Driver[messages.SyncerEvent, messages.SyncerEffect]

GREETING_SECONDS = 10.0
"""How long a new connection may take to say what it is for: as long as one may be silent."""

_FROM_LEARNER = get_args(messages.FromLearner)


@dataclass
class Session:
    """The current connection of a learner or observer."""

    channel: Channel
    role: messages.Role
    epoch: int
    connection: int
    heard: float = 0.0


@dataclass
class Greeting:
    """A connection that the machine has been told of, and has not been let in or turned away."""

    channel: Channel
    learner: str
    role: messages.Role
    is_gone: bool = False


class Sessions:
    """Connections by learner name; the newest one that the machine accepted counts.

    Args:
        driver: Of the shard's machine.
        said: Takes what a learner says on its current connection.
    """

    def __init__(
        self, driver: ShardDriver, said: Callable[[str, messages.FromLearner], None]
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.greeting: dict[int, Greeting] = {}
        self._driver = driver
        self._said = said
        self._connections = 0

    async def serve(self, channel: Channel, hello: messages.Hello, checkpoint: int) -> None:
        """Follows a connection from its greeting, which was of this checkpoint, until it is gone.

        Raises:
            ProtocolError: What comes is no message of a learner, or the name is an observer's.
            TransportError: It is gone.
        """
        known = self.sessions.get(hello.learner)
        if known is not None and known.role != hello.role:
            raise ProtocolError(f"{hello.learner!r} is here as {known.role}: use another name")
        self._connections += 1
        connection = self._connections
        self.greeting[connection] = Greeting(channel, hello.learner, hello.role)
        self._hear(checkpoint)
        self._driver.tell(messages.Connected(hello.learner, hello, connection))
        try:
            while True:
                data = await channel.receive()
                checkpoint = number_of(data)
                message = cast("messages.FromLearner", decode(data, _FROM_LEARNER))
                self._hear(checkpoint)  # break: message-before-checkpoint
                if self._is_current(hello.learner, connection):
                    self._said(hello.learner, message)
        finally:
            if connection in self.greeting:  # what the machine has said to it is not done yet
                self.greeting[connection].is_gone = True
            else:
                self._end(hello.learner, connection)

    @executes(messages.Accept, sliced=True)
    def _accept(self, order: messages.Accept) -> None:
        """Lets a greeting in; an older connection of the same id is closed."""
        connection, learner = order.connection, order.learner
        greeting = self.greeting.pop(connection)
        older = self.sessions.get(learner)
        if older is not None:
            self._driver.spawn(older.channel.close("a newer connection of the same id took over"))
        self.sessions[learner] = Session(greeting.channel, greeting.role, order.epoch, connection)
        if greeting.is_gone:
            self._end(learner, connection)

    def _end(self, learner: str, connection: int) -> None:
        """A connection is gone; the machine hears so unless it knows of a newer one."""
        if not self._is_current(learner, connection):
            return
        del self.sessions[learner]
        if not any(greeting.learner == learner for greeting in self.greeting.values()):
            self._driver.tell(messages.Lost(learner))

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
        """Tells a learner something, if it is there."""
        session = self.sessions.get(learner)
        if session is not None:
            session.channel.send(message)

    def broadcast(self, message: dict[str, Any]) -> Iterator[None]:
        """Tells everybody who is there now something: one at each step, the same text each."""
        text = Encoded(message)
        for session in tuple(self.sessions.values()):
            session.channel.send(text)
            yield

    @executes(messages.Evict, sliced=True)
    def _evict(self, order: messages.Evict) -> None:
        session = self.sessions.pop(order.learner, None)
        if session is not None:
            self._driver.spawn(session.channel.close(order.reason))

    def heard_since(self, seconds: float) -> tuple[str, ...]:
        """Of whom any byte was received more than ``seconds`` after they were last named here."""
        heard = []
        for learner, session in self.sessions.items():
            if session.channel.last_received > session.heard + seconds:
                session.heard = session.channel.last_received
                heard.append(learner)
        return tuple(heard)

    def last_heard(self) -> dict[str, float]:
        """When the last byte of each who is connected was received."""
        return {who: session.channel.last_received for who, session in self.sessions.items()}

    def _hear(self, checkpoint: int) -> None:
        """A shard takes its part of a checkpoint before a message of it does anything here."""
        known = self._driver.machine.state.checkpoint
        if checkpoint > known + LEAD_MAX:
            raise ProtocolError(
                f"checkpoint {checkpoint} cannot be: the newest known here is {known}"
            )
        if checkpoint > known:
            self._driver.tell(CheckpointHeard(checkpoint))

    def _is_current(self, learner: str, connection: int) -> bool:
        session = self.sessions.get(learner)
        # break: older-connection-accepted
        return session is not None and session.connection == connection


async def first_message(channel: Channel) -> dict[str, object]:
    """What a new connection says first.

    Raises:
        ProtocolError: It takes too long.
    """
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            return await channel.receive()
    except TimeoutError:
        raise ProtocolError(
            f"it has not said within {GREETING_SECONDS:g} s what it is here for"
        ) from None
