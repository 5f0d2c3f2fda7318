"""Server-side state of the data plane: offered, expected and received payloads.

Both transports use it; it has no sockets. A PUT passes through these states:

    expected ──first bytes──▶ queued ──buffer from the pool──▶ receiving ──every byte──▶ arrived
       └────────────┴──────────────── cancel, silence ──────────────┴──▶ ended (410, with a reason)

A payload may arrive as several concurrent ranges, each a `Stream`. A range whose connection broke
keeps its bytes. A client that resumes it requests the gaps with `state`, and takes the range over.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

from decoupled_diloco.errors import ProtocolError, TransportError
from decoupled_diloco.runtime import now
from decoupled_diloco.transport.byte_ranges import Range, RangeSet
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.pool import PoolBody, ReceivePool
from decoupled_diloco.transport.tokens import RequestRefusal

PREFIX = "/bodies/"
ENDED_KEPT = 1 << 16
"""Number of ended uploads and withdrawn offers that are remembered, to report why they are gone."""
SERVER_PATIENCE = 3
"""A server waits this many times longer than a client for the next byte, so that the client
tries to resume before the server drops the upload."""


@dataclass(frozen=True)
class Offer:
    """A payload that can be fetched; ``taken`` counts fetched bytes by principal."""

    body: memoryview
    digest: str
    since: float = 0.0
    taken: dict[str, int] = field(default_factory=dict)


class PayloadSource(Protocol):
    """Obtains payloads that a server does not offer or expect itself, as a relay does."""

    async def offer(self, key: str) -> None:
        """Offer the payload with this key, if it can be obtained."""

    def expect(self, key: str, principal: str, total: int) -> None:
        """Expect the payload with this key, if it can be passed on; see `BodyBooks.passing`."""


class BodyBooks:
    """The payloads that a server offers and expects, for use by its connections.

    Attributes:
        source: Obtains what is not offered or expected here.
        passing: Payloads that the source passes on once they have arrived. The last request of such
            a payload is answered when its task has ended.
    """

    def __init__(self, pool: ReceivePool, limits: Limits, clock: Callable[[], float] = now) -> None:
        self.pool = pool
        self.limits = limits
        self.source: PayloadSource | None = None
        self.passing: dict[str, asyncio.Task[None]] = {}
        self._clock = clock
        self._downloads: dict[str, list[str]] = {}
        self._offers: dict[str, Offer] = {}
        self._uploads: dict[str, BodyUpload] = {}
        self._gone: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._streams: dict[str, int] = {}

    def offer(self, path: str, body: memoryview, digest: str) -> str:
        """Make a payload available to GET and return its relative URL; replaces the same path.

        Nothing is copied, and transfers in flight finish from the buffer with which they began.
        The memory must therefore never be written to again; offer a fresh buffer instead.
        """
        self._offers[_key(path)] = Offer(body.cast("B"), digest, self._clock())
        return PREFIX + _key(path)

    def withdraw(self, path: str) -> None:
        """Stop offering a payload; later GETs are answered with 410."""
        if self._offers.pop(_key(path), None) is not None:
            self._remember("GET", _key(path), "was withdrawn")

    def expect(
        self, path: str, nbytes: int, principal: str, nbytes_min: int | None = None
    ) -> BodyUpload:
        """Accept one PUT of exactly `nbytes` from `principal`; memory is allocated when it begins.

        A path is used once. With `nbytes_min` the payload may be shorter, down to that size; its
        first request fixes the size.
        """
        assert nbytes > 0
        key = _key(path)
        assert key not in self._uploads, f"an upload to {path!r} is expected already"
        self._gone.pop(("PUT", key), None)
        upload = BodyUpload(self, key, nbytes, principal, nbytes_min)
        self._uploads[key] = upload
        return upload

    async def obtain(self, key: str) -> None:
        """Ask the source for a payload that is not offered."""
        if key not in self._offers and self.source is not None:
            await self.source.offer(key)

    async def passed_on(self, key: str) -> None:
        """Wait until a payload that has arrived is passed on, if it is to be.

        Raises:
            RequestRefusal: It could not be passed on. The sender may try again.
        """
        task = self.passing.get(key)
        if task is None or key in self._uploads:
            return
        try:
            await asyncio.shield(task)
        except (TransportError, ProtocolError) as error:
            self._gone.pop(("PUT", key), None)
            status = 503 if isinstance(error, TransportError) else 404
            raise RequestRefusal(status, f"{PREFIX}{key} could not be passed on: {error}") from None
        finally:
            self.passing.pop(key, None)

    def look_up(self, key: str) -> Offer:
        """Return the offer at a path.

        Raises:
            RequestRefusal: 404 if it never existed, 410 if it was withdrawn.
        """
        offer = self._offers.get(key)
        if offer is None:
            raise self._missing("GET", key, "is not offered here")
        return offer

    def fetch(self, key: str, principal: str, part: Range) -> Download:
        """Begin to send a range of an offer.

        A normal peer fetches a payload once, and parts of it again after a broken connection. Bytes
        that a request reserved but did not send are returned at its end.

        Raises:
            RequestRefusal: As for `look_up`; 429 if the principal has used its share.
        """
        offer, nbytes = self.look_up(key), part[1] - part[0]
        under_way = self._downloads.get(principal, [])
        bodies = len({*under_way, key}) - 1
        if bodies >= self.limits.downloads_per_principal or (
            len(under_way) >= self.limits.streams_per_principal
        ):
            raise RequestRefusal(
                429,
                f"{principal!r} fetches {bodies} payloads in {len(under_way)} requests at once, "
                "the limit: wait for one to end",
            )
        name = sys.intern(principal)  # thousands of learners fetch the same payloads
        taken = offer.taken.get(name, 0) + nbytes
        if taken > self._share(offer):
            raise RequestRefusal(
                429,
                f"{principal!r} has fetched {PREFIX}{key} {self.limits.copies_per_principal} "
                f"times, the limit: one more is allowed every {self.limits.copy_seconds:g} s",
            )
        offer.taken[name] = taken
        self._downloads.setdefault(principal, []).append(key)
        return Download(self, offer, key, principal, nbytes)

    def _share(self, offer: Offer) -> float:
        """Bytes of an offer that one principal may have fetched by now."""
        more = (self._clock() - offer.since) / self.limits.copy_seconds
        return (self.limits.copies_per_principal + more) * len(offer.body)

    def _fetched(self, download: Download) -> None:
        download.offer.taken[download.principal] -= download.unsent
        keys = self._downloads[download.principal]
        keys.remove(download.key)
        if not keys:
            del self._downloads[download.principal]

    def open(self, key: str, principal: str, part: Range, total: int, take_over: bool) -> Stream:
        """Begin to receive a range of an upload.

        Args:
            part: Range of the request.
            total: Size of the whole payload according to the sender.
            take_over: The sender resumes: end older streams in the range, accept overlaps.

        Raises:
            RequestRefusal: The request is rejected; nothing was allocated.
        """
        if key not in self._uploads and ("PUT", key) not in self._gone and self.source is not None:
            self.source.expect(key, principal, total)
        upload = self._upload(key, principal)
        start, stop = part
        if not upload.nbytes_min <= total <= upload.nbytes:
            least = upload.nbytes_min
            size = "exactly" if least == upload.nbytes else f"{least} to"
            raise RequestRefusal(
                413, f"{upload.url} expects {size} {upload.nbytes} bytes, not {total}"
            )
        if not 0 <= start < stop <= total:
            raise RequestRefusal(416, f"bytes {start} to {stop} do not fit into {total}")
        if self._streams.get(principal, 0) >= self.limits.streams_per_principal:
            raise RequestRefusal(
                429,
                f"{principal!r} has {self._streams[principal]} transfers open, the limit: "
                "wait for one to end",
            )
        upload.nbytes = upload.nbytes_min = total
        return upload._open(start, stop, take_over)

    def state(self, key: str, principal: str) -> tuple[str, list[Range]]:
        """Return an upload's state and its received ranges, for a client that resumes a PUT."""
        upload = self._uploads.get(key)
        if upload is None and self._gone.get(("PUT", key)) == ARRIVED:
            return "arrived", []
        upload = self._upload(key, principal)
        return upload._phase(), upload._covered().ranges

    def stop(self, reason: str) -> None:
        for upload in list(self._uploads.values()):
            upload._end(f"ended: {reason}", status=503)
        self._offers.clear()

    def _upload(self, key: str, principal: str) -> BodyUpload:
        upload = self._uploads.get(key)
        if upload is None:
            raise self._missing("PUT", key, "is not expected here")
        if upload.principal != principal:  # break: anyone-writes-payload
            raise RequestRefusal(403, f"{principal!r} may not write to {upload.url}")
        return upload

    def _missing(self, method: str, key: str, unknown: str) -> RequestRefusal:
        why = self._gone.get((method, key))
        if why is None:
            return RequestRefusal(404, f"{PREFIX}{key} {unknown}")
        return RequestRefusal(410, f"{PREFIX}{key} {why}")

    def _remember(self, method: str, key: str, why: str) -> None:
        self._gone[method, key] = why
        self._gone.move_to_end((method, key))
        while len(self._gone) > ENDED_KEPT:
            self._gone.popitem(last=False)

    def _ended(self, upload: BodyUpload, why: str) -> None:
        self._uploads.pop(upload.key, None)
        self._remember("PUT", upload.key, why)

    def _count(self, principal: str, change: int) -> None:
        count = self._streams.get(principal, 0) + change
        if count:
            self._streams[principal] = count
        else:
            self._streams.pop(principal, None)


class Download:
    """One GET in progress: call `sent` for the bytes sent, and `close` at its end."""

    def __init__(
        self, bodies: BodyBooks, offer: Offer, key: str, principal: str, nbytes: int
    ) -> None:
        self.offer = offer
        self.key = key
        self.principal = principal
        self.unsent = nbytes
        self._bodies = bodies

    def sent(self, nbytes: int) -> None:
        """Record bytes that were handed to the connection."""
        self.unsent -= nbytes

    def close(self) -> None:
        """End the request; call it exactly once."""
        self._bodies._fetched(self)


ARRIVED = "has arrived already: a payload is sent once"


class BodyUpload:
    """An expected PUT: one principal, one size, once.

    The caller of `expect` calls `cancel` when it no longer needs the payload.

    Attributes:
        nbytes: The size; before the first request, the largest accepted size.
        nbytes_min: The smallest accepted size.
        when_ended: Called once, soon after the end, with whether the payload has arrived. With
            thousands of uploads this avoids one waiting task for each.
    """

    def __init__(
        self,
        bodies: BodyBooks,
        key: str,
        nbytes: int,
        principal: str,
        nbytes_min: int | None = None,
    ) -> None:
        self.key = key
        self.url = PREFIX + key
        self.nbytes = nbytes
        self.nbytes_min = nbytes if nbytes_min is None else nbytes_min
        self.principal = principal
        self.when_ended: Callable[[bool], object] | None = None
        self._bodies = bodies
        self._done = RangeSet()
        self._streams: set[Stream] = set()
        self._memory: PoolBody | None = None
        self._acquiring: asyncio.Task[PoolBody] | None = None
        self._taken = False
        loop = asyncio.get_running_loop()
        self._future: asyncio.Future[PoolBody] = loop.create_future()
        self._future.add_done_callback(self._notify_ended)
        self._watch: asyncio.TimerHandle | None = None
        self._watched = 0

    @property
    def received(self) -> int:
        return self._done.nbytes + sum(stream.position - stream.start for stream in self._streams)

    @property
    def body(self) -> Awaitable[PoolBody]:
        """Awaitable of the payload. Cancelling a task that awaits it keeps the upload.

        Raises TransportError if the upload was cancelled or the uploader disappeared.
        """
        return _Arrival(self)

    def cancel(self, reason: str = "") -> None:
        """Reject the PUT from now on, and release a payload that no task has taken."""
        self._end(f"was cancelled{': ' if reason else ''}{reason}")
        if not self._taken and not self._future.cancelled() and not self._future.exception():
            self._future.result().release()

    def _notify_ended(self, future: asyncio.Future[PoolBody]) -> None:
        """Notify `when_ended`; retrieves the exception, because perhaps no task awaits it."""
        has_arrived = not future.cancelled() and future.exception() is None
        if self.when_ended is not None:
            self.when_ended(has_arrived)

    def _phase(self) -> str:
        if self._memory is not None:
            return "receiving"
        return "queued" if self._acquiring is not None else "expected"

    def _covered(self) -> RangeSet:
        covered = RangeSet(self._done.ranges)
        for stream in self._streams:
            covered.add(stream.start, stream.position)
        return covered

    def _open(self, start: int, stop: int, take_over: bool) -> Stream:
        clashing = [s for s in self._streams if s.start < stop and start < s.stop]
        if not take_over and (clashing or self._done.overlaps(start, stop)):
            raise RequestRefusal(
                409, f"{self.url}: bytes {start} to {stop} overlap bytes that were sent before"
            )
        for stream in clashing:
            stream._abort(RequestRefusal(409, f"{self.url}: another request took over this range"))
        stream = Stream(self, start, stop)
        self._streams.add(stream)
        self._bodies._count(self.principal, +1)
        return stream

    async def _allocate(self) -> memoryview:
        """Return the buffer; the first stream requests it from the pool, the others wait for it."""
        if self._memory is None:
            if self._acquiring is None:
                self._acquiring = asyncio.create_task(self._bodies.pool.acquire(self.nbytes))
            # Shielded: a stream that is cancelled must not cancel the allocation of the others.
            memory = await asyncio.shield(self._acquiring)
            if self._memory is None:  # only the first of the waiting streams takes it
                if self._future.done():
                    raise RequestRefusal(410, f"{self.url} has ended")
                self._memory, self._acquiring = memory, None
                self._wait_for_more()
        return self._memory.buffer

    def _closed(self, stream: Stream) -> None:
        """Keep the bytes of a stream; when the last gap is closed, the payload has arrived."""
        if stream not in self._streams:
            return
        self._streams.remove(stream)
        self._bodies._count(self.principal, -1)
        self._done.add(stream.start, stream.position)
        if self._future.done():
            return
        if self._memory is not None and self._done.ranges == [(0, self.nbytes)]:
            memory, self._memory = self._memory, None
            self._future.set_result(memory)
            self._end(ARRIVED)
        elif not self._streams and self._acquiring is not None:
            self._stop_acquiring()

    def _end(self, why: str, status: int = 410) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        # The path may belong to a newer upload by now.
        if self._bodies._uploads.get(self.key) is self:
            self._bodies._ended(self, why)
        if not self._future.done():
            self._future.set_exception(TransportError(f"{self.url} {why}"))
        for stream in list(self._streams):
            stream._abort(RequestRefusal(status, f"{self.url} {why}"))
        self._stop_acquiring()
        if self._memory is not None:
            memory, self._memory = self._memory, None
            memory.release()

    def _stop_acquiring(self) -> None:
        task, self._acquiring = self._acquiring, None
        # If the task has finished already, its buffer must be returned to the pool.
        if task is not None and not task.cancel() and not task.cancelled():
            task.result().release()

    def _wait_for_more(self) -> None:
        """Watch for an upload that stops moving, because it holds memory."""
        seconds = SERVER_PATIENCE * self._bodies.limits.stall_seconds
        self._watched = self.received
        self._watch = asyncio.get_running_loop().call_later(seconds, self._check_moved, seconds)

    def _check_moved(self, seconds: float) -> None:
        if self.received > self._watched:  # break: silent-upload-keeps-memory
            self._wait_for_more()
            return
        self._end(
            f"was abandoned: {self.received} of {self.nbytes} bytes arrived from "
            f"{self.principal!r}, then nothing for {seconds:.1f} s"
        )


class Stream:
    """One range of an upload, for the duration of its request.

    Use: `async with stream.receiving()`, then `write` each piece, and `finish`.
    """

    def __init__(self, upload: BodyUpload, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self.position = start
        self.refusal: RequestRefusal | None = None
        self._task: asyncio.Task[Any] | None = None
        self._upload = upload
        self._buffer: memoryview | None = None

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Cover the request, which first waits for memory: the backpressure of the pool.

        Raises:
            RequestRefusal: The upload has ended in the meantime.
        """
        self._task = task = asyncio.current_task()
        assert task is not None
        try:
            self._buffer = await self._upload._allocate()
            if self.refusal is not None:
                raise self.refusal
            yield
        except asyncio.CancelledError:
            if self.refusal is None:
                raise
            # `_abort` cancelled the task, so this is a rejection and not a cancelled request.
            task.uncancel()
            raise self.refusal from None
        finally:
            self._task = None
            self.close()

    def write(self, piece: bytes | memoryview) -> None:
        """Copy the next piece of the range into the buffer.

        Raises:
            RequestRefusal: The upload ended, or the range is longer than announced.
        """
        if self.refusal is not None:
            raise self.refusal
        assert self._buffer is not None
        end = self.position + len(piece)
        if end > self.stop:
            raise RequestRefusal(413, f"{self._upload.url}: more bytes than the announced range")
        self._buffer[self.position : end] = piece
        self.position = end

    def finish(self) -> None:
        """Check that the whole range arrived.

        Raises:
            RequestRefusal: It is too short.
        """
        if self.position < self.stop:
            raise RequestRefusal(
                400, f"{self._upload.url}: truncated at byte {self.position} of {self.stop}"
            )

    def close(self) -> None:
        """End the request; may be called twice."""
        self._buffer = None
        self._upload._closed(self)

    def _abort(self, refusal: RequestRefusal) -> None:
        self.refusal = refusal
        self.close()
        if self._task is not None:
            self._task.cancel()


class _Arrival:
    """Awaitable of a payload; the task that receives it owns it and must release it."""

    def __init__(self, upload: BodyUpload) -> None:
        self._upload = upload

    def __await__(self) -> Generator[object, None, PoolBody]:
        body = yield from asyncio.shield(self._upload._future).__await__()
        self._upload._taken = True
        return body


def _key(path: str) -> str:
    return quote(path.strip("/"))


def body_url(path: str) -> str:
    """Return the relative URL of a path that is offered or expected."""
    return PREFIX + _key(path)
