"""Writing the event tape; see `decoupled_diloco.observe.tape`."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from decoupled_diloco._version import __version__
from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe.records import SCHEMA, Effect, Event, Kind, plain_numbers, to_json
from decoupled_diloco.observe.samples import Sample
from decoupled_diloco.observe.segments import (
    SEGMENT_BYTES,
    compress_later,
    end_segment,
    open_to_append,
)
from decoupled_diloco.protocol import wire
from decoupled_diloco.runtime import runtime

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
"""How often the owner of a tape calls `flush`."""

BUFFER_RECORDS_MAX = 400_000
"""Where a tape ends whose disk is so slow that so many wait: some 100 MiB, hours of a small run."""


_Waiting = tuple[float, int, Kind, Any, int | None]
"""A record without its text: instant, number, kind, an immutable value, cause."""


class TapeWriter:
    """Appends the records of one life of one process.

    Records go to a buffer as they are: a writing thread waits neither for the disk nor for their
    text. `flush` writes the buffer, in order, and may be called from another thread meanwhile. The
    owner of the tape calls it every ``FLUSH_SECONDS``, so a process that is killed loses only what
    is younger. A thread of its own compresses text that fills a segment. An event loop that must
    not wait for the text of thousands of records makes it before, some at a time (`make_text`).
    Several threads may write records, one at a time.

    If a write fails (the disk is full), the records stay in memory, and each `flush` tries again.
    The first failure raises `StorageError`, or ``on_failure`` gets it. When more than
    ``BUFFER_RECORDS_MAX`` records wait, the tape ends with a second such error: from then on
    records are dropped and counted in ``dropped``, so what the file holds has no gaps, and training
    goes on.

    Args:
        path: The file, or the tape folder in which ``<who>.jsonl`` is made.
        who: Name of the process.
        header: JSON values to keep in the start record, for example what a replay needs.
        clock: The clock of the instants that `event` and the others are given; default: this
            process's. So for ``wall``, seconds since the Unix epoch.
        on_failure: Gets the errors instead of an exception being raised.

    Raises:
        StorageError: The file cannot be opened or, without ``on_failure``, the start record cannot
            be written.
    """

    def __init__(
        self,
        path: str | Path,
        who: str,
        header: Mapping[str, Any] | None = None,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] | None = None,
        on_failure: Callable[[StorageError], None] | None = None,
    ) -> None:
        path = Path(path)
        self.path = path if path.suffix == ".jsonl" else path / f"{who}.jsonl"
        self.who = who
        self.dropped = 0
        self._name = to_json(who)
        self._seq = 0
        self._buffer: deque[_Waiting] = deque()
        self._lines: list[str] = []
        self._pending: deque[bytes] = deque()
        self._unwritten = memoryview(b"")
        self._unwritten_records = 0
        self._is_failing = False
        self._ended = self._is_closed = False
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._writing = threading.Lock()
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
        """Writes what a state machine was told, and returns the record's number."""
        return self._write(now, "event", event, None)

    def effects(self, now: float, cause_seq: int, effects: Sequence[Effect]) -> None:
        """Writes what a state machine ordered because of the event with this number."""
        for effect in effects:
            self._write(now, "effect", effect, cause_seq)

    def sample(self, now: float, sample: Sample) -> None:
        self._write(now, "sample", sample, None)

    def make_text(self, records: int) -> bool:
        """Makes the text of so many buffered records; false: there are no more."""
        with self._making:
            for _ in range(records):
                if not self._buffer:
                    return False
                self._lines.append(self._line(self._buffer.popleft()))
        return True

    @property
    def waiting(self) -> bool:
        """Whether there is something for `flush` to write."""
        return bool(self._buffer or self._lines or self._pending or self._unwritten)

    def flush(self) -> None:
        """Writes what is buffered to the file (the kernel has it then, not yet the disk)."""
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
                    self._tell(
                        f"cannot be written: {error.strerror}",
                        "its records wait in memory, and training continues; free disk space",
                    )
                return
            if self._is_failing:
                self._is_failing = False
                if not self.dropped:
                    logger.warning("%s can be written again, and no record is missing", self.path)

    def _write_pending(self) -> None:
        """Writes the text that is pending; where a segment is full it is cut.

        That is at the same line in every equal run.

        Raises:
            OSError: What is not written is pending still.
        """
        if self._file.closed:  # a full disk took no new file after a segment
            self._file = open_to_append(self.path)
        while self._pending or self._unwritten:
            if not self._unwritten:
                self._unwritten = memoryview(self._next_piece())
            while self._unwritten:
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
        """What cannot become a segment now grows on, and may be one that is longer."""
        if end_segment(self.path, self._file):
            self._file.close()
            self._file = open_to_append(self.path)
            self._compressing = compress_later(self.path)

    def _tell(self, problem: str, consequence: str) -> None:
        failure = StorageError(f"{self.path} {problem}: {consequence}")
        if self._on_failure is None:
            raise failure
        self._on_failure(failure)

    def close(self) -> None:
        """Writes what is buffered and closes the file; a second call does nothing."""
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
        """Closes the file as it is, as the death of the process does: what is buffered is lost."""
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
        with self._lock:
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
            self._tell(
                f"is written too slowly ({waiting} records wait for the disk)",
                f"no more events of {self.who} are recorded, and training continues; use a faster "
                "or larger disk for the next run",
            )
        return seq

    def _line(self, waiting: _Waiting) -> str:
        now, seq, kind, value, cause = waiting
        data = {"type": "start", **value} if isinstance(value, dict) else wire.encode(value)
        name = data.pop("type")
        try:
            body = to_json(data)
        except ValueError:
            body = to_json(plain_numbers(data))
        tail = "" if cause is None else f',"cause":{cause}'
        return (
            f'{{"v":{SCHEMA},"at":{float(now)!r},"who":{self._name},"seq":{seq},'
            f'"kind":"{kind}","type":"{name}","data":{body}{tail}}}\n'
        )
