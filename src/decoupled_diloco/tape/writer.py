"""Write the event tape; see `decoupled_diloco.tape`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from decoupled_diloco._version import __version__
from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol import wire
from decoupled_diloco.runtime import runtime
from decoupled_diloco.tape.records import SCHEMA, Effect, Event, Kind, plain_numbers, to_json
from decoupled_diloco.tape.samples import Sample
from decoupled_diloco.tape.segments import (
    SEGMENT_BYTES,
    compress_later,
    end_segment,
    open_to_append,
)

logger = logging.getLogger(__name__)

_EventT = TypeVar("_EventT", bound=Event)
_EffectT = TypeVar("_EffectT", bound=Effect)
_EventIn = TypeVar("_EventIn", contravariant=True)

FLUSH_SECONDS = 0.5
"""Interval at which the owner of a tape calls `flush`."""

BUFFER_RECORDS_MAX = 400_000
"""Number of unwritten records at which a tape ends: about 100 MiB, or hours of a small run."""


_Waiting = tuple[float, int, Kind, Any, int | None]
"""A record without its text: instant, number, kind, an immutable value, cause."""


class TapeWriter:
    """Appends the records of one incarnation of one process.

    Records are buffered as objects, so a writing thread waits neither for the disk nor for their
    text. Several threads may write records, one at a time. `flush` writes the buffer in order, and
    another thread may call it at the same time. The owner of the tape calls it every
    ``FLUSH_SECONDS``, so a killed process loses only newer records. An event loop that must not
    wait for the text of thousands of records can create it in advance, a few at a time
    (`make_text`). A separate thread compresses full segments.

    If a write fails (the disk is full), the records stay in memory, and each `flush` tries again.
    The first failure raises `StorageError` or calls ``on_failure``. At ``BUFFER_RECORDS_MAX``
    unwritten records the tape ends with a second such error. From then on new records are dropped
    and counted in ``dropped``, so the file has no gaps, and training continues.

    Args:
        path: The file, or the tape folder in which ``<process>.jsonl`` is created.
        process: Name of the process.
        header: JSON values for the start record, for example the settings for a replay.
        clock: The clock of the instants passed to `event` and the other methods. The default is
            this process's monotonic clock.
        wall: The clock of seconds since the Unix epoch. The default is this process's.
        on_failure: Called with each error instead of raising it.

    Raises:
        StorageError: The file cannot be opened or, without ``on_failure``, the start record cannot
            be written.
    """

    def __init__(
        self,
        path: str | Path,
        process: str,
        header: Mapping[str, Any] | None = None,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] | None = None,
        on_failure: Callable[[StorageError], None] | None = None,
    ) -> None:
        path = Path(path)
        self.path = path if path.suffix == ".jsonl" else path / f"{process}.jsonl"
        self.process = process
        self.dropped = 0
        self._name = to_json(process)
        self._seq = 0
        self._buffer: deque[_Waiting] = deque()
        self._lines: list[str] = []
        self._pending: deque[bytes] = deque()
        self._unwritten = memoryview(b"")
        self._unwritten_records = 0
        self._is_failing = False
        self._ended = self._is_closed = False
        # Lock order: _writing, then _making, then _lock. Training threads take only _lock, which no
        # thread holds while it creates text or waits for the disk.
        self._lock = threading.Lock()  # guards the buffer and its counters
        self._making = threading.Lock()  # keeps lines in order, whichever thread creates their text
        self._writing = threading.Lock()  # guards the file
        self._on_failure = on_failure
        try:
            self._file = open_to_append(self.path)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error.strerror}") from error
        self._room = SEGMENT_BYTES - self._file.tell()
        self._compressing: Future[None] | None = None
        here = runtime()
        now = (clock or here.now)()
        start = {
            "wall": (wall or here.wall)(),
            "monotonic": now,
            "pid": here.process_id(),
            "version": __version__,
            "header": dict(header or {}),
        }
        self._write(now, "start", start, None)
        self.flush()

    def event(self, now: float, event: Event) -> int:
        """Write an event that a state machine received, and return the record's number."""
        return self._write(now, "event", event, None)

    def effects(self, now: float, cause_seq: int, effects: Sequence[Effect]) -> None:
        """Write the effects that a state machine ordered because of the event with this number."""
        for effect in effects:
            self._write(now, "effect", effect, cause_seq)

    def sample(self, now: float, sample: Sample) -> None:
        self._write(now, "sample", sample, None)

    def make_text(self, records: int) -> bool:
        """Create the text of up to ``records`` buffered records; return False if none are left."""
        with self._making:
            for _ in range(records):
                if not self._buffer:
                    return False
                self._lines.append(self._line(self._buffer.popleft()))
        return True

    @property
    def waiting(self) -> bool:
        """Whether `flush` has records to write."""
        return bool(self._buffer or self._lines or self._pending or self._unwritten)

    def flush(self) -> None:
        """Write the buffered records to the file, without a sync to disk."""
        with self._writing:
            if self._is_closed:
                return
            self.make_text(len(self._buffer))
            with self._making:
                lines, self._lines = self._lines, []
            self._pending.extend(line.encode(errors="backslashreplace") for line in lines)
            try:
                self._write_pending()
            except OSError as error:
                if not self._is_failing and not self._ended:
                    self._is_failing = True
                    self._report(
                        f"cannot be written: {error.strerror}",
                        "its records wait in memory, and training continues; free disk space",
                    )
                return
            if self._is_failing:
                self._is_failing = False
                if not self.dropped:
                    logger.warning("%s can be written again, and no record is missing", self.path)

    def _write_pending(self) -> None:
        """Write the pending text, and end a segment when it is full.

        The same run always ends a segment at the same line.

        Raises:
            OSError: A write failed; the unwritten text stays pending.
        """
        if self._file.closed:  # the disk was too full to open a new file after a segment
            self._file = open_to_append(self.path)
        while self._pending or self._unwritten:
            if not self._unwritten:
                self._unwritten = memoryview(self._next_piece())
            while self._unwritten:  # a full disk may accept a part: keep the rest for the next try
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._unwritten_records = 0
            if self._room <= 0:
                self._room = SEGMENT_BYTES
                self._end_segment()

    def _next_piece(self) -> bytes:
        piece = list[bytes]()
        while self._pending and self._room > 0:
            piece.append(self._pending.popleft())
            self._room -= len(piece[-1])
        self._unwritten_records = len(piece)
        return b"".join(piece)

    def _end_segment(self) -> None:
        """Turn the file into a segment. If that fails, it grows on and a later call tries again."""
        if end_segment(self.path, self._file):
            self._file.close()
            self._file = open_to_append(self.path)
            self._compressing = compress_later(self.path)

    def _report(self, problem: str, consequence: str) -> None:
        failure = StorageError(f"{self.path} {problem}: {consequence}")
        if self._on_failure is None:
            raise failure
        self._on_failure(failure)

    def close(self) -> None:
        """Write the buffered records and close the file; a second call does nothing."""
        try:
            self.flush()
        finally:
            with self._writing, self._lock:
                self._ended = self._is_closed = True
                self.dropped += len(self._pending) + self._unwritten_records
                self._clear()
                self._file.close()
            if self._compressing is not None:
                self._compressing.result()

    def abandon(self) -> None:
        """Close the file as it is and drop the buffer, like a kill of the process."""
        with self._writing, self._making, self._lock:
            self._ended = self._is_closed = True
            self._buffer.clear()
            self._lines.clear()
            self._clear()
            self._file.close()

    def _clear(self) -> None:
        self._pending.clear()
        self._unwritten, self._unwritten_records = memoryview(b""), 0

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write(self, now: float, kind: Kind, value: object, cause: int | None) -> int:
        with self._lock:  # records must enter the buffer in the order of their numbers
            seq = self._seq
            self._seq += 1
            waiting = len(self._buffer) + len(self._lines)
            waiting += len(self._pending) + self._unwritten_records
            full = not self._ended and waiting >= BUFFER_RECORDS_MAX
            self._ended |= full
            if self._ended:
                self.dropped += 1
            else:
                self._buffer.append((now, seq, kind, value, cause))
        if full:
            self._report(
                f"is written too slowly ({waiting} records wait for the disk)",
                f"no more events of {self.process} are recorded, and training continues; use a "
                "faster or larger disk for the next run",
            )
        return seq

    def _line(self, waiting: _Waiting) -> str:
        now, seq, kind, value, cause = waiting
        data = {"type": "start", **value} if isinstance(value, dict) else wire.encode(value)
        name = data.pop("type")
        try:
            fields = to_json(data)
        except ValueError:  # numbers that are not finite are rare: replace them only then
            fields = to_json(plain_numbers(data))
        tail = "" if cause is None else f',"cause":{cause}'
        return (
            f'{{"v":{SCHEMA},"at":{float(now)!r},"process":{self._name},"seq":{seq},'
            f'"kind":"{kind}","type":"{name}","data":{fields}{tail}}}\n'
        )


class Machine(Protocol[_EventIn, _EffectT]):
    """A state machine of the protocol."""

    def handle(self, now: float, event: _EventIn, /) -> list[_EffectT]: ...


class Recorder(Generic[_EventT, _EffectT]):
    """A state machine whose events and effects are written to the tape.

    If the tape cannot be written, the error is logged, and the machine continues unrecorded. No
    effect is lost.
    """

    def __init__(self, machine: Machine[_EventT, _EffectT], tape: TapeWriter) -> None:
        self.machine = machine
        self.tape = tape

    def handle(self, now: float, event: _EventT) -> list[_EffectT]:
        """Return the machine's effects; event and effects are on the tape."""
        effects = self.machine.handle(now, event)
        try:
            self.tape.effects(now, self.tape.event(now, event), effects)
        except StorageError as error:
            logger.error("%s", error)
        return effects
