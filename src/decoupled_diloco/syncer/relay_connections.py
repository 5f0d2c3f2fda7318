"""A server's connections to relays: at a shard, and at a relay with relays behind it (rule 22)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, get_args

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.wire import decode, encode
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.transport.interface import Channel, OnChannel
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.multiplex import ServerEnd, SubChannel

_FROM_RELAY = get_args(messages.FromRelay)

TAKEN_SECONDS = 3.0
"""A connection that was silent for longer may be replaced by another process of the same name."""


@dataclass
class RelaySession:
    """The connection of one relay; ``connection`` is its unique name."""

    hello: messages.RelayHello
    channel: Channel
    end: ServerEnd
    connection: str

    @property
    def upstream(self) -> str:
        """The relay through which it passes, which takes its sums; empty: there is none."""
        return self.channel.relay if isinstance(self.channel, SubChannel) else ""


class RelayConnections:
    """The connected relays.

    Args:
        on_channel: Serves the connection of a child.
        limits: The server's limits.
        begins: Called when a relay has connected.
        received: Receives the name and each message of a relay.
        ends: Called when the connection of a relay is lost, after those of its children.
    """

    def __init__(
        self,
        on_channel: OnChannel,
        limits: Limits,
        *,
        begins: Callable[[RelaySession], None],
        received: Callable[[str, messages.FromRelay], None],
        ends: Callable[[RelaySession], None],
    ) -> None:
        self.sessions: dict[str, RelaySession] = {}
        self._on_channel = on_channel
        self._limits = limits
        self._begins = begins
        self._received = received
        self._ends = ends

    async def serve(
        self,
        channel: Channel,
        hello: messages.RelayHello,
        accepted: Callable[[str], messages.RelayAccepted],
    ) -> None:
        """Serve a relay's connection until it closes.

        Args:
            channel: The connection.
            hello: Its first message.
            accepted: Returns the answer to it, given the name of the connection.

        Raises:
            ProtocolError: A message is malformed, the name is in use, or another shard is meant.
            TransportError: The connection closed.
        """
        name = hello.relay
        answer = accepted("")
        if answer.shard != hello.shard:
            # A starting relay does not know the shards' addresses yet. The answer has them, and a
            # connection that the relay already has to this shard stays.
            _send_own(channel, answer)
            raise ProtocolError(f"this is shard {answer.shard}, not {hello.shard}")
        # Another connection may replace the older one while that closes.
        while (older := self.sessions.get(name)) is not None:
            if older.hello.nonce != hello.nonce and not _is_silent(older.channel):
                reason = f"name={name!r} is in use by a live relay: choose another --name"
                refuse_relay(channel, reason)
                raise ProtocolError(reason)
            await older.channel.close("replaced by a newer connection with the same name")
            self._end(older)
        end = ServerEnd(
            channel,
            name,
            self._on_channel,
            channel.peer.represents,
            self._limits,
            lambda message: self._received(name, cast("Any", decode(message, _FROM_RELAY))),
        )
        session = RelaySession(hello, channel, end, runtime().unique_id()[:12])
        self.sessions[name] = session
        end.send(encode(accepted(session.connection)))
        self._begins(session)
        try:
            await end.serve()
        finally:
            self._end(session)

    def _end(self, session: RelaySession) -> None:
        name = session.hello.relay
        if self.sessions.get(name) is session:
            del self.sessions[name]
            self._ends(session)

    def send(self, relay: str, message: messages.Message) -> None:
        """Send a message to a relay, if it is connected."""
        session = self.sessions.get(relay)
        if session is not None:
            with contextlib.suppress(RuntimeError):
                session.end.send(encode(message))


def _is_silent(channel: Channel) -> bool:
    return channel.closed or now() - channel.last_received > TAKEN_SECONDS


def refuse_relay(channel: Channel, reason: str) -> None:
    """Send a relay the final reason for which its connection will be closed."""
    _send_own(channel, messages.Refusal(reason, True))


def _send_own(channel: Channel, message: messages.Message) -> None:
    """Send a relay a message on a connection that has no `ServerEnd`."""
    channel.send({"frames": [["own", encode(message)]]})
