"""The tape of a virtual process, which whoever watches the run sees as it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from decoupled_diloco.observe.samples import BytesMoved
from decoupled_diloco.observe.tape import TapeWriter


class HostTape(TapeWriter):
    """A process's tape: whoever watches the run is told of every event and its effects, too.

    Args:
        tell: Told of each event.
        file: Where it is written; ``None``: nowhere.
        bytes_factor: See `System`.
    """

    def __init__(
        self,
        tell: Callable[[float, Any, Sequence[Any]], None],
        file: TapeWriter | None,
        bytes_factor: float,
    ) -> None:
        self._bytes_factor = bytes_factor
        self._watcher = tell
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
        """The process is gone: what it had not yet written is lost."""
        if self._file_tape is not None:
            self._file_tape.abandon()
