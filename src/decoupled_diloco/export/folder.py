"""The folder of an export: filled aside, then moved in, so that it never holds half an export."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoupled_diloco.errors import ConfigError, StorageError

FACTS = "export.json"
"""What was exported, and which files belong to it."""


@contextlib.contextmanager
def export_folder(out: Path, facts: dict[str, Any], *, force: bool) -> Iterator[Path]:
    """A folder to fill; what is in it at the end is moved to `out`, with the facts beside it.

    Args:
        out: Where the export goes; made if it does not exist.
        facts: Plain JSON values for `FACTS`.
        force: Whether `out` may have something in it. What an earlier export wrote there is
            replaced; other files stay.

    Raises:
        ConfigError: `out` is a file, or not empty.
        StorageError: It cannot be written.
    """
    require_free(out, force=force)
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        aside.mkdir(parents=True)
        yield aside
        files = sorted(path.name for path in aside.iterdir())
        text = json.dumps({**facts, "files": [*files, FACTS]}, indent=2) + "\n"
        (aside / FACTS).write_text(text, encoding="utf-8")
        out.mkdir(exist_ok=True)
        for name in _files_of_an_export(out):
            (out / name).unlink(missing_ok=True)
        for name in [*files, FACTS]:
            (aside / name).replace(out / name)
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def require_free(out: Path, *, force: bool) -> None:
    """Refuses to write over what is there.

    Raises:
        ConfigError: `out` is a file, or a folder with something in it and no `force`.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, not a folder: give another --out")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ConfigError(
            f"{out} is not empty: give another --out, or --force to replace an earlier export in it"
        )


def read_facts(folder: Path) -> dict[str, Any]:
    """What an export says of itself.

    Raises:
        StorageError: There is no export in this folder, or it cannot be read.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(
            f"{folder} holds no export, since it has no {FACTS}: make one with ddiloco export RUN"
        ) from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder / FACTS} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise StorageError(f"{folder / FACTS} cannot be read: it is no JSON object")
    return facts


def _files_of_an_export(out: Path) -> list[str]:
    """The names of an earlier export's files; nothing outside the folder."""
    try:
        files = read_facts(out).get("files", [])
    except StorageError:
        return []
    return [name for name in files if isinstance(name, str) and Path(name).name == name]
