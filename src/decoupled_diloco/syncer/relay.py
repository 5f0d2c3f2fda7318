"""Relays chunks of a learner's state to another learner, through the process of shard 0.

Only a few chunks of a relay are expected or kept at a time. The next chunks are expected when the
receiver reports that it has one. So `WINDOW` chunks bound the memory of each relay. The receiver
may fetch a kept chunk any number of times, so a broken link costs at most one chunk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.errors import TransportError
from decoupled_diloco.merge import digest
from decoupled_diloco.transport.byte_ranges import chunk_sizes
from decoupled_diloco.transport.payload_store import BodyBooks, BodyUpload
from decoupled_diloco.transport.pool import PoolBody

WINDOW = 4
"""Chunks of one relay in memory or in transfer.

Their 16 MiB keep a link of 1 Gbit/s and 100 ms busy.
"""


@dataclass
class _Passage:
    """One relay: the expected chunks (``uploads``) and the kept ones (``bodies``)."""

    donor: str
    sizes: tuple[int, ...]
    next: int = 0
    uploads: dict[int, BodyUpload] = field(default_factory=dict)
    bodies: dict[int, PoolBody] = field(default_factory=dict)


class Relay:
    """The relays of one process.

    Args:
        bodies: The server's data plane.
        spawn: Runs a coroutine in the process's event loop.
    """

    def __init__(
        self, bodies: BodyBooks, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._bodies = bodies
        self._spawn = spawn
        self._passages: dict[str, _Passage] = {}

    def open(self, path: str, donor: str, head_nbytes: int, nbytes: int) -> None:
        """Expect the first chunks from a state provider; chunk 0 is the head."""
        passage = _Passage(donor, (head_nbytes, *chunk_sizes(nbytes)))
        self._passages[path] = passage
        for _ in range(WINDOW):
            self._expect_next(path, passage)

    def taken(self, path: str, chunk: int) -> None:
        """Release the chunks up to this one: the receiver has them."""
        passage = self._passages.get(path)
        if passage is None:
            return
        for number in [number for number in passage.bodies if number <= chunk]:
            self._bodies.withdraw(f"{path}/out/{number}")
            passage.bodies.pop(number).release()
            self._expect_next(path, passage)

    def close(self, path: str, why: str) -> None:
        """Cancel a relay and release its chunks."""
        passage = self._passages.pop(path, None)
        if passage is None:
            return
        for upload in list(passage.uploads.values()):
            upload.cancel(why)
        for number, body in passage.bodies.items():
            self._bodies.withdraw(f"{path}/out/{number}")
            body.release()

    def _expect_next(self, path: str, passage: _Passage) -> None:
        if passage.next >= len(passage.sizes):
            return
        number = passage.next
        passage.next += 1
        upload = self._bodies.expect(f"{path}/in/{number}", passage.sizes[number], passage.donor)
        passage.uploads[number] = upload
        self._spawn(self._pass_on(path, passage, number, upload))

    async def _pass_on(self, path: str, passage: _Passage, number: int, upload: BodyUpload) -> None:
        with contextlib.suppress(TransportError):
            body = await upload.body
            passage.uploads.pop(number, None)
            if self._passages.get(path) is not passage:
                body.release()
                return
            passage.bodies[number] = body
            self._bodies.offer(f"{path}/out/{number}", body.buffer, digest(body.buffer))
