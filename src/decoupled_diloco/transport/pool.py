"""A bounded pool of buffers for received payloads."""

from __future__ import annotations

import asyncio
from collections import deque


class PoolBody:
    """A buffer on loan from the pool."""

    def __init__(self, pool: ReceivePool, storage: bytearray) -> None:
        self._pool = pool
        self._storage: bytearray | None = storage
        self._nbytes = len(storage)
        self.buffer = memoryview(storage)

    def release(self) -> None:
        """Return the buffer to the pool; may be called twice."""
        storage, self._storage = self._storage, None
        if storage is None:
            return
        try:
            self.buffer.release()
            # Resizing a bytearray with an exported view raises BufferError.
            storage.append(storage.pop())
        except BufferError:
            # An array or slice of the payload is still alive. Reusing the memory would change the
            # payload under its reader, so the buffer is left to the garbage collector.
            self._pool._give_back(self._nbytes, None)
        else:
            self._pool._give_back(self._nbytes, storage)


class ReceivePool:
    """At most `nbytes` of receive buffers, allocated in the order of the requests.

    A request for more than is free waits; this is the backpressure of the data plane. A payload
    larger than the whole pool is admitted alone, when no other buffer is in use, so that a pool
    that is too small is slow but never stuck. Released buffers are reused for payloads of the same
    size, because touching fresh memory costs more than receiving into it.
    """

    def __init__(self, nbytes: int) -> None:
        assert nbytes > 0
        self.nbytes = nbytes
        self.in_use = 0
        self._idle: dict[int, list[bytearray]] = {}
        self._idle_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[PoolBody]]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, nbytes: int) -> PoolBody:
        """Return a buffer of `nbytes` when this request is first in line and memory is free."""
        # A small request may not overtake a large one that waits, which would starve.
        if not self._waiting and self._admits(nbytes):
            return self._take(nbytes)
        future: asyncio.Future[PoolBody] = asyncio.get_running_loop().create_future()
        entry = (nbytes, future)
        self._waiting.append(entry)
        try:
            return await future
        except asyncio.CancelledError:
            # The buffer may have been assigned just before the cancellation; it must not leak.
            if future.done() and not future.cancelled():
                future.result().release()
            elif entry in self._waiting:
                self._waiting.remove(entry)
                self._admit_waiting()
            raise

    def _admits(self, nbytes: int) -> bool:
        return self.in_use == 0 or self.in_use + nbytes <= self.nbytes

    def _take(self, nbytes: int) -> PoolBody:
        self.in_use += nbytes
        kept = self._idle.get(nbytes)
        if kept:
            self._idle_bytes -= nbytes
            return PoolBody(self, kept.pop())
        self._trim(max(0, self.nbytes - self.in_use))
        return PoolBody(self, bytearray(nbytes))

    def _give_back(self, nbytes: int, storage: bytearray | None) -> None:
        self.in_use -= nbytes
        if storage is not None and self.in_use + self._idle_bytes + nbytes <= self.nbytes:
            self._idle.setdefault(nbytes, []).append(storage)
            self._idle_bytes += nbytes
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting and self._admits(self._waiting[0][0]):
            nbytes, future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._take(nbytes))

    def _trim(self, idle_bytes_max: int) -> None:
        """Drop idle buffers, so that idle and used buffers together stay within the bound."""
        for size in list(self._idle):
            while self._idle[size] and self._idle_bytes > idle_bytes_max:
                self._idle[size].pop()
                self._idle_bytes -= size
            if not self._idle[size]:
                del self._idle[size]
