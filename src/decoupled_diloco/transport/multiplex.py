"""Many control connections over one: those of a relay's children to one server (rule 22).

A frame is a list whose first item is its kind. Each message on the carrying channel is one JSON
object ``{"frames": [frame, …]}`` with all frames of the last `FLUSH_SECONDS`:

    relay → server   ["open", number, principal, role]    a child has connected
                     ["heard", [number, …]]               bytes arrived from these children
    server → relay   ["refuse", number, reason]           the relay may not represent this child
    both ways        ["message", [number, …], object]     of, or for, these children
                     ["close", number, reason]
                     ["own", object]                      between relay and server

The server's end of a child's connection is a `SubChannel`. Its handler cannot tell it from a direct
connection. A message for many children is sent once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from decoupled_diloco.errors import DilocoError, ProtocolError, TransportError
from decoupled_diloco.runtime import now
from decoupled_diloco.transport.channel import NOTHING_MORE, Mailbox, decode, encode, handle
from decoupled_diloco.transport.interface import Channel, Encoded, OnChannel, Peer
from decoupled_diloco.transport.limits import Limits

FLUSH_SECONDS = 0.002
"""Frames of this time share one message: far below the round trip of a link worth a relay."""

FRAMES_BYTES = 1 << 18
"""Size from which frames are sent at once: far below the limit of a message."""

CHILDREN_MAX = 4096
"""Connections that one channel may carry."""

Own = Callable[[dict[str, Any]], None]


class _Frames:
    """Frames that wait to be sent together on a channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._frames: list[str] = []
        self._nbytes = 0
        self._last: tuple[object, list[int]] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, *frame: Any) -> None:
        """Send a frame after all earlier ones."""
        self._end_last()
        self._append(json.dumps(frame, separators=(",", ":")))

    def add_message(self, number: int, message: dict[str, object] | Encoded) -> None:
        """Send a message of, or for, a child. The same text for several children is sent once."""
        if self._last is not None and self._last[0] is message:
            self._last[1].append(number)
            return
        self._end_last()
        self._last = message, [number]
        self._arm()

    def _end_last(self) -> None:
        if self._last is None:
            return
        message, numbers = self._last
        self._last = None
        text = (message if isinstance(message, Encoded) else Encoded(message)).text  # type: ignore[arg-type]
        self._append(f'["message",{json.dumps(numbers)},{text}]')

    def _append(self, frame: str) -> None:
        if self._nbytes + len(frame) > FRAMES_BYTES:
            self.flush()
        self._frames.append(frame)
        self._nbytes += len(frame)
        self._arm()

    def _arm(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(FLUSH_SECONDS, self._flush_all)

    def _flush_all(self) -> None:
        self._timer = None
        self._end_last()
        self.flush()

    def flush(self) -> None:
        """Send the complete frames now."""
        if self._frames:
            text = f'{{"frames":[{",".join(self._frames)}]}}'
            self._frames, self._nbytes = [], 0
            self._channel.send(Encoded.of(text))


class SubChannel:
    """The server's end of a child's connection; see `Channel`.

    Attributes:
        relay: The name of the relay that carries it.
    """

    def __init__(
        self, carrier: Channel, frames: _Frames, number: int, peer: Peer, relay: str, limits: Limits
    ) -> None:
        self.peer = peer
        self.relay = relay
        self.reason = ""
        self.closed = False
        self.last_received = now()
        self._carrier = carrier
        self._frames = frames
        self._number = number
        self._limits = limits
        self._inbox = Mailbox(limits.inbox_messages, limits.inbox_bytes)

    @property
    def rtt(self) -> float | None:
        """See `Channel`: the round trip to the relay."""
        return self._carrier.rtt

    def send(self, message: dict[str, object] | Encoded) -> None:
        """See `Channel`."""
        if not self.closed:
            encoded = message if isinstance(message, Encoded) else Encoded(message)
            encode(encoded, self._limits)
            self._frames.add_message(self._number, encoded)

    async def receive(self) -> dict[str, object]:
        """See `Channel`."""
        while not self._inbox:
            if self.closed:
                raise TransportError(f"channel closed: {self.reason}")
            await self._inbox.wait()
        return decode(self._inbox.pop())

    def arrived(self, text: str) -> None:
        """Put a message into the inbox."""
        self.last_received = now()
        if self._inbox.full:
            self.shut(f"{self.peer.principal!r} sends faster than it is served")
        elif not self.closed:
            self._inbox.put(text)

    def shut(self, reason: str) -> None:
        """See `Channel`."""
        if not self.closed:
            self._frames.add("close", self._number, reason)
            self.ended(reason)

    def ended(self, reason: str) -> None:
        """Handle the end of the connection at the other side."""
        if not self.closed:
            self.closed, self.reason = True, reason
            self._inbox.changed.set()

    async def close(self, reason: str = "") -> None:
        """See `Channel`."""
        self.shut(reason or "closed by this side")


class ServerEnd:
    """The server's end of a channel that carries a relay's children.

    Args:
        channel: The carrying channel.
        relay: The relay's name.
        on_channel: Serves a child's connection.
        may_carry: Returns why the relay may not represent a principal, or an empty text.
        limits: The server's limits.
        own: Receives the relay's own messages.
    """

    def __init__(
        self,
        channel: Channel,
        relay: str,
        on_channel: OnChannel,
        may_carry: Callable[[str], str],
        limits: Limits,
        own: Own,
    ) -> None:
        self._channel = channel
        self._relay = relay
        self._on_channel = on_channel
        self._may_carry = may_carry
        self._limits = limits
        self._own = own
        self._frames = _Frames(channel)
        self._children: dict[int, SubChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: dict[str, object]) -> None:
        """Send the relay a message."""
        self._frames.add("own", message)

    async def serve(self) -> None:
        """Serve until the channel closes, and the children's handlers have ended.

        Raises:
            ProtocolError: A frame is malformed.
            TransportError: The channel closed.
        """
        try:
            while True:
                for frame in _frames_of(await self._channel.receive()):
                    with _checked(frame):
                        self._handle(frame)
        finally:
            for child in list(self._children.values()):
                child.ended(f"the connection of relay {self._relay} broke")
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _handle(self, frame: list[Any]) -> None:
        match frame:
            case ["open", int(number), str(principal), str(role)]:
                peer = Peer(principal, role, self._channel.peer.address, self._may_carry)
                self._open(number, peer)
            case ["message", [*numbers], dict(message)]:
                text = json.dumps(message, separators=(",", ":"))
                for number in numbers:
                    if number in self._children:
                        self._children[number].arrived(text)
            case ["close", int(number), str(reason)]:
                if number in self._children:
                    self._children[number].ended(reason)
            case ["heard", [*numbers]]:
                for number in numbers:
                    if number in self._children:
                        self._children[number].last_received = now()
            case ["own", dict(message)]:
                self._own(message)
            case _:
                raise ValueError

    def _open(self, number: int, peer: Peer) -> None:
        if number in self._children or len(self._children) >= CHILDREN_MAX:
            raise ProtocolError(f"relay {self._relay} opens connection {number} in vain")
        problem = self._may_carry(peer.principal)
        if problem:
            self._frames.add("refuse", number, problem)
            return
        child = SubChannel(self._channel, self._frames, number, peer, self._relay, self._limits)
        self._children[number] = child
        task = asyncio.get_running_loop().create_task(self._serve(number, child))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, number: int, child: SubChannel) -> None:
        try:
            await handle(self._on_channel, child)
        finally:
            self._children.pop(number, None)
            child.shut(NOTHING_MORE)


class RelayEnd:
    """The relay's end: it carries its children's channels over one to a server.

    Args:
        channel: The channel to the server.
        own: Receives the server's own messages.
        passes: Called with each message for children, which it may change.

    Attributes:
        refused: Why the relay may not represent a child, by the child's name.
    """

    def __init__(
        self, channel: Channel, own: Own, passes: Callable[[dict[str, Any]], None]
    ) -> None:
        self.channel = channel
        self.refused: dict[str, str] = {}
        self._own = own
        self._passes = passes
        self._frames = _Frames(channel)
        self._children: dict[int, Channel] = {}
        self._got: dict[int, Own] = {}
        self._heard: dict[int, float] = {}
        self._opened = 0

    def send(self, message: dict[str, object]) -> None:
        """Send the server a message."""
        self._frames.add("own", message)

    async def carry(self, child: Channel, first: dict[str, Any], sent: Own, got: Own) -> None:
        """Carry a child's connection until it closes.

        Args:
            child: Its channel.
            first: Its first message.
            sent: Called with each message of the child, before it is passed on.
            got: Called with each message for the child, before it is passed on; may change it.

        Raises:
            TransportError: The child's channel closed.
        """
        self._opened += 1
        number, message = self._opened, first
        self._children[number] = child
        self._got[number] = got
        self._frames.add("open", number, child.peer.principal, child.peer.role)
        try:
            while True:
                sent(message)
                self._frames.add_message(number, message)
                message = await child.receive()
        finally:
            del self._got[number]
            if self._children.pop(number, None) is not None and not self.channel.closed:
                self._frames.add("close", number, child.reason)

    async def serve(self) -> None:
        """Pass the server's messages on until the channel closes; then close the children.

        Raises:
            ProtocolError: A frame is malformed.
            TransportError: The channel closed.
        """
        try:
            while True:
                for frame in _frames_of(await self.channel.receive()):
                    with _checked(frame):
                        self._handle(frame)
        finally:
            reason = f"the relay has lost its connection: {self.channel.reason}"
            children, self._children = self._children, {}
            for child in children.values():
                child.shut(reason)

    def _handle(self, frame: list[Any]) -> None:
        match frame:
            case ["message", [*numbers], dict(message)]:
                self._passes(message)
                here = [number for number in numbers if number in self._children]
                for number in here:
                    self._got[number](message)
                text = Encoded(message)
                for number in here:
                    self._children[number].send(text)
            case ["close" | "refuse" as kind, int(number), str(reason)]:
                child = self._children.pop(number, None)
                if child is not None and kind == "refuse":
                    self.refused[child.peer.principal] = reason
                if child is not None:
                    child.shut(reason)
            case ["own", dict(message)]:
                self._own(message)
            case _:
                raise ValueError

    def report_heard(self) -> None:
        """Report the children from which bytes arrived since the last call."""
        heard = []
        for number, child in self._children.items():
            if child.last_received > self._heard.get(number, 0.0):
                self._heard[number] = child.last_received
                heard.append(number)
        self._heard = {n: at for n, at in self._heard.items() if n in self._children}
        if heard:
            self._frames.add("heard", heard)


def _frames_of(message: dict[str, Any]) -> list[Any]:
    frames = message.get("frames")
    if not isinstance(frames, list):
        raise ProtocolError("a message of a relay's connection has no list of frames")
    return frames


@contextmanager
def _checked(frame: Any) -> Iterator[None]:
    """Turn what a malformed frame raises into a `ProtocolError`."""
    try:
        if not isinstance(frame, list):
            raise ValueError
        yield
    except DilocoError:  # of a handler; some are ValueErrors
        raise
    except (ValueError, TypeError):
        raise ProtocolError(
            f"a frame of a relay's connection is malformed: {frame!r:.100}"
        ) from None
