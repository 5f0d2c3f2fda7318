"""A process's tape on the disk: the newest text, and compressed segments of all that was before.

``RUN/tape/shard-0.jsonl`` is appended to. Once it is `SEGMENT_BYTES` long it becomes a segment,
``RUN/tape/shard-0.segments/000004194411.jsonl``, which is then compressed to ``….jsonl.xz``; the
number says where in the whole text of the tape it ends. So a place in a tape is one number for as
long as the tape is there, whichever file it is in. A reader that goes on later keeps only that.

Why not a compressed stream that is flushed: a learner writes two kilobytes between two flushes, of
which little can be saved, a killed process would leave a file that other programs call corrupt, and
readers would need another way to find a torn line. The newest text is written, followed, searched
and torn like any log; ``xzcat`` reads the rest. Compression is a thread's of its own, outside the
interpreter's lock, and no other thread waits for it.

What reads or opens a tape raises `OSError` if there is none, or if it cannot be read or opened.
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
from decoupled_diloco.observe.records import FOLDER_NAME

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
"""Where a segment ends. Twice as long ones are not smaller by more than a hundredth, and this much
of each process's tape, at most twice, is on the disk as it is."""

LINE_BYTES_MAX = 16 << 20
"""A line longer than this is left out; none is written."""

PACKED_BYTES_MIN = 256 << 10
"""Once the writer is gone, a newest text that is shorter stays as it is, for any reader."""

TEXT, COMPRESSED, FOLDER = ".jsonl", ".jsonl.xz", ".segments"

CORRUPT = (EOFError, lzma.LZMAError)
"""What reading a compressed segment raises that a disk has spoilt."""

FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 19, "pb": 0}
    | {"mf": lzma.MF_HC4, "nice_len": 64, "depth": 4}
]
"""A tape says nearly the same again and again: long matches matter, the very best ones do not.
Smaller than ``xz -6`` makes it, three times as fast, in 4 MB; see `benchmarks/tape.py`."""

NICENESS = 10
"""Niceness of the thread that compresses: training and merging go first."""


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@cache
def _compressor(_process: int) -> ThreadPoolExecutor:
    """One thread of a process: a thousand tapes of a virtual world fill up together."""
    return ThreadPoolExecutor(1, thread_name_prefix="ddiloco-tape", initializer=_give_way)


class TapeSegment(NamedTuple):
    """A part of a tape that does not grow: its file, and where in the tape it begins and ends."""

    path: Path
    begin: int
    end: int

    def open(self) -> BinaryIO:
        if self.path.name.endswith(COMPRESSED):
            return cast(BinaryIO, lzma.open(self.path))
        return self.path.open("rb")


class Part(NamedTuple):
    """Some of a tape's text."""

    file: BinaryIO  # the text, from its beginning
    begin: int  # where in the tape that is
    end: int | None  # where it ends; None for the newest text, which may grow


class Newest(NamedTuple):
    """The newest text of a tape: its place in the tape, and which file it is, if there is one."""

    begin: int
    end: int
    file: tuple[int, int] | None


class Line(NamedTuple):
    """A line of a tape with its end, if it has one yet, and where in the tape the next begins."""

    text: bytes
    next: int


def tapes_in(folder: Path) -> list[Path]:
    """The tapes in a folder, each by the name of its newest text."""
    tapes = {path.with_suffix(TEXT) for path in folder.glob(f"*{FOLDER}")}
    return sorted(tapes.union(folder.glob(f"*{TEXT}")))


def segments_of(tape: Path) -> list[TapeSegment]:
    """The segments of a tape, in order; what is behind the last is in the tape's own file."""
    found = dict[int, Path]()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(_folder(tape).iterdir()):  # the compressed one of two comes second
            end, _, kind = path.name.partition(".")
            if end.isdecimal() and f".{kind}" in (TEXT, COMPRESSED):
                found[int(end)] = path
    ends = sorted(found)
    return [
        TapeSegment(found[end], begin, end) for begin, end in zip([0, *ends], ends, strict=False)
    ]


def open_newest(tape: Path) -> Part:
    """The newest text of a tape."""
    while True:
        begin = _segments_end(tape)
        try:
            file: BinaryIO = tape.open("rb")
        except FileNotFoundError:
            if not begin:
                raise
            file = io.BytesIO()  # it has become a segment, and the next text is not begun yet
        if _segments_end(tape) == begin:
            return Part(file, begin, None)
        file.close()


def newest_of(tape: Path) -> Newest:
    """Where the newest text of a tape is, and with it how long the tape is now."""
    file, begin, _ = open_newest(tape)
    with file:
        if isinstance(file, io.BytesIO):
            return Newest(begin, begin, None)
        now = os.fstat(file.fileno())
        return Newest(begin, begin + now.st_size, (now.st_dev, now.st_ino))


def open_at(tape: Path, offset: int) -> Part:
    """The part of a tape that an offset falls into."""
    while True:
        part = _open_segment(tape, offset) or open_newest(tape)
        if offset >= part.begin:
            return part
        part.file.close()  # the newest text has become a segment meanwhile


def lines_of(tape: Path, problems: list[str], offset: int = 0) -> Iterator[Line]:
    """The lines of a tape from an offset on, where one begins, to where it ends now.

    What is missing in a segment is told to ``problems``; a line without text leads behind it.
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
                    break  # the file was cut off
                offset += len(text)
                yield Line(text, offset)
        if end is not None and offset < end:
            problems.append(f"{tape}: {end - offset} bytes before byte {end} of it are missing")
            offset = end
            yield Line(b"", offset)


def _open_segment(tape: Path, offset: int) -> Part | None:
    while True:
        segment = next((each for each in segments_of(tape) if offset < each.end), None)
        if segment is None:
            return None
        with contextlib.suppress(FileNotFoundError):  # it was compressed meanwhile
            return Part(segment.open(), segment.begin, segment.end)


def _skip_line(file: BinaryIO) -> int:
    """Reads on behind a line's end; how many bytes that were."""
    nbytes = 0
    while text := file.readline(LINE_BYTES_MAX):
        nbytes += len(text)
        if text.endswith(b"\n"):
            break
    return nbytes


def _segments_end(tape: Path) -> int:
    """Where the newest text of a tape begins."""
    return max((segment.end for segment in segments_of(tape)), default=0)


def _folder(tape: Path) -> Path:
    return tape.with_suffix(FOLDER)


def open_to_append(tape: Path) -> BinaryIO:
    """Opens the newest text of a tape for a writer; a torn last line is ended first."""
    tape.parent.mkdir(parents=True, exist_ok=True)
    file = tape.open("ab+", buffering=0)
    with contextlib.suppress(OSError):  # some storages have no locks, and then no segments
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
    """Makes a segment of the newest text, unless another process writes there, too.

    ``file``, from `open_to_append`, is of no use afterwards, if it has become one.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), tape.stat()):
            return False  # the run was moved aside, and another has taken its place
        end = _segments_end(tape) + file.seek(0, os.SEEK_END)
        _folder(tape).mkdir(exist_ok=True)
        tape.rename(_folder(tape) / f"{end:012d}{TEXT}")
    except OSError:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        return False
    return True


def compress_later(tape: Path) -> Future[None] | None:
    """Has the segments of a tape compressed that are not yet; ``None``: this process ends."""
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
            logger.warning("%s stays as it is, not compressed: %s", text, error.strerror)


def _compress(text: Path) -> None:
    """Puts a compressed file beside a text; the disk has it then."""
    whole = text.with_suffix(COMPRESSED)
    part = whole.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(lzma.compress(text.read_bytes(), filters=FILTERS))
            file.flush()
            os.fsync(file.fileno())
        part.replace(whole)
    finally:
        part.unlink(missing_ok=True)


def pack_tapes(run_folder: str | Path) -> None:
    """Compresses the tapes of a run that is over, but short ones, and those still written to.

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
            f"the tapes in {run} cannot be compressed: {error.strerror}: they stay as they are"
        ) from error
