"""How this package reads and changes a disk: a handful of operations, one place for all of them.

A crash can come between any two of them, and inside a write. What is written, renamed or deleted is
sure to be there after a crash only once its file, or its folder for names, has been forced to the
disk. `simulate.disk` stands in for this class and loses what may be lost.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The operations, carried out; each raises `OSError` when it cannot be."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder with those above it, and waits until the disk has their names."""
        if self.is_folder(path):
            return
        self.make_folder(path.parent)
        self.make_one_folder(path)
        try:
            self.sync(path.parent)
        except OSError:
            path.rmdir()  # so that whoever tries again waits for its name
            raise

    def make_one_folder(self, path: Path) -> None:
        """Makes a folder whose parent is there."""
        path.mkdir(exist_ok=True)

    def open(self, path: Path) -> BinaryIO:
        """Opens a file for reading and writing, unbuffered; makes it if it is not there."""
        return path.open("r+b" if path.exists() else "x+b", buffering=0)

    def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
        """Writes at the file's place, all of it."""
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]

    def truncate(self, file: BinaryIO, nbytes: int) -> None:
        """Cuts a file off, and goes to its end."""
        file.truncate(nbytes)
        file.seek(nbytes)

    def fill(self, path: Path, fill: Callable[[Path], None]) -> None:
        """Makes a new file, which ``fill`` gives its content by path."""
        fill(path)

    def sync_file(self, file: BinaryIO) -> None:
        """Waits until the disk has an open file's bytes."""
        os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Waits until the disk has a file's bytes, or a folder's names."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file another name in its folder, at once, in place of who had it before."""
        source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Gives a file a second name, at once; raises `FileExistsError` if that is taken."""
        os.link(source, target)

    def remove(self, path: Path) -> None:
        """Deletes a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Deletes a folder and what is in it, as far as that can be done."""
        shutil.rmtree(path, ignore_errors=True)

    def put(self, path: Path, content: bytes | memoryview) -> None:
        """Makes a whole file, with the folders above it; nobody waits for the disk to have it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def read(self, path: Path) -> bytes:
        """All that is in a file."""
        return path.read_bytes()

    def reading(self, path: Path) -> BinaryIO:
        """Opens a file for reading."""
        return path.open("rb")

    def exists(self, path: Path) -> bool:
        """Whether something has this name; unlike `Path.exists`, never a guess."""
        return self._stat(path) is not None

    def is_folder(self, path: Path) -> bool:
        """Whether it is a folder."""
        found = self._stat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def size(self, path: Path) -> int:
        """Bytes of a file."""
        return path.stat().st_size

    def names(self, folder: Path) -> list[Path]:
        """What is in a folder, in no order."""
        return list(folder.iterdir())

    @staticmethod
    def _stat(path: Path) -> os.stat_result | None:
        try:
            return path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def free_bytes(self, path: Path) -> int:
        """How much can still be written where a path is."""
        return shutil.disk_usage(path).free
