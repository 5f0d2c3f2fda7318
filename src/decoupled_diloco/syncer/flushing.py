"""Brings the tapes of a shard's process to the disk: no heartbeat waits for it or for the text."""

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
"""How often the bytes moved are written to the tape."""


class Flushing:
    """See the module.

    Args:
        tapes: The shard's own, and the coordinator's if it is here.
        stats: What the server has counted.
    """

    def __init__(self, tapes: Sequence[TapeWriter], stats: Stats) -> None:
        self._tapes = tapes
        self._stats = stats

    async def run(self) -> None:
        """Writes for as long as it is not cancelled.

        The text is made here, some records in each turn of the loop: a thread that made it would
        keep the interpreter from the loop for as long.
        """
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            for tape in self._tapes:
                while tape.make_text(SLICE):  # noqa: ASYNC110  # other tasks take turns
                    await asyncio.sleep(0)
            if any(tape.waiting for tape in self._tapes):
                await asyncio.to_thread(self._flush)

    async def count_bytes(self) -> None:
        """Samples the bytes moved for as long as it is not cancelled."""
        while True:
            await asyncio.sleep(STATS_SECONDS)
            self.sample(BytesMoved.of(self._stats))

    def sample(self, sample: Sample) -> None:
        """Notes a sample on the shard's own tape."""
        with contextlib.suppress(StorageError):  # a full disk was told of already
            self._tapes[0].sample(now(), sample)

    async def close(self) -> None:
        """Writes the rest."""
        self.sample(BytesMoved.of(self._stats))
        await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        for tape in self._tapes:
            tape.flush()
