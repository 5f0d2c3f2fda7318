"""Reading the event tape, after a run and during it; see `decoupled_diloco.observe.tape`."""

from __future__ import annotations

import contextlib
import errno
import heapq
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.observe.open_files import open_files_allowed
from decoupled_diloco.observe.records import (
    FOLDER_NAME,
    MERGED_NAME,
    Parser,
    Record,
    format_record,
)


class TapeReader:
    """Reads the tape of a run: a run folder, a tape folder, or a single file, whole or torn.

    Iterating gives the records of all processes, ordered by wall-clock time; each process's own
    records stay in the order in which they were written. ``problems`` lists, once a pass is over,
    what could not be read, one sentence each.

    Args:
        path: The folder or file.

    Raises:
        StorageError: There is no tape. While iterating: a file is of a newer schema.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = _tape_files(self.path)
        self.problems: list[str] = []

    def __iter__(self) -> Iterator[Record]:
        self.problems.clear()
        open_files_allowed(len(self.files))  # one that does not suffice tells at its first file
        streams = [_ordered(_read_file(file, self.problems)) for file in self.files]
        return (record for _, record in heapq.merge(*streams, key=lambda item: item[0]))


def read_tape(path: str | Path) -> Iterator[Record]:
    """The records of a run folder, a tape folder or a file, merged by (wall time, who, seq).

    Torn lines are skipped; use `TapeReader` to hear of them.

    Raises:
        StorageError: There is no tape there, or it is of a newer schema.
    """
    return iter(TapeReader(path))


def merge_tapes(run_folder: str | Path) -> Path:
    """Writes ``RUN/tape.jsonl`` from the files of ``RUN/tape``: whole or not at all.

    Returns:
        The merged file.

    Raises:
        StorageError: There is no tape, or the merged file cannot be written.
    """
    folder = Path(run_folder)
    merged = folder / MERGED_NAME
    torn = merged.with_name(f".{MERGED_NAME}.{os.getpid()}.part")
    records = read_tape(folder / FOLDER_NAME)
    try:
        with torn.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(format_record(record) for record in records)
        torn.replace(merged)
    except OSError as error:
        with contextlib.suppress(OSError):  # what matters is the first error
            torn.unlink()
        raise StorageError(f"{merged} cannot be written: {error.strerror}") from error
    return merged


class Follower:
    """Reads a tape while it is being written. `poll` gives what has been added since.

    A folder or a file that is not there yet is no error. Records of one poll are ordered by wall
    time; a process that flushes late can bring older ones in a later poll.

    Args:
        path: A run folder, a tape folder, or a file (``.jsonl``).
        inner: A folder of another name than a tape folder's is a run folder.
    """

    def __init__(self, path: str | Path, *, inner: bool = True) -> None:
        path = Path(path)
        self._single = path.suffix == ".jsonl"
        within = inner and not self._single and path.name != FOLDER_NAME
        self.path = path / FOLDER_NAME if within else path
        self.problems: list[str] = []
        self._parsers: dict[Path, Parser] = {}
        self._offsets: dict[Path, int] = {}
        self._files: dict[Path, tuple[int, int]] = {}

    def poll(self) -> list[Record]:
        """The records that have been added since the last call.

        Raises:
            StorageError: A file cannot be read or is of a newer schema.
        """
        files = [self.path] if self._single else sorted(self.path.glob("*.jsonl"))
        records = [record for file in files for record in self._read_on(file)]
        return sorted(records, key=read_on_order)

    def replaced(self) -> bool:
        """Whether another run has taken the place: a file is gone, another one, or shorter."""
        return any(self._is_another(path) for path in self._offsets)

    def _is_another(self, path: Path) -> bool:
        try:
            now = path.stat()
        except OSError:
            return True
        return now.st_size < self._offsets[path] or (now.st_dev, now.st_ino) != self._files[path]

    def _read_on(self, path: Path) -> Iterator[Record]:
        parser = self._parsers.setdefault(path, Parser(path, self.problems))
        try:
            with path.open("rb") as file:
                opened = os.fstat(file.fileno())
                self._files.setdefault(path, (opened.st_dev, opened.st_ino))
                file.seek(self._offsets.get(path, 0))
                added = file.read()
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        whole = added[: added.rfind(b"\n") + 1]
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        for line in whole.splitlines():
            record = parser.parse(line)
            if record is not None:
                yield record


def follow(folder: str | Path) -> Follower:
    """An incremental reader of a run folder, a tape folder or a file that is still growing."""
    return Follower(folder)


def _tape_files(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".jsonl":
            raise StorageError(f"{path} is no event tape: give a .jsonl file, or its run folder")
        return [path]
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give a run folder, or a .jsonl file of it")
    inner = sorted((path / FOLDER_NAME).glob("*.jsonl"))
    files = inner or ([path / MERGED_NAME] if (path / MERGED_NAME).is_file() else [])
    files = files or sorted(path.glob("*.jsonl"))
    if not files:
        raise StorageError(f"{path} holds no event tape: give a run folder, or a .jsonl file of it")
    return files


def _read_file(path: Path, problems: list[str]) -> Iterator[Record]:
    parser = Parser(path, problems)
    try:
        with path.open("rb") as file:
            for line in file:
                record = parser.parse(line)
                if record is not None:
                    yield record
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise StorageError(
                f"{path} cannot be read: a tape of many processes needs as many open files, and "
                "this system allows fewer: raise the limit with `ulimit -Hn`, or give the run's "
                f"{MERGED_NAME}, which is one file"
            ) from error
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _ordered(records: Iterable[Record]) -> Iterator[tuple[tuple[float, str, int, int], Record]]:
    """Sort keys that never fall, so that a clock that was set back does not shuffle a file."""
    latest = -math.inf
    for record in records:
        latest = max(latest, record.wall)
        yield (latest, record.who, record.life, record.seq), record


def read_on_order(record: Record) -> tuple[float, str, int, int]:
    """The order of records of several processes: by wall time, then by who wrote them."""
    return (record.wall, record.who, record.life, record.seq)
