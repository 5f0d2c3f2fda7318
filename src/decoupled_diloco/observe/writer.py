"""Writing the event tape; see `decoupled_diloco.observe.tape`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import decoupled_diloco
from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe.records import SCHEMA, Effect, Event, Kind, plain_numbers, to_json
from decoupled_diloco.observe.samples import Sample
from decoupled_diloco.protocol import wire

FLUSH_SECONDS = 0.5
"""How often whoever owns a tape calls `flush`."""

BUFFER_BYTES_MAX = 64 << 20
"""Where a tape ends whose disk is so slow that this much waits: hours of an ordinary run."""


class TapeWriter:
    """Appends the records of one life of one process.

    Records go to a buffer: who writes them never waits for the disk. `flush` writes the buffer, in
    order, and may be called from another thread meanwhile; whoever owns the tape calls it every
    ``FLUSH_SECONDS``, so a process that is killed loses what is younger. Threads that write records
    agree among themselves who is next.

    A failed write (the disk is full) raises `StorageError` once, or tells ``on_failure`` of it, and
    so does a buffer that has outgrown ``BUFFER_BYTES_MAX``; from then on records are dropped and
    counted in ``dropped``, so that the tape stays a faithful beginning and training goes on.

    Args:
        path: The file, or the tape folder in which ``<who>.jsonl`` is made.
        who: Name of the process.
        header: JSON values to keep in the start record, for example what a replay needs.
        clock: The clock of the instants that `event` and the others are given.
        wall: Seconds since the Unix epoch; a virtual world gives its own.
        pid: Number of the process; a virtual world gives its own. Default: this process's.
        on_failure: Told of the tape's end instead of an error being raised.

    Raises:
        StorageError: The file cannot be opened or, without ``on_failure``, the start record cannot
            be written.
    """

    def __init__(
        self,
        path: str | Path,
        who: str,
        header: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        on_failure: Callable[[StorageError], None] | None = None,
        pid: int | None = None,
    ) -> None:
        path = Path(path)
        self.path = path if path.suffix == ".jsonl" else path / f"{who}.jsonl"
        self.who = who
        self.dropped = 0
        self._name = to_json(who)
        self._seq = 0
        self._buffer: list[str] = []
        self._buffered_bytes = 0
        self._ended = False
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._on_failure = on_failure
        self._file = _open_at_line_start(self.path)
        now = clock()
        start = {
            "wall": wall(),
            "monotonic": now,
            "pid": os.getpid() if pid is None else pid,
            "version": decoupled_diloco.__version__,
            "header": dict(header or {}),
        }
        self._write(now, "start", "start", start, None)
        self.flush()

    def event(self, now: float, event: Event) -> int:
        """Writes what a state machine was told, and returns the record's number."""
        return self._write_value(now, "event", event, None)

    def effects(self, now: float, cause_seq: int, effects: Sequence[Effect]) -> None:
        """Writes what a state machine ordered because of the event with this number."""
        for effect in effects:
            self._write_value(now, "effect", effect, cause_seq)

    def sample(self, now: float, sample: Sample) -> None:
        """Writes a measurement."""
        self._write_value(now, "sample", sample, None)

    def flush(self) -> None:
        """Writes what is buffered to the file (the kernel has it then, not yet the disk)."""
        with self._writing:
            with self._lock:
                lines, self._buffer = self._buffer, []
                self._buffered_bytes = 0
            if not lines:
                return
            try:
                view = memoryview("".join(lines).encode(errors="backslashreplace"))
                while view:
                    view = view[self._file.write(view) :]
            except OSError as error:
                with self._lock:
                    self._ended = True
                    self.dropped += len(lines) + len(self._buffer)
                    self._buffer.clear()
                self._tell(f"cannot be written: {error.strerror}", "free disk space")

    def _tell(self, problem: str, way_out: str) -> None:
        failure = StorageError(
            f"{self.path} {problem}: the event tape of {self.who} ends here, training goes on; "
            f"{way_out} before the next run"
        )
        if self._on_failure is None:
            raise failure
        self._on_failure(failure)

    def close(self) -> None:
        """Writes what is buffered and closes the file; a second call does nothing."""
        try:
            self.flush()
        finally:
            with self._writing, self._lock:
                self._ended = True
                self._file.close()

    def __enter__(self) -> TapeWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _write_value(self, now: float, kind: Kind, value: object, cause: int | None) -> int:
        data = wire.encode(value)
        return self._write(now, kind, data.pop("type"), data, cause)

    def _write(
        self, now: float, kind: Kind, name: str, data: dict[str, Any], cause: int | None
    ) -> int:
        seq = self._seq
        self._seq += 1
        if self._ended:
            self.dropped += 1
            return seq
        try:
            body = to_json(data)
        except ValueError:
            body = to_json(plain_numbers(data))
        tail = "" if cause is None else f',"cause":{cause}'
        line = (
            f'{{"v":{SCHEMA},"at":{float(now)!r},"who":{self._name},"seq":{seq},'
            f'"kind":"{kind}","type":"{name}","data":{body}{tail}}}\n'
        )
        with self._lock:
            full = self._buffered_bytes + len(line) > BUFFER_BYTES_MAX
            if full or self._ended:
                self._ended = True
                self.dropped += 1
            else:
                self._buffer.append(line)
                self._buffered_bytes += len(line)
        if full:
            waiting = f"is written too slowly ({BUFFER_BYTES_MAX >> 20} MiB wait for the disk)"
            self._tell(waiting, "choose a faster disk")
        return seq


def _open_at_line_start(path: Path) -> BinaryIO:
    """Opens for appending; a line that an earlier life left torn is ended first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab+", buffering=0)
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
    return file
