"""How this package changes what is on a disk: a handful of operations, one place for all of them.

A crash can come between any two of them, and inside a write. What is written, renamed or deleted is
sure to be there after a crash only once its file, or its folder for names, has been forced to the
disk. `simulate.disk` stands in for this class and loses what may be lost.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


class Disk:
    """The operations, carried out; each raises `OSError` when it cannot be."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder with those above it, and waits until the disk has their names."""
        if path.is_dir():
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

    def remove(self, path: Path) -> None:
        """Deletes a file."""
        path.unlink()


DISK = Disk()
"""The machine's own."""
