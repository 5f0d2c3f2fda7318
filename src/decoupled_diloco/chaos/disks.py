"""The shards' disks: full, so that the kernel says ENOSPC, or lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from decoupled_diloco.chaos import spaces
from decoupled_diloco.syncer.durable import DURABLE


class Disks:
    """The durable folders of a run's shards.

    A disk that is to be full is a file system of its own, in memory, for as long as the run goes
    on; it is seen by this process and its children only, and its files come to the run folder at
    the end.

    Args:
        run_folder: The run's folder.
        mounted: The shards whose disks are to be full at some time.

    Raises:
        Error: it cannot be mounted.
    """

    def __init__(self, run_folder: Path, mounted: Iterable[str] = ()) -> None:
        self._folder = run_folder / DURABLE
        self._mounted = tuple(mounted)
        for name in self._mounted:
            path = self._folder / name
            path.mkdir(parents=True, exist_ok=True)
            spaces.command("mount", "-t", "tmpfs", "tmpfs", str(path))

    def fill(self, name: str) -> None:
        """Makes a shard's disk full: no further byte fits."""
        stat = os.statvfs(self._folder / name)
        used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        self._resize(name, str(max(used, stat.f_frsize)))

    def free(self, name: str) -> None:
        """Gives a shard's disk space again."""
        self._resize(name, "50%")

    def lose(self, name: str) -> None:
        """Deletes everything on a shard's disk; the shard does not run meanwhile."""
        folder = self._folder / name
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()

    def close(self) -> None:
        """Moves the files to the run folder, once no process uses them any more.

        Raises:
            Error: a disk is still in use.
        """
        while self._mounted:
            name, *rest = self._mounted
            path = self._folder / name
            copy = path.with_name(f".{name}.copy")
            shutil.copytree(path, copy)
            spaces.command("umount", str(path))
            path.rmdir()
            copy.rename(path)
            self._mounted = tuple(rest)

    def _resize(self, name: str, size: str) -> None:
        path = self._folder / name
        spaces.command("mount", "-o", f"remount,size={size}", str(path))
