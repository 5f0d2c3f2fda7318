"""Writes the tapes of a syncer process to disk; heartbeats wait neither for disk nor for text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from decoupled_diloco.errors import StorageError
from decoupled_diloco.runtime import now
from decoupled_diloco.shell.driver import SLICE
from decoupled_diloco.tape import FLUSH_SECONDS, TapeWriter
from decoupled_diloco.tape.samples import BytesMoved, Sample
from decoupled_diloco.transport.interface import Stats

STATS_SECONDS = 5.0
"""Interval at which the bytes moved are recorded on the tape."""


class Flushing:
    """Writes the tapes and samples the bytes moved.

    Args:
        tapes: The tape of the shard or relay, then the coordinator's if it runs in this process.
        stats: The server's byte counters.
    """

    def __init__(self, tapes: Sequence[TapeWriter], stats: Stats) -> None:
        self._tapes = tapes
        self._stats = stats

    async def run(self) -> None:
        """Write until cancelled.

        The text is created in this task, a few records per turn of the event loop. A thread that
        created it would hold the interpreter, and with it the loop, for as long.
        """
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            for tape in self._tapes:
                while tape.make_text(SLICE):  # noqa: ASYNC110  # other tasks take turns
                    await asyncio.sleep(0)
            if any(tape.waiting for tape in self._tapes):
                await asyncio.to_thread(self._flush)

    async def count_bytes(self) -> None:
        """Sample the bytes moved until cancelled."""
        while True:
            await asyncio.sleep(STATS_SECONDS)
            self.sample(BytesMoved.of(self._stats))

    def sample(self, sample: Sample) -> None:
        """Record a sample on the first tape."""
        with contextlib.suppress(StorageError):  # a full disk is already reported
            self._tapes[0].sample(now(), sample)

    async def close(self) -> None:
        """Write the remaining records."""
        self.sample(BytesMoved.of(self._stats))
        await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        for tape in self._tapes:
            tape.flush()
