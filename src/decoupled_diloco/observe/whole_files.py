"""Files that are made of a tape: whole, or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from decoupled_diloco.errors import StorageError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file that is either whole or not there.

    Raises:
        StorageError: It cannot be written.
    """
    torn = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(torn)
        torn.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # what matters is the first error
            torn.unlink()
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
