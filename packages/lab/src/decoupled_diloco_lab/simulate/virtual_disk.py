"""A disk that can crash between any two operations, lose unsynced data, and be full.

`SimulatedDisk` works on real files and keeps a log of its operations. `remains` computes what may
be left after a crash: synced files and names for certain, and of the rest whatever a `Loss` leaves.
Any subset of a file's writes since its last sync may remain, also torn or as zeros. Any subset of
a folder's new names, renames and deletions may remain, too. Most file systems guarantee more order
than that. A sync may have no effect.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from decoupled_diloco.runtime.disk import Disk
from decoupled_diloco_lab.simulate.choices import Choices

Kind = Literal[
    "folder",
    "create",
    "write",
    "truncate",
    "sync",
    "sync names",
    "open",
    "rename",
    "link",
    "remove",
]

Content = dict[Path, bytes | None]
"""Contents of a folder by relative path: the bytes of a file, ``None`` for a folder."""

SECTOR_BYTES = 512
"""Size of the unit that a disk writes atomically."""


Trouble = Callable[[Path, bool], None]
"""Called with a path and whether the operation needs space. It raises the operation's error."""


class FailingDisk(Disk):
    """A disk on which reads and queries can fail, too, as on a network file system.

    Args:
        trouble: Called before each operation.
    """

    def __init__(self, trouble: Trouble = lambda path, needs_room: None) -> None:
        self._trouble = trouble
        self._handles: list[BinaryIO] = []

    def exists(self, path: Path) -> bool:
        """See `Disk`."""
        self._trouble(path, False)
        return super().exists(path)

    def is_folder(self, path: Path) -> bool:
        """See `Disk`."""
        self._trouble(path, False)
        return super().is_folder(path)

    def size(self, path: Path) -> int:
        """See `Disk`."""
        self._trouble(path, False)
        return super().size(path)

    def names(self, folder: Path) -> list[Path]:
        """See `Disk`."""
        self._trouble(folder, False)
        return super().names(folder)

    def read(self, path: Path) -> bytes:
        """See `Disk`."""
        self._trouble(path, False)
        return super().read(path)


class UnsyncedDisk(FailingDisk):
    """The real disk with syncs left out: a killed process loses nothing that it has written."""

    def close(self) -> None:
        """Close every file, as the end of a process does."""
        for file in self._handles:
            file.close()
        self._handles.clear()

    def open(self, path: Path) -> BinaryIO:
        """See `Disk`."""
        self._trouble(path, True)
        file = super().open(path)
        self._handles.append(file)
        return file

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """See `Disk`."""
        self._trouble(Path(file.name), True)
        super().write(file, content)

    def fill(self, path: Path, fill: Callable[[Path], None]) -> None:
        """See `Disk`."""
        self._trouble(path, True)
        super().fill(path, fill)

    def put(self, path: Path, content: bytes | memoryview) -> None:
        """See `Disk`."""
        self._trouble(path, True)
        super().put(path, content)

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        self._trouble(target, False)
        super().rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        self._trouble(target, False)
        super().link(source, target)

    def sync_file(self, file: Any) -> None:
        """Do nothing."""

    def sync(self, path: Path) -> None:
        """Do nothing."""


class CrashError(BaseException):
    """The process is killed here. A `BaseException`, so that its code does not catch it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the disk.

    Attributes:
        kind: The kind of operation.
        path: Its path, relative to the simulated folder. For a rename, the new name.
        file: Number of the file, which it keeps when it is renamed.
        start: Offset of a write, or the length to which a file is truncated, in bytes.
        content: The bytes that were written.
        source: The old name of a rename.
    """

    kind: Kind
    path: Path
    file: int = 0
    start: int = 0
    content: bytes = b""
    source: Path = Path()


class SimulatedDisk(FailingDisk):
    """Works on the files below a folder and keeps a log of all operations.

    Args:
        root: The folder. Its present contents count as synced.
        crash_at: Number of operations after which the process is killed.
        full: Returns whether the disk is full at the operation with this number.
        trouble: See `FailingDisk`.

    Attributes:
        before: The contents of the folder at the start.
        log: All operations since.
        tried: Number of operations that were attempted.
    """

    def __init__(
        self,
        root: Path,
        crash_at: int | None = None,
        full: Callable[[int], bool] = lambda number: False,
        trouble: Trouble = lambda path, needs_room: None,
    ) -> None:
        super().__init__(trouble)
        self.root = root
        self.before = read_folder(root)
        self.log: list[Operation] = []
        self.tried = 0
        self._crash_at = crash_at
        self._full = full
        self._files = {path: n for n, path in enumerate(_files_of(self.before))}
        self._folders = {path for path, content in self.before.items() if content is None}
        self._next = len(self._files)
        self._open: dict[int, int] = {}

    def _try(self, kind: Kind, path: Path) -> Path:
        """Count an operation, raise its error if it must fail, and return its relative path."""
        self.tried += 1
        if self._crash_at is not None and self.tried > self._crash_at:
            raise CrashError
        self._trouble(path, kind not in ("open", "remove"))
        if kind not in ("open", "remove") and self._full(self.tried):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return path.relative_to(self.root)

    def _did(self, operation: Operation) -> None:
        self.log.append(operation)

    def make_one_folder(self, path: Path) -> None:
        """See `Disk`."""
        name = self._try("folder", path)
        super().make_one_folder(path)
        self._know_folders(name.parent)
        self._folders.add(name)
        self._did(Operation("folder", name))

    def open(self, path: Path) -> BinaryIO:
        """See `Disk`."""
        is_new = not path.exists()
        name = self._try("create" if is_new else "open", path)
        file = super().open(path)
        if is_new:
            self._create(name)
        self._open[file.fileno()] = self._known(name)
        self._handles.append(file)
        return file

    def close(self) -> None:
        """Close every file, as the end of a process does."""
        for file in self._handles:
            file.close()
        self._handles.clear()

    def _known(self, name: Path) -> int:
        """Return the number of a file. A file of another process counts as synced."""
        if name not in self._files:
            number = self._create(name)
            self._did(Operation("write", name, number, 0, (self.root / name).read_bytes()))
            self._did(Operation("sync", name, number))
            self._did(Operation("sync names", name.parent))
        return self._files[name]

    def _know_folders(self, folder: Path) -> None:
        """Log the folders that another process has created. They count as synced."""
        for path in (*reversed(folder.parents), folder):
            if path.parts and path not in self._folders:
                self._folders.add(path)
                self._did(Operation("folder", path))
                self._did(Operation("sync names", path.parent))

    def _create(self, name: Path) -> int:
        self._know_folders(name.parent)
        self._files[name] = self._next
        self._did(Operation("create", name, self._next))
        self._next += 1
        return self._files[name]

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """See `Disk`: if the write fails, the first half of the content is written."""
        start, whole = file.tell(), bytes(content)
        path = Path(file.name)
        number = self._open[file.fileno()]
        try:
            name = self._try("write", path)
        except OSError:
            half = whole[: len(whole) // 2]
            super().write(file, half)
            self._did(Operation("write", path.relative_to(self.root), number, start, half))
            raise
        super().write(file, whole)
        self._did(Operation("write", name, number, start, whole))

    def truncate(self, file: BinaryIO, nbytes: int) -> None:
        """See `Disk`."""
        name = self._try("truncate", Path(file.name))
        super().truncate(file, nbytes)
        self._did(Operation("truncate", name, self._open[file.fileno()], nbytes))

    def fill(self, path: Path, fill: Callable[[Path], None]) -> None:
        """See `Disk`."""
        name = self._try("create", path)
        if name not in self._files:
            self._create(name)
        self._try("write", path)
        super().fill(path, fill)
        self._did(Operation("truncate", name, self._files[name], 0))
        self._did(Operation("write", name, self._files[name], 0, path.read_bytes()))

    def sync_file(self, file: BinaryIO) -> None:
        """See `Disk`."""
        name = self._try("sync", Path(file.name))
        self._did(Operation("sync", name, self._open[file.fileno()]))

    def sync(self, path: Path) -> None:
        """See `Disk`."""
        kind: Kind = "sync names" if path.is_dir() else "sync"
        name = self._try(kind, path)
        self._did(Operation(kind, name, self._files.get(name, 0)))

    def rename(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        name = self._try("rename", target)
        super().rename(source, target)
        before = source.relative_to(self.root)
        self._files[name] = self._files.pop(before)
        self._did(Operation("rename", name, self._files[name], source=before))

    def remove(self, path: Path) -> None:
        """See `Disk`."""
        name = self._try("remove", path)
        number = self._known(name) if path.exists() else 0
        super().remove(path)
        del self._files[name]
        self._did(Operation("remove", name, number))

    def link(self, source: Path, target: Path) -> None:
        """See `Disk`."""
        name = self._try("link", target)
        super().link(source, target)
        self._files[name] = self._files[source.relative_to(self.root)]
        self._did(Operation("link", name, self._files[name]))

    def put(self, path: Path, content: bytes | memoryview) -> None:
        """See `Disk`."""
        path.parent.mkdir(parents=True, exist_ok=True)  # not logged: no caller relies on them
        with self.open(path) as file:
            self.truncate(file, 0)
            self.write(file, content)

    def remove_folder(self, path: Path) -> None:
        """See `Disk`."""
        for file in sorted(path.rglob("*")):
            if file.is_file():
                self.remove(file)
        super().remove_folder(path)


@dataclass(frozen=True)
class Loss:
    """The effect of a crash on unsynced data: probabilities, drawn from ``choices``.

    Attributes:
        choices: The random stream.
        names: Probability that a new name, a rename or a deletion is lost.
        writes: Probability that a write or a truncation is lost.
        torn: Probability that only some sectors of a write remain. The others are zeros.
        zeros: Probability that a lost write still extends the file, with zeros.
        lies: Probability that a sync had no effect.
    """

    choices: Choices
    names: float = 0.0
    writes: float = 0.0
    torn: float = 0.0
    zeros: float = 0.0
    lies: float = 0.0

    def content(self, operation: Operation) -> bytes | None:
        """Draw what remains of an unsynced write; ``None``: nothing."""
        content = operation.content
        if self.choices.chance(self.writes):
            return bytes(len(content)) if self.choices.chance(self.zeros) else None
        if self.choices.chance(self.torn):
            sectors = range(0, len(content), SECTOR_BYTES)
            parts = [content[at : at + SECTOR_BYTES] for at in sectors]
            return b"".join(p if self.choices.chance(0.5) else bytes(len(p)) for p in parts)
        return content


NO_LOSS = Loss(Choices(0))
"""A crash that loses nothing."""


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    unsynced: list[Operation] = field(default_factory=list)


@dataclass
class _Names:
    """The file number of each name; -1 for a folder."""

    known: dict[Path, int]
    unsynced: dict[Path, list[Operation]] = field(default_factory=dict)

    def apply(self, operation: Operation) -> None:
        match operation.kind:
            case "folder":
                self.known[operation.path] = -1
            case "remove":
                if self.known.get(operation.path) == operation.file:
                    del self.known[operation.path]
            case "rename" if self.known.get(operation.source) == operation.file:
                del self.known[operation.source]
        if operation.kind in ("create", "rename", "link"):
            self.known[operation.path] = operation.file


def remains(before: Mapping[Path, bytes | None], log: Iterable[Operation], loss: Loss) -> Content:
    """Draw the contents of a disk after a crash.

    Args:
        before: The synced contents at the start of the log.
        log: All operations since.
        loss: Determines which unsynced data is lost.

    Returns:
        The contents by relative path.
    """
    names = _Names({path: -1 for path, content in before.items() if content is None})
    files: dict[int, _File] = {}
    for number, path in enumerate(_files_of(before)):
        files[number] = _File(bytearray(before[path] or b""))
        names.known[path] = number
    for operation in log:
        _happen(operation, names, files, loss)
    for unsynced in names.unsynced.values():
        for operation in unsynced:  # including those of removed folders, which had no files left
            if not loss.choices.chance(loss.names):
                names.apply(operation)
    for file in files.values():
        _lose(file, loss)
    return {
        path: None if number < 0 else bytes(files[number].content)
        for path, number in names.known.items()
        if all(names.known.get(above) == -1 for above in path.parents if above.parts)
    }


def _happen(operation: Operation, names: _Names, files: dict[int, _File], loss: Loss) -> None:
    match operation.kind:
        case "create" | "rename" | "link" | "remove" | "folder":
            names.unsynced.setdefault(operation.path.parent, []).append(operation)
            files.setdefault(operation.file, _File())
        case "write" | "truncate":
            files[operation.file].unsynced.append(operation)
        case "sync" if not loss.choices.chance(loss.lies):
            file = files[operation.file]
            for earlier in file.unsynced:
                _write(file, earlier, earlier.content)
            file.unsynced.clear()
        case "sync names" if not loss.choices.chance(loss.lies):
            for earlier in names.unsynced.pop(operation.path, []):
                names.apply(earlier)


def _lose(file: _File, loss: Loss) -> None:
    for operation in file.unsynced:
        if operation.kind == "truncate":
            if not loss.choices.chance(loss.writes):
                _write(file, operation, b"")
        else:
            content = loss.content(operation)
            if content is not None:
                _write(file, operation, content)


def _write(file: _File, operation: Operation, content: bytes) -> None:
    if operation.kind == "truncate":
        del file.content[operation.start :]
        return
    file.content.extend(bytes(max(0, operation.start - len(file.content))))
    file.content[operation.start : operation.start + len(content)] = content


def read_folder(root: Path) -> Content:
    """Read everything below a folder."""
    return {
        path.relative_to(root): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def write_folder(root: Path, content: Mapping[Path, bytes | None]) -> None:
    """Write contents below a new folder."""
    root.mkdir(parents=True)
    for path, content_of in sorted(content.items()):
        if content_of is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content_of)


def _files_of(content: Mapping[Path, bytes | None]) -> list[Path]:
    return sorted(path for path, content_of in content.items() if content_of is not None)


def lose_power(disk: SimulatedDisk, loss: Loss) -> None:
    """Replace the files that a process has touched by what a crash of its machine leaves of them.

    Files that another process has changed since stay as they are: the storage has those changes
    instead of the lost writes.
    """
    rest, written = remains(disk.before, disk.log, loss), remains(disk.before, disk.log, NO_LOSS)
    touched = {name for each in disk.log for name in (each.path, each.source)} - {Path()}
    theirs = {name for name in touched if _content(disk.root / name) != written.get(name)}
    for operation in disk.log:
        for name in {operation.path, operation.source} - {Path()} - theirs:
            _put_back(disk.root / name, rest, name)


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _put_back(path: Path, rest: Content, name: Path) -> None:
    content = rest.get(name)
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    elif path.is_file():
        path.unlink()
