"""Output of both commands: JSON and pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoupled_diloco.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")


def check_files(out: Path | None, *pictures: Path | None) -> None:
    """Check before the work that the output files can be written.

    Raises:
        ConfigError: A picture's suffix is not one of `PICTURES`.
        StorageError: A path is a folder, or its parent folder does not exist.
    """
    for path in pictures:
        if path is not None and path.suffix.lower() not in PICTURES:
            raise ConfigError(
                f"picture {path} does not end in {', '.join(PICTURES)}: use one of these suffixes"
            )
    for path in (out, *pictures):
        if path is None:
            continue
        if path.is_dir():
            raise StorageError(f"cannot write {path}: it is a folder; give a file in it")
        if not path.parent.is_dir():
            raise StorageError(
                f"cannot write {path}: folder {path.parent} does not exist; create it"
            )


def write_json(value: Any, *, printed: bool, out: Path | None) -> None:
    """Write JSON to stdout if ``printed``, and to the file ``out`` if given."""
    if out is None and not printed:
        return
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    if printed:
        sys.stdout.write(text)
    if out is None:
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error}") from error


def save_picture(figure: Figure, path: Path) -> None:
    """Save a figure on a white background; the file's suffix selects the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, dpi=150, facecolor="white")
    except (OSError, ValueError) as error:
        raise StorageError(f"cannot write {path}: {error}") from error
