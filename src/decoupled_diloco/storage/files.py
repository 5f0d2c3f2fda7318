"""What the disk has, and small files that survive a crash: whole, or as they were."""

from __future__ import annotations

from pathlib import Path

from decoupled_diloco.errors import StorageError
from decoupled_diloco.runtime import runtime

NOT_JSON = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading JSON raises that is none, or has other values in it than one looks for."""


def exists(path: Path) -> bool:
    """Whether something has this name.

    Raises:
        StorageError: The disk cannot answer.
    """
    try:
        return runtime().disk.exists(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def is_folder(path: Path) -> bool:
    """Whether it is a folder.

    Raises:
        StorageError: The disk cannot answer.
    """
    try:
        return runtime().disk.is_folder(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def names_in(folder: Path) -> list[Path]:
    """What is in a folder, in no order; one that does not exist is empty.

    Raises:
        StorageError: The disk cannot answer.
    """
    try:
        return runtime().disk.names(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder} cannot be read: {error.strerror or error}") from error


def size_of(path: Path) -> int:
    """Bytes of a file.

    Raises:
        StorageError: It is missing, or the disk cannot answer.
    """
    try:
        return runtime().disk.size(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Replaces a file's text and waits until the disk has both the text and the new name.

    Raises:
        StorageError: it cannot be written. The file has its former text, or (the new name could
            not be forced to the disk) this one.
    """
    part, disk = path.with_suffix(".part"), runtime().disk
    try:
        with disk.open(part) as file:
            disk.truncate(file, 0)
            disk.write(file, text.encode())
            disk.sync_file(file)  # break: text-renamed-before-sync
        disk.rename(part, path)
        disk.sync(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
