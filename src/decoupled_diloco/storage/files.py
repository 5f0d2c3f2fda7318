"""Disk queries that raise `StorageError`, and atomic writes of small files."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from decoupled_diloco.errors import StorageError
from decoupled_diloco.runtime import runtime

NOT_JSON = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions that occur if text is not JSON or does not have the expected structure."""

SPARE = 100
"""Number of open files besides those of a tape: libraries, logs, connections."""


def exists(path: Path) -> bool:
    """Return whether a file or folder exists.

    Raises:
        StorageError: The disk cannot be read.
    """
    try:
        return runtime().disk.exists(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder.

    Raises:
        StorageError: The disk cannot be read.
    """
    try:
        return runtime().disk.is_folder(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def names_in(folder: Path) -> list[Path]:
    """Return the paths in a folder, in any order; empty if the folder does not exist.

    Raises:
        StorageError: The disk cannot be read.
    """
    try:
        return runtime().disk.names(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error.strerror or error}") from error


def size_of(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        StorageError: The file is missing, or the disk cannot be read.
    """
    try:
        return runtime().disk.size(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically and return when both the text and the new name are durable.

    Raises:
        StorageError: The file cannot be written. It has its former text, or the new text if only
            the sync of the new name failed.
    """
    part, disk = path.with_suffix(".part"), runtime().disk
    # The text must be durable before the rename: otherwise a crash could leave the final name with
    # an empty file.
    try:
        with disk.open(part) as file:
            disk.truncate(file, 0)
            disk.write(file, text.encode())
            disk.sync_file(file)  # break: text-renamed-before-sync
        disk.rename(part, path)
        disk.sync(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def open_files_allowed(files: int) -> int | None:
    """Raise this process's limit of open files, as far as the system allows.

    Args:
        files: The number of files to open, in addition to `SPARE`.

    Returns:
        The limit in force if it is too low; ``None`` if it is sufficient.
    """
    needed = files + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return None
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return None if needed <= soft else soft
