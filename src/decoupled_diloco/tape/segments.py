"""A process's tape on disk: the newest text, and compressed segments of the older text.

The process appends to ``RUN/tape/shard-0.jsonl``. Once the file is `SEGMENT_BYTES` long it becomes
a segment, ``RUN/tape/shard-0.segments/000004194411.jsonl``, which is then compressed to
``….jsonl.xz``. The number is the segment's end offset in the whole text of the tape. So an offset
in a tape stays valid when its text moves to another file. A reader that continues later stores only
this offset.

A flushed compressed stream would have three drawbacks. A learner writes 2 KB between two flushes,
which compresses poorly. A killed process would leave a file that other programs call corrupt. And
readers would need another way to find a torn line. Instead, the newest text can be followed and
searched like any log, and ``xzcat`` reads the rest. A separate thread compresses outside of the
interpreter lock, and no other thread waits for it.

Functions that read or open a tape raise `OSError` if it does not exist or cannot be read.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import lzma
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from decoupled_diloco.errors import StorageError
from decoupled_diloco.tape.records import FOLDER_NAME

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
"""Size of a segment. Doubling it saves less than 1 %, and each process has up to twice this size
uncompressed on disk."""

LINE_BYTES_MAX = 16 << 20
"""Readers skip a line longer than this; writers write none."""

PACKED_BYTES_MIN = 256 << 10
"""After the run, a newest text shorter than this stays uncompressed, for any reader."""

TEXT, COMPRESSED, FOLDER = ".jsonl", ".jsonl.xz", ".segments"

CORRUPT = (EOFError, lzma.LZMAError)
"""Exceptions that occur when a corrupted compressed segment is read."""

FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 19, "pb": 0}
    | {"mf": lzma.MF_HC4, "nice_len": 64, "depth": 4}
]
"""A tape is highly repetitive: long matches matter, optimal ones do not. The result is smaller than
that of ``xz -6``, three times as fast, with 4 MB of memory; see `benchmarks/tape_cost.py`."""

NICENESS = 10
"""Niceness of the thread that compresses: training and merging have priority."""


def _lower_priority() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@cache
def _compressor(_process: int) -> ThreadPoolExecutor:
    """Return this process's only compression thread, shared by up to a thousand simulated tapes.

    The process id is an argument so that a forked child creates its own thread.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="ddiloco-tape", initializer=_lower_priority)


class TapeSegment(NamedTuple):
    """A part of a tape that no longer grows: its file, and its start and end in the tape."""

    path: Path
    begin: int
    end: int

    def open(self) -> BinaryIO:
        if self.path.name.endswith(COMPRESSED):
            return cast(BinaryIO, lzma.open(self.path))
        return self.path.open("rb")


class Part(NamedTuple):
    """An open part of a tape's text."""

    file: BinaryIO  # the text of this part
    begin: int  # its start offset in the tape
    end: int | None  # its end offset; None for the newest text, which may grow


class Newest(NamedTuple):
    """The newest text of a tape: its offsets, and its file as (device, inode), if it exists."""

    begin: int
    end: int
    file: tuple[int, int] | None


class Line(NamedTuple):
    """A line of a tape, including its newline if already written, and the next line's offset."""

    text: bytes
    next: int


def tapes_in(folder: Path) -> list[Path]:
    """Return the tapes in a folder, each as the path of its newest text."""
    tapes = {path.with_suffix(TEXT) for path in folder.glob(f"*{FOLDER}")}
    return sorted(tapes.union(folder.glob(f"*{TEXT}")))


def segments_of(tape: Path) -> list[TapeSegment]:
    """Return the segments of a tape, in order; later text is in the tape's own file."""
    found = dict[int, Path]()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        # If a segment has both files, the compressed one sorts second and replaces the other.
        for path in sorted(_folder(tape).iterdir()):
            end, _, kind = path.name.partition(".")
            if end.isdecimal() and f".{kind}" in (TEXT, COMPRESSED):
                found[int(end)] = path
    ends = sorted(found)
    return [
        TapeSegment(found[end], begin, end) for begin, end in zip([0, *ends], ends, strict=False)
    ]


def open_newest(tape: Path) -> Part:
    """Open the newest text of a tape."""
    while True:
        begin = _segments_end(tape)
        try:
            file: BinaryIO = tape.open("rb")
        except FileNotFoundError:
            if not begin:
                raise
            file = io.BytesIO()  # the text has become a segment, and no new text exists yet
        # A segment may have been created after `begin` was read. Then `begin` is wrong for `file`.
        if _segments_end(tape) == begin:
            return Part(file, begin, None)
        file.close()


def newest_of(tape: Path) -> Newest:
    """Return the position of a tape's newest text; its end is the current length of the tape."""
    file, begin, _ = open_newest(tape)
    with file:
        if isinstance(file, io.BytesIO):
            return Newest(begin, begin, None)
        now = os.fstat(file.fileno())
        return Newest(begin, begin + now.st_size, (now.st_dev, now.st_ino))


def open_at(tape: Path, offset: int) -> Part:
    """Open the part of a tape that contains an offset."""
    while True:
        part = _open_segment(tape, offset) or open_newest(tape)
        if offset >= part.begin:
            return part
        part.file.close()  # the newest text has become a segment in the meantime


def lines_of(tape: Path, problems: list[str], offset: int = 0) -> Iterator[Line]:
    """Yield the lines of a tape from an offset to its current end.

    Args:
        tape: The path of the tape's newest text.
        problems: Receives a sentence for each missing or skipped part. For such a part the function
            yields a line without text.
        offset: The start of a line.
    """
    end: int | None = offset
    while end is not None:
        file, begin, end = open_at(tape, offset)
        with file, contextlib.suppress(*CORRUPT):
            file.seek(offset - begin)
            while text := file.readline(LINE_BYTES_MAX):
                if len(text) == LINE_BYTES_MAX and not text.endswith(b"\n"):
                    offset += len(text) + _skip_line(file)
                    problems.append(f"{tape}: a line longer than {LINE_BYTES_MAX >> 20} MiB")
                    yield Line(b"", offset)
                    continue
                if end is not None and not text.endswith(b"\n"):
                    break  # the segment is truncated
                offset += len(text)
                yield Line(text, offset)
        if end is not None and offset < end:
            problems.append(f"{tape}: {end - offset} bytes before byte {end} are missing")
            offset = end
            yield Line(b"", offset)


def _open_segment(tape: Path, offset: int) -> Part | None:
    while True:
        segment = next((each for each in segments_of(tape) if offset < each.end), None)
        if segment is None:
            return None
        with contextlib.suppress(FileNotFoundError):  # compressed in the meantime: search again
            return Part(segment.open(), segment.begin, segment.end)


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of the line and return the number of bytes read."""
    nbytes = 0
    while text := file.readline(LINE_BYTES_MAX):
        nbytes += len(text)
        if text.endswith(b"\n"):
            break
    return nbytes


def _segments_end(tape: Path) -> int:
    """Return the start offset of the newest text of a tape."""
    return max((segment.end for segment in segments_of(tape)), default=0)


def _folder(tape: Path) -> Path:
    return tape.with_suffix(FOLDER)


def open_to_append(tape: Path) -> BinaryIO:
    """Open the newest text of a tape for a writer, and end a torn last line with a newline."""
    tape.parent.mkdir(parents=True, exist_ok=True)
    file = tape.open("ab+", buffering=0)
    with contextlib.suppress(OSError):  # storage without locks: no segments are created there
        fcntl.flock(file, fcntl.LOCK_SH)
    try:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    except OSError:  # the disk is full
        file.close()
        raise
    return file


def end_segment(tape: Path, file: BinaryIO) -> bool:
    """Turn the newest text into a segment, unless another process also writes to it.

    Args:
        file: The file from `open_to_append`; the caller must not write to it if this succeeds.

    Returns:
        Whether the text became a segment.
    """
    try:
        # Every writer holds a shared lock. An exclusive lock proves that no other writer exists:
        # its open file would continue to grow beyond the segment's end.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), tape.stat()):
            return False  # the run was moved away, and another run has replaced it
        end = _segments_end(tape) + file.seek(0, os.SEEK_END)
        _folder(tape).mkdir(exist_ok=True)
        tape.rename(_folder(tape) / f"{end:012d}{TEXT}")
    except OSError:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        return False
    return True


def compress_later(tape: Path) -> Future[None] | None:
    """Schedule compression of a tape's segments; ``None`` if the interpreter is shutting down."""
    with contextlib.suppress(RuntimeError):
        return _compressor(os.getpid()).submit(_compress_segments, tape)
    return None


def _compress_segments(tape: Path) -> None:
    for segment in segments_of(tape):
        text = segment.path.with_name(f"{segment.end:012d}{TEXT}")
        try:
            if segment.path == text:
                _compress(text)
            text.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be compressed and stays as text: %s", text, error.strerror)


def _compress(text: Path) -> None:
    """Write a compressed file next to a text; it is durable when this returns."""
    whole = text.with_suffix(COMPRESSED)
    part = whole.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(lzma.compress(text.read_bytes(), filters=FILTERS))
            file.flush()
            os.fsync(file.fileno())  # before the text is deleted, so that one is always complete
        part.replace(whole)
    finally:
        part.unlink(missing_ok=True)


def pack_tapes(run_folder: str | Path) -> None:
    """Compress the tapes of a finished run, except short ones and those still being written.

    Raises:
        StorageError: The folder cannot be written.
    """
    run = Path(run_folder)
    try:
        for tape in tapes_in(run / FOLDER_NAME):
            with open_to_append(tape) as file:
                if file.tell() >= PACKED_BYTES_MIN and end_segment(tape, file):
                    tape.touch()
            _compress_segments(tape)
    except OSError as error:
        raise StorageError(
            f"the tapes in {run} cannot be compressed and stay as text: {error.strerror}"
        ) from error
