"""All disk operations of this package, in one class.

A crash can occur between any two operations and inside a write. A write is durable only once its
file has been synced. A rename or deletion is durable only once its folder has been synced. The
lab's virtual disk replaces this class and loses all changes that are not durable.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The operations on a real disk; each raises `OSError` on failure."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents durably."""
        if self.is_folder(path):
            return
        self.make_folder(path.parent)
        self.make_one_folder(path)
        try:
            self.sync(path.parent)
        except OSError:
            # An existing folder counts as durable, so a later attempt would skip the sync.
            path.rmdir()
            raise

    def make_one_folder(self, path: Path) -> None:
        """Create a folder whose parent exists."""
        path.mkdir(exist_ok=True)

    def open(self, path: Path) -> BinaryIO:
        """Open a file for reading and writing, unbuffered; create it if it does not exist."""
        return path.open("r+b" if path.exists() else "x+b", buffering=0)

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """Write all of the content at the file's current position."""
        view = memoryview(content)
        while view:  # an unbuffered write may accept only a part
            view = view[file.write(view) :]

    def truncate(self, file: BinaryIO, nbytes: int) -> None:
        """Truncate a file and seek to its end."""
        file.truncate(nbytes)
        file.seek(nbytes)

    def fill(self, path: Path, fill: Callable[[Path], None]) -> None:
        """Create a file by calling ``fill`` with its path."""
        fill(path)

    def sync_file(self, file: BinaryIO) -> None:
        """Make the content of an open file durable."""
        os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Make a file's content, or a folder's entries, durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file within its folder atomically, replacing any file of that name."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Create a hard link atomically; raise `FileExistsError` if the target exists."""
        os.link(source, target)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Delete a folder and its content, ignoring errors."""
        shutil.rmtree(path, ignore_errors=True)

    def put(self, path: Path, content: bytes | memoryview) -> None:
        """Write a whole file and create its parent folders, without a sync."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""
        return path.read_bytes()

    def reading(self, path: Path) -> BinaryIO:
        """Open a file for reading."""
        return path.open("rb")

    def exists(self, path: Path) -> bool:
        """Return whether a path exists. Unlike `Path.exists`, it raises if the disk fails."""
        return self._stat(path) is not None

    def is_folder(self, path: Path) -> bool:
        """Return whether a path is a folder."""
        found = self._stat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def size(self, path: Path) -> int:
        """Return the size of a file in bytes."""
        return path.stat().st_size

    def names(self, folder: Path) -> list[Path]:
        """Return the paths in a folder, in any order."""
        return list(folder.iterdir())

    @staticmethod
    def _stat(path: Path) -> os.stat_result | None:
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free_bytes(self, path: Path) -> int:
        """Return the free space of the disk that contains a path."""
        return shutil.disk_usage(path).free
