"""The folder of an export: filled elsewhere, then moved, so that it never has half an export."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoupled_diloco.errors import ConfigError, DilocoError, StorageError

FACTS = "export.json"
"""File with the description of an export and the list of its files."""

RUN_FILE = "run.toml"
OF_A_RUN = ("lock", "tape", "checkpoints", "coordinator", "data.ledger", "learners")
"""If any of these is beside `RUN_FILE`, the folder is a run folder, not an export."""


@contextlib.contextmanager
def export_folder(out: Path, facts: dict[str, Any], *, force: bool) -> Iterator[Path]:
    """Yield a folder to fill; at the end, move its contents to `out`, together with the facts.

    Args:
        force: Whether `out` may be non-empty. Files of an earlier export are replaced; other files
            remain, and are never overwritten.

    Raises:
        ConfigError: `out` is a file, a run folder, or not empty; or a foreign file in it has the
            name of a file of this export.
        StorageError: It cannot be written. Its previous contents are unchanged.
    """
    require_free(out, force=force)
    place = out.resolve()  # with_name() below does not work for "."
    aside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        aside.mkdir(parents=True)
        yield aside
        files = sorted(path.name for path in aside.iterdir())
        text = json.dumps({**facts, "files": [*files, FACTS]}, indent=2) + "\n"
        (aside / FACTS).write_text(text, encoding="utf-8")
        place.mkdir(exist_ok=True)
        _exchange(aside, place, [*files, FACTS])
    except DilocoError:
        raise
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(aside: Path, out: Path, names: list[str]) -> None:
    """Move the new files in and an earlier export's files out; if one move fails, undo them all.

    The facts are moved out first and moved in last: a folder that has them is complete.
    """
    earlier = [name for name in _files_of_an_export(out) if os.path.lexists(out / name)]
    _refuse_foreign(out, [name for name in names if name not in earlier])
    old = aside.with_suffix(".old")
    moves = [(out / name, old / name) for name in sorted(earlier, key=lambda n: n != FACTS)]
    moves += [(aside / name, out / name) for name in names]
    done: list[tuple[Path, Path]] = []
    old.mkdir()
    try:
        for source, target in moves:
            source.replace(target)
            done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            target.replace(source)
        old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)


def _refuse_foreign(out: Path, names: list[str]) -> None:
    for name in names:
        if os.path.lexists(out / name):
            raise ConfigError(
                f"{out / name} is not part of an earlier export, and would be overwritten: choose "
                "another --out, or move it away"
            )


def require_free(out: Path, *, force: bool) -> None:
    """Check that nothing would be overwritten.

    Raises:
        ConfigError: `out` is a file, the root folder, a run folder, or not empty without `force`.
    """
    place = out.resolve()
    if place == place.parent:
        raise ConfigError(f"{out} is the root folder: choose another --out")
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{out} is a file, not a folder: choose another --out")
    if (place / RUN_FILE).exists() and any((place / name).exists() for name in OF_A_RUN):
        raise ConfigError(
            f"{out} is a run folder, whose {RUN_FILE} an export would overwrite: choose another "
            f"--out, as {out / 'export'}"
        )
    if place.is_dir() and any(place.iterdir()) and not force:
        raise ConfigError(
            f"{out} is not empty: choose another --out, or --force to replace an earlier export"
        )


def read_facts(folder: Path) -> dict[str, Any]:
    """Return the description of an export.

    Raises:
        StorageError: The folder contains no export, or it cannot be read.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StorageError(
            f"{folder} contains no export, because it has no {FACTS}: run ddiloco export RUN"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{folder / FACTS} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise StorageError(f"{folder / FACTS} cannot be read: it is not a JSON object")
    return facts


def _files_of_an_export(out: Path) -> list[str]:
    """Return the names of an earlier export's files; never a path outside the folder."""
    try:
        facts = read_facts(out)
    except StorageError:
        return []
    files = facts.get("files") if "decoupled_diloco" in facts else None
    if not isinstance(files, list):
        return []
    return [n for n in files if isinstance(n, str) and Path(n).name == n and n != ".."]
