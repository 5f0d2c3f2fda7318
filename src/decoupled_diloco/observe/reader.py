"""Reading the event tape, after a run and during it; see `decoupled_diloco.observe.tape`."""

from __future__ import annotations

import errno
import heapq
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.observe.excerpt import excerpt
from decoupled_diloco.observe.open_files import open_files_allowed
from decoupled_diloco.observe.records import FOLDER_NAME, MERGED_NAME, Parser, Record
from decoupled_diloco.observe.segments import (
    Line,
    Newest,
    lines_of,
    newest_of,
    segments_of,
    tapes_in,
)

SKIMMED_BYTES = 1 << 20
"""How much of a tape is looked through at once where not every record matters."""


class TapeReader:
    """Reads the tape of a run: a run folder, a tape folder, or a single file, whole or torn.

    Iterating gives the records of all processes, ordered by wall-clock time; each process's own
    records stay in the order in which they were written. ``problems`` lists, once a pass is over,
    what could not be read, one sentence each.

    Args:
        path: The folder or file.

    Raises:
        StorageError: There is no tape. While iterating: a file is of another schema.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = _existing_files(self.path)
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[Record]:
        self.problems.clear()
        open_files_allowed(len(self.files))  # one that does not suffice tells at its first file
        streams = [_ordered(_read_file(file, self.problems)) for file in self.files]
        return (record for _, record in heapq.merge(*streams, key=lambda item: item[0]))


class Follower:
    """Reads a tape while it is being written. `poll` gives what has been added since.

    A folder or a file that is not there yet is no error. Records of one poll are ordered by wall
    time; a process that flushes late can bring older ones in a later poll.

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
        """The records that have been added since the last call.

        Raises:
            StorageError: A file cannot be read or is of another schema.
        """
        records = [record for file in tape_files(self.path) for record in self._read_on(file)]
        return sorted(records, key=read_on_order)

    def stream(self, *, skim: bool = True) -> Iterator[Record]:
        """What `poll` gives, one by one; to be read to its end. ``skim``: thinned as by `excerpt`.

        Of a long tape no more than a piece of each process is in memory.
        """
        files = tape_files(self.path)
        open_files_allowed(len(files))
        streams = [_ordered(self._read_on(file, skim=skim)) for file in files]
        return (record for _, record in heapq.merge(*streams, key=lambda item: item[0]))

    def replaced(self) -> bool:
        """Whether another run has taken the place: a tape is gone, another one, or shorter."""
        return any(self._is_another(path) for path in self._offsets)

    def _is_another(self, path: Path) -> bool:
        known = self._newest[path]
        if _is_as_before(path, known):
            return False
        try:
            now = newest_of(path)
        except OSError:
            return True
        files = {known.file, now.file} - {None}
        another = now.begin == known.begin and len(files) > 1
        return another or now.end < self._offsets[path]

    def _read_on(self, path: Path, *, skim: bool = False) -> Iterator[Record]:
        if path in self._newest and _is_as_before(path, self._newest[path]):
            return
        parser = self._parsers.setdefault(path, Parser(path, self.problems))
        try:
            self._newest[path] = newest_of(path)
            lines = lines_of(path, self.problems, self._offsets.setdefault(path, 0))
            for texts, following in _pieces(lines) if skim else _whole(lines):
                self._offsets[path] = following
                yield from filter(None, map(parser.parse, texts))
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _whole(lines: Iterable[Line]) -> Iterator[tuple[list[bytes], int]]:
    """Line by line, but one that is being written."""
    for line in lines:
        if line.text and not line.text.endswith(b"\n"):
            return
        yield [line.text], line.next


def _pieces(lines: Iterable[Line]) -> Iterator[tuple[list[bytes], int]]:
    """Lines of a piece of the tape that matter for the present state, and where the next begins."""
    piece, nbytes, following = list[bytes](), 0, 0
    for [text], following in _whole(lines):
        piece.append(text)
        nbytes += len(text)
        if nbytes >= SKIMMED_BYTES:
            yield excerpt(b"".join(piece), detail=False).splitlines(), following
            piece, nbytes = [], 0
    if piece:
        yield excerpt(b"".join(piece), detail=False).splitlines(), following


def _is_as_before(path: Path, known: Newest) -> bool:
    """Whether nothing was written since; what has become a segment is another file."""
    try:
        now = path.stat()
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == known.file and now.st_size == known.end - known.begin


def tape_files(path: Path) -> list[Path]:
    """The tapes of a run folder, a tape folder or a file; none if there is none yet."""
    if path.suffix == ".jsonl":
        return [path]
    merged = path / MERGED_NAME
    return tapes_in(path / FOLDER_NAME) or ([merged] if merged.is_file() else tapes_in(path))


def run_folder_of(path: Path) -> Path:
    """The run folder that a tape folder or a tape file is in; any other folder is one itself."""
    inside = path.parent if path.suffix == ".jsonl" else path
    return inside.parent if inside.resolve().name == FOLDER_NAME else inside


def check_name(path: Path) -> None:
    if path.is_file() and path.suffix != ".jsonl":
        raise StorageError(f"{path} is no event tape: give a .jsonl file, or its run folder")


def check_readable(path: str | Path, problems: list[str]) -> None:
    """What gave no record must have given no problem either: it is empty."""
    if problems:
        raise StorageError(
            f"{path} is no event tape: none of its lines can be read, the first one: {problems[0]}"
        )


def _existing_files(path: Path) -> list[Path]:
    check_name(path)
    if not path.exists() and not segments_of(path):
        raise ConfigError(f"{path} does not exist: give a run folder, or a .jsonl file of it")
    files = tape_files(path)
    if not files:
        raise StorageError(f"{path} holds no event tape: give a run folder, or a .jsonl file of it")
    return files


def _read_file(path: Path, problems: list[str]) -> Iterator[Record]:
    parser = Parser(path, problems)
    try:
        for line in lines_of(path, problems):
            record = parser.parse(line.text)
            if record is not None:
                yield record
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise StorageError(
                f"{path} cannot be read: a tape of many processes needs as many open files, and "
                "this system allows fewer: raise the limit with `ulimit -Hn`"
            ) from error
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _ordered(records: Iterable[Record]) -> Iterator[tuple[tuple[float, str, int, int], Record]]:
    """Sort keys that never fall, so that a clock that was set back does not shuffle a file."""
    latest = -math.inf
    for record in records:
        latest = max(latest, record.wall)
        yield (latest, record.who, record.life, record.seq), record


def read_on_order(record: Record) -> tuple[float, str, int, int]:
    """The order of records of several processes: by wall time, then by their process."""
    return (record.wall, record.who, record.life, record.seq)
