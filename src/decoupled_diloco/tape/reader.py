"""Read the event tape, after a run or while it grows; see `decoupled_diloco.tape`."""

from __future__ import annotations

import errno
import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.storage.files import open_files_allowed
from decoupled_diloco.tape.excerpt import excerpt, progress
from decoupled_diloco.tape.records import FOLDER_NAME, MERGED_NAME, Parser, Record
from decoupled_diloco.tape.segments import Line, Newest, lines_of, newest_of, segments_of, tapes_in

SKIMMED_BYTES = 1 << 20
"""Size of a piece of a tape that `stream` reads and thins at once."""


class TapeReader:
    """Reads the tape of a run: a run folder, a tape folder, or a single file, whole or torn.

    Iteration yields the records of all processes, ordered by wall-clock time. The records of one
    process stay in the order in which they were written.

    Args:
        path: The folder or file.

    Attributes:
        files: The tape files.
        problems: One sentence for each part that could not be read; valid after an iteration.

    Raises:
        StorageError: The tape does not exist. While iterating: a file has another schema.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = _existing_files(self.path)
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[Record]:
        self.problems.clear()
        # If the limit is still too low, `_read_file` raises the error for the first such file.
        open_files_allowed(len(self.files))
        streams = [_ordered(_read_file(file, self.problems)) for file in self.files]
        return (record for _, record in heapq.merge(*streams, key=lambda item: item[0]))


class Follower:
    """Reads a tape while it is being written.

    A folder or a file that does not exist yet is not an error. The records of one poll are ordered
    by wall-clock time. If a process flushes late, a later poll can return older records.

    Args:
        path: A run folder, a tape folder, or a file (``.jsonl``).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.problems: list[str] = []
        self._parsers: dict[Path, Parser] = {}
        self._offsets: dict[Path, int] = {}
        self._newest: dict[Path, Newest] = {}

    def poll(self) -> list[Record]:
        """Return the records added since the last call.

        Raises:
            StorageError: A file cannot be read or has another schema.
        """
        records = [record for file in tape_files(self.path) for record in self._read_on(file)]
        return sorted(records, key=read_on_order)

    def stream(self, *, skim: bool = True) -> Iterator[Record]:
        """Yield the records of `poll` one by one; the caller must exhaust the iterator.

        At most one piece of each process's tape is in memory.

        Args:
            skim: Yield only the records of `excerpt`.
        """
        return self._stream(partial(excerpt, detail=False) if skim else None)

    def stream_progress(self) -> Iterator[Record]:
        """Yield the records since the last call that contain the run's phase and step."""
        return self._stream(progress)

    def _stream(self, thin: Callable[[bytes], bytes] | None) -> Iterator[Record]:
        files = tape_files(self.path)
        open_files_allowed(len(files))
        streams = [_ordered(self._read_on(file, thin)) for file in files]
        return (record for _, record in heapq.merge(*streams, key=lambda item: item[0]))

    def replaced(self) -> bool:
        """Whether another run has replaced this one: a tape is gone, different, or shorter."""
        return any(self._is_another(path) for path in self._offsets)

    def _is_another(self, path: Path) -> bool:
        known = self._newest[path]
        if _is_as_before(path, known):
            return False
        try:
            now = newest_of(path)
        except OSError:
            return True
        # A new segment changes both the start and the file. The same start in another file, or less
        # text than was already read, means another run's tape.
        files = {known.file, now.file} - {None}
        another = now.begin == known.begin and len(files) > 1
        return another or now.end < self._offsets[path]

    def _read_on(
        self, path: Path, thin: Callable[[bytes], bytes] | None = None
    ) -> Iterator[Record]:
        if path in self._newest and _is_as_before(path, self._newest[path]):
            return
        parser = self._parsers.setdefault(path, Parser(path, self.problems))
        try:
            self._newest[path] = newest_of(path)
            lines = lines_of(path, self.problems, self._offsets.setdefault(path, 0))
            for texts, following in _pieces(lines, thin) if thin else _whole(lines):
                self._offsets[path] = following
                yield from filter(None, map(parser.parse, texts))
        except StorageError:
            raise
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _whole(lines: Iterable[Line]) -> Iterator[tuple[list[bytes], int]]:
    """Yield line by line, except a last line that is still being written."""
    for line in lines:
        if line.text and not line.text.endswith(b"\n"):
            return
        yield [line.text], line.next


def _pieces(
    lines: Iterable[Line], thin: Callable[[bytes], bytes]
) -> Iterator[tuple[list[bytes], int]]:
    """Yield the thinned lines of each piece of the tape, and the offset of the next piece."""
    piece, nbytes, following = list[bytes](), 0, 0
    for [text], following in _whole(lines):
        piece.append(text)
        nbytes += len(text)
        if nbytes >= SKIMMED_BYTES:
            yield thin(b"".join(piece)).splitlines(), following
            piece, nbytes = [], 0
    if piece:
        yield thin(b"".join(piece)).splitlines(), following


def _is_as_before(path: Path, known: Newest) -> bool:
    """Whether nothing was written since; text that became a segment is in another file."""
    try:
        now = path.stat()
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == known.file and now.st_size == known.end - known.begin


def tape_files(path: Path) -> list[Path]:
    """Return the tapes of a run folder, a tape folder or a file; empty if there is none yet."""
    if path.suffix == ".jsonl":
        return [path]
    merged = path / MERGED_NAME
    return tapes_in(path / FOLDER_NAME) or ([merged] if merged.is_file() else tapes_in(path))


def run_folder_of(path: Path) -> Path:
    """Return the run folder of a tape folder or a tape file; any other folder is returned as is."""
    inside = path.parent if path.suffix == ".jsonl" else path
    return inside.parent if inside.resolve().name == FOLDER_NAME else inside


def check_name(path: Path) -> None:
    if path.is_file() and path.suffix != ".jsonl":
        raise StorageError(f"{path} is not an event tape: use a .jsonl file, or its run folder")


def check_readable(path: str | Path, problems: list[str]) -> None:
    """Raise StorageError if a tape without records has problems; an empty tape is valid."""
    if problems:
        raise StorageError(
            f"{path} is not an event tape: none of its lines can be read; first problem: "
            f"{problems[0]}"
        )


def _existing_files(path: Path) -> list[Path]:
    check_name(path)
    if not path.exists() and not segments_of(path):
        raise ConfigError(f"{path} does not exist: use a run folder, or a .jsonl file in it")
    files = tape_files(path)
    if not files:
        raise StorageError(f"{path} has no event tape: use a run folder, or a .jsonl file in it")
    return files


def _read_file(path: Path, problems: list[str]) -> Iterator[Record]:
    parser = Parser(path, problems)
    try:
        for line in lines_of(path, problems):
            record = parser.parse(line.text)
            if record is not None:
                yield record
    except StorageError:
        raise
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise StorageError(
                f"{path} cannot be read: the limit of open files is too low for a tape with a file "
                "per process: raise the limit with `ulimit -Hn`"
            ) from error
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _ordered(records: Iterable[Record]) -> Iterator[tuple[tuple[float, str, int, int], Record]]:
    """Yield records with sort keys that never decrease, also if the wall clock was set back."""
    latest = -math.inf
    for record in records:
        latest = max(latest, record.wall)
        yield (latest, record.process, record.life, record.seq), record


def read_on_order(record: Record) -> tuple[float, str, int, int]:
    """Sort key for the records of several processes: wall-clock time, then process."""
    return (record.wall, record.process, record.life, record.seq)
