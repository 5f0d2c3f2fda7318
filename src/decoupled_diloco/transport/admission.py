"""Admission of connections: unauthenticated ones are few, and each is closed after a while.

Every new connection is unauthenticated until it presents the run's secret. It may be silent, slow,
in the middle of the TLS handshake, or request only what requires no secret. Each one is closed
after a few seconds. A server keeps a bounded number of them; one more closes the oldest. Thousands
of such connections therefore cannot lock out a learner, which presents its secret at once. Without
this bound the process could run out of file descriptors, and could not even accept a learner.
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


class ConnectionAdmission:
    """Factory for the protocols of a server's connections.

    Args:
        inner: Creates the protocol of an admitted connection.
        strangers: Maximum number of unauthenticated connections.
        seconds: Maximum age of each of them, the TLS handshake included.
        goodbye_seconds: Time that an encrypted connection waits for its peer's close_notify.
        context: Returns the TLS context of the next connection; default: no encryption.
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
        self._strangers: dict[_PendingConnection, None] = {}  # the oldest first
        self._by_transport: dict[asyncio.BaseTransport, _PendingConnection] = {}

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return _PendingConnection(self)

    @property
    def opening(self) -> int:
        """Number of connections that are still in the TLS handshake."""
        return sum(each.inner is None for each in self._strangers)

    def is_authenticated(self, transport: asyncio.BaseTransport | None) -> bool:
        """Whether a connection is authenticated."""
        return transport not in self._by_transport

    def mark_authenticated(self, transport: asyncio.BaseTransport | None) -> None:
        """Mark a connection as authenticated, so that it is no longer limited."""
        if transport is not None and (pending := self._by_transport.get(transport)) is not None:
            self.release(pending)

    def close(self) -> None:
        """Close every unauthenticated connection."""
        for pending in list(self._strangers):
            pending.end()

    def register(self, pending: _PendingConnection) -> None:
        """Register a new connection; above the limit, close the oldest unauthenticated one."""
        self._strangers[pending] = None
        if len(self._strangers) <= self._strangers_max:
            return
        # Closed ones first: asyncio may report the loss of a connection with a delay.
        for other in [each for each in self._strangers if each.is_gone]:
            self.release(other)
        while len(self._strangers) > self._strangers_max:
            next(iter(self._strangers)).end()

    def release(self, pending: _PendingConnection) -> None:
        """Stop limiting a connection that is authenticated or gone."""
        if pending.timer is not None:
            pending.timer.cancel()
            pending.timer = None
        self._strangers.pop(pending, None)
        if pending.shown is not None:
            self._by_transport.pop(pending.shown, None)
        pending.shown = None

    def admit(self, pending: _PendingConnection, transport: asyncio.Transport) -> asyncio.Protocol:
        """Attach the inner protocol, which receives the connection's data from now on."""
        pending.shown, pending.inner = transport, self._inner()
        self._by_transport[transport] = pending
        transport.set_protocol(pending.inner)
        pending.inner.connection_made(transport)
        return pending.inner

    def after(self, pending: _PendingConnection) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._seconds, pending.end)

    async def encrypt(self, pending: _PendingConnection, raw: asyncio.Transport) -> None:
        """Run the TLS handshake, then admit the connection."""
        assert self._context is not None
        try:
            transport = await asyncio.get_running_loop().start_tls(
                raw,
                pending,
                self._context(),
                server_side=True,
                ssl_handshake_timeout=self._seconds,
                ssl_shutdown_timeout=self._goodbye_seconds,
            )
        except BaseException as error:
            # asyncio's frame and the error refer to each other, and to a buffer of 256 KiB. With
            # thousands of connections that is too much to leave to the next full collection.
            traceback.clear_frames(error.__traceback__)
            pending.end()
            if not isinstance(error, OSError | TimeoutError):
                raise
            logger.debug("TLS handshake failed: %s", error)
            return
        if transport is None or transport.is_closing():
            pending.end()
            return
        inner = self.admit(pending, transport)
        if pending.early:
            inner.data_received(bytes(pending.early))
            pending.early.clear()


class _PendingConnection(asyncio.Protocol):
    """A connection until it is admitted."""

    def __init__(self, admission: ConnectionAdmission) -> None:
        self.inner: asyncio.Protocol | None = None
        self.shown: asyncio.Transport | None = None  # the transport that `inner` has
        self.early = bytearray()  # data that arrived together with the end of the handshake
        self.timer: asyncio.TimerHandle | None = None
        self._admission = admission
        self._raw: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        self.timer = self._admission.after(self)
        self._admission.register(self)
        if not self._admission.encrypts:
            self._admission.admit(self, transport)
        elif not transport.is_closing():
            self._opening = asyncio.ensure_future(self._admission.encrypt(self, transport))

    def data_received(self, data: bytes) -> None:
        self.early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.release(self)

    @property
    def is_gone(self) -> bool:
        return self._raw is None or self._raw.is_closing()

    def end(self) -> None:
        """Close the connection at once, if it is still open."""
        self._admission.release(self)
        if self._raw is not None:
            self._raw.abort()
        if self._opening is not None and self._opening is not _current():
            self._opening.cancel()


def _current() -> asyncio.Task[object] | None:
    with contextlib.suppress(RuntimeError):
        return asyncio.current_task()
    return None
