"""What both commands write: tables, JSON, pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoupled_diloco.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STDOUT = Path("-")
PICTURES = (".png", ".svg", ".pdf")


def check_files(json_to: Path | None, *pictures: Path | None) -> None:
    """Tells what could not be written before the work, not after it.

    Raises:
        ConfigError: a picture has no ending of `PICTURES`.
        StorageError: it is a folder, or in none.
    """
    for path in pictures:
        if path is not None and path.suffix.lower() not in PICTURES:
            raise ConfigError(
                f"picture {path} does not end in {', '.join(PICTURES)}: give such a file"
            )
    for path in (json_to, *pictures):
        if path is None or path == STDOUT:
            continue
        if path.is_dir():
            raise StorageError(f"cannot write {path}: it is a folder, give a file in it")
        if not path.parent.is_dir():
            raise StorageError(f"cannot write {path}: there is no folder {path.parent}, make it")


def write_json(value: Any, to: Path | None) -> None:
    """Writes JSON, if that was asked for: to a file, or, where that is ``-``, to stdout."""
    if to is None:
        return
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    if to == STDOUT:
        sys.stdout.write(text)
        return
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {to}: {error}") from error


def save_picture(figure: Figure, path: Path) -> None:
    """Draws a figure on white; its format is that of the file's ending."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, dpi=150, facecolor="white")
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error
