"""The tape of a virtual process, which also notifies an observer of each event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.samples import BytesMoved


class HostTape(TapeWriter):
    """A process's tape that also notifies an observer of every event and its effects.

    Args:
        watcher: Called for each event with its instant, the event and its effects.
        file: The tape to write to; ``None``: nothing is written.
        bytes_factor: See `System`.
    """

    def __init__(
        self,
        watcher: Callable[[float, Any, Sequence[Any]], None],
        file: TapeWriter | None,
        bytes_factor: float,
    ) -> None:
        self._bytes_factor = bytes_factor
        self._watcher = watcher
        self._file_tape = file
        self._event: Any = None
        self.dropped = 0

    def event(self, now: float, event: Any) -> int:
        """See `TapeWriter`."""
        self._event = event
        return 0 if self._file_tape is None else self._file_tape.event(now, event)

    def effects(self, now: float, cause_seq: int, effects: Sequence[Any]) -> None:
        """See `TapeWriter`."""
        if self._file_tape is not None:
            self._file_tape.effects(now, cause_seq, effects)
        self._watcher(now, self._event, effects)

    def sample(self, now: float, sample: Any) -> None:
        """See `TapeWriter`."""
        if self._file_tape is None:
            return
        if isinstance(sample, BytesMoved) and self._bytes_factor != 1.0:
            sample = replace(
                sample,
                data_sent=round(self._bytes_factor * sample.data_sent),
                data_received=round(self._bytes_factor * sample.data_received),
            )
        self._file_tape.sample(now, sample)

    def make_text(self, records: int) -> bool:
        """See `TapeWriter`."""
        return self._file_tape is not None and self._file_tape.make_text(records)

    @property
    def waiting(self) -> bool:
        """See `TapeWriter`."""
        return self._file_tape is not None and self._file_tape.waiting

    def flush(self) -> None:
        """See `TapeWriter`."""
        if self._file_tape is not None:
            self._file_tape.flush()

    def close(self) -> None:
        """See `TapeWriter`."""
        if self._file_tape is not None:
            self._file_tape.close()

    def lose(self) -> None:
        """Drop the records that the dead process had not yet written."""
        if self._file_tape is not None:
            self._file_tape.abandon()
