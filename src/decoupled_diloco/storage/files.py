"""Small files that survive a crash: whole, or as they were."""

from __future__ import annotations

import os
from pathlib import Path

from decoupled_diloco.errors import StorageError


def write_text(path: Path, text: str) -> None:
    """Replaces a file's text and waits until the disk has both the text and the new name.

    Raises:
        StorageError: it cannot be written. What was there before is untouched.
    """
    part = path.with_suffix(".part")
    try:
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        force_to_disk(path.parent)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error


def force_to_disk(path: Path) -> None:
    """Waits until the disk has a file's bytes, or a folder's names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
