"""Small files that survive a crash: whole, or as they were."""

from __future__ import annotations

from pathlib import Path

from decoupled_diloco.errors import StorageError
from decoupled_diloco.runtime import runtime

NOT_JSON = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading JSON raises that is none, or has other values in it than one looks for."""


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
            disk.sync_file(file)
        disk.rename(part, path)
        disk.sync(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
