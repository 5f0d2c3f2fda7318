"""Who may keep a connection of a server: those that have shown the run's secret, and few others.

A stranger is a connection that has shown nothing yet: whoever dials is one at first. It may be
silent, slow, in the middle of the agreement on encryption, or ask what needs no secret. Each has
some seconds, after which it is closed, and of all together a server keeps a bounded number: one
more closes the oldest, so that thousands of strangers keep no learner out, which shows its secret
at once. A process that has no descriptors left could not even take a learner in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import traceback
from collections.abc import Callable

logger = logging.getLogger(__name__)

Inner = Callable[[], asyncio.Protocol]


class Door:
    """Makes the protocols of a server's connections.

    Args:
        inner: Makes the protocol of a connection that is let in.
        strangers: How many connections that have shown nothing are kept.
        seconds: How long each of them is kept, the agreement on encryption included.
        goodbye_seconds: How long an encrypted connection waits for its peer's goodbye.
        context: Gives what encrypts the next one; default: nothing does.
    """

    def __init__(
        self,
        inner: Inner,
        *,
        strangers: int,
        seconds: float,
        goodbye_seconds: float,
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._inner = inner
        self._strangers_max = strangers
        self._seconds = seconds
        self._goodbye_seconds = goodbye_seconds
        self._context = context
        self.encrypts = context is not None
        self._strangers: dict[_Entrance, None] = {}  # the oldest first
        self._entrances: dict[asyncio.BaseTransport, _Entrance] = {}

    def __call__(self) -> asyncio.Protocol:
        """The protocol of a connection that was just made."""
        return _Entrance(self)

    @property
    def opening(self) -> int:
        """Connections that are not let in yet, since encryption is not agreed on."""
        return sum(each.inner is None for each in self._strangers)

    def knows(self, transport: asyncio.BaseTransport | None) -> bool:
        """Whether a connection has shown that it may stay."""
        return transport not in self._entrances

    def welcome(self, transport: asyncio.BaseTransport | None) -> None:
        """A connection has shown the secret: it may stay."""
        if transport is not None and (entrance := self._entrances.get(transport)) is not None:
            self.forget(entrance)

    def close(self) -> None:
        """Ends every connection that has shown nothing."""
        for entrance in list(self._strangers):
            entrance.end()

    def enter(self, entrance: _Entrance) -> None:
        """A connection comes in; too many strangers cost the oldest of them its own."""
        self._strangers[entrance] = None
        if len(self._strangers) <= self._strangers_max:
            return
        for other in [each for each in self._strangers if each.is_gone]:
            self.forget(other)
        while len(self._strangers) > self._strangers_max:
            next(iter(self._strangers)).end()

    def forget(self, entrance: _Entrance) -> None:
        """It is no stranger any more, or gone."""
        if entrance.timer is not None:
            entrance.timer.cancel()
            entrance.timer = None
        self._strangers.pop(entrance, None)
        if entrance.shown is not None:
            self._entrances.pop(entrance.shown, None)
        entrance.shown = None

    def let_in(self, entrance: _Entrance, transport: asyncio.Transport) -> asyncio.Protocol:
        """What is said on a connection is heard from now on."""
        entrance.shown, entrance.inner = transport, self._inner()
        self._entrances[transport] = entrance
        transport.set_protocol(entrance.inner)
        entrance.inner.connection_made(transport)
        return entrance.inner

    def after(self, entrance: _Entrance) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds, entrance.end)

    async def encrypt(self, entrance: _Entrance, raw: asyncio.Transport) -> None:
        """Agrees on encryption, then lets a connection in."""
        assert self._context is not None
        try:
            transport = await asyncio.get_running_loop().start_tls(
                raw,
                entrance,
                self._context(),
                server_side=True,
                ssl_handshake_timeout=self._seconds,
                ssl_shutdown_timeout=self._goodbye_seconds,
            )
        except BaseException as error:
            # asyncio's frame there and the error know each other, and its buffer of 256 KiB: with
            # thousands of strangers that is too much to leave to the next full collection.
            traceback.clear_frames(error.__traceback__)
            entrance.end()
            if not isinstance(error, OSError | TimeoutError):
                raise
            logger.debug("no agreement on encryption: %s", error)
            return
        if transport is None or transport.is_closing():
            entrance.end()
            return
        inner = self.let_in(entrance, transport)
        if entrance.early:
            inner.data_received(bytes(entrance.early))
            entrance.early.clear()


class _Entrance(asyncio.Protocol):
    """A connection until it is let in."""

    def __init__(self, door: Door) -> None:
        self.inner: asyncio.Protocol | None = None
        self.shown: asyncio.Transport | None = None  # the transport that `inner` has
        self.early = bytearray()  # what was said with the last word of the agreement
        self.timer: asyncio.TimerHandle | None = None
        self._door = door
        self._raw: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        self.timer = self._door.after(self)
        self._door.enter(self)
        if not self._door.encrypts:
            self._door.let_in(self, transport)
        elif not transport.is_closing():
            self._opening = asyncio.ensure_future(self._door.encrypt(self, transport))

    def data_received(self, data: bytes) -> None:
        self.early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.forget(self)

    @property
    def is_gone(self) -> bool:
        return self._raw is None or self._raw.is_closing()

    def end(self) -> None:
        """Closes it at once, if it is still there."""
        self._door.forget(self)
        if self._raw is not None:
            self._raw.abort()
        if self._opening is not None and self._opening is not _current():
            self._opening.cancel()


def _current() -> asyncio.Task[object] | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.current_task()
    return None
