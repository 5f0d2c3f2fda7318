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

RUN_FILE = "run.toml"
OF_A_RUN = ("lock", "tape", "checkpoints", "coordinator.json", "data.ledger", "learners")
"""Any of them beside `RUN_FILE`: the folder is a run's, not an export's."""


@contextlib.contextmanager
def export_folder(out: Path, facts: dict[str, Any], *, force: bool) -> Iterator[Path]:
    """A folder to fill; what is in it at the end is moved to `out`, with the facts beside it.

    Args:
        force: Whether `out` may have something in it. What an earlier export wrote there is
            replaced; other files stay, and none of them is written over.

    Raises:
        ConfigError: `out` is a file, a run folder, or not empty; or a file in it that no earlier
            export has written is where one of this one would go.
        StorageError: It cannot be written. What was there before is untouched.
    """
    require_free(out, force=force)
    place = out.resolve()  # "." has no name that another one could be made of
    aside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        aside.mkdir(parents=True)
        yield aside
        files = sorted(path.name for path in aside.iterdir())
        text = json.dumps({**facts, "files": [*files, FACTS]}, indent=2) + "\n"
        (aside / FACTS).write_text(text, encoding="utf-8")
        place.mkdir(exist_ok=True)
        _exchange(aside, place, [*files, FACTS])
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(aside: Path, out: Path, names: list[str]) -> None:
    """Moves the new files in and an earlier export's out; if one cannot be moved, none is.

    The facts go first and come last: a folder that has them is never half an export.
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
                f"{out / name} is not of an earlier export, and would be written over: give "
                "another --out, or move it away"
            )


def require_free(out: Path, *, force: bool) -> None:
    """Refuses to write over what is there.

    Raises:
        ConfigError: `out` is a file, the root of all folders, a run folder, or a folder with
            something in it and no `force`.
    """
    place = out.resolve()
    if place == place.parent:
        raise ConfigError(f"{out} is the root of all folders: give another --out")
    if place.exists() and not place.is_dir():
        raise ConfigError(f"{out} is a file, not a folder: give another --out")
    if (place / RUN_FILE).exists() and any((place / name).exists() for name in OF_A_RUN):
        raise ConfigError(
            f"{out} is a run folder, whose {RUN_FILE} an export would write over: give another "
            f"--out, as {out / 'export'}"
        )
    if place.is_dir() and any(place.iterdir()) and not force:
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
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{folder / FACTS} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise StorageError(f"{folder / FACTS} cannot be read: it is no JSON object")
    return facts


def _files_of_an_export(out: Path) -> list[str]:
    """The names of an earlier export's files; nothing outside the folder."""
    try:
        facts = read_facts(out)
    except StorageError:
        return []
    files = facts.get("files") if "decoupled_diloco" in facts else None
    if not isinstance(files, list):
        return []
    return [n for n in files if isinstance(n, str) and Path(n).name == n and n != ".."]
