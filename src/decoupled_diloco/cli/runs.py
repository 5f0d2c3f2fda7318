"""Find the run that a command line means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from decoupled_diloco.config.addresses import is_store
from decoupled_diloco.config.settings import nearest
from decoupled_diloco.errors import ConfigError

RUNS = Path("runs")
"""The folder in which runs are, unless their settings name another one."""


def is_url(run: str) -> bool:
    """Whether a RUN of a command line is the address of a running syncer."""
    return run.startswith(("http://", "https://"))


def chosen_run(run: str, example: str, *, or_config: bool = False, here: bool = False) -> str:
    """Return the RUN of a command line; if it is empty, the newest run in runs/, printing its name.

    Args:
        run: The RUN; empty: the newest one.
        example: A command with a run, for the message.
        or_config: Whether the command takes a TOML file or a recipe, too.
        here: Whether the command needs a folder and cannot read an object store.

    Raises:
        ConfigError: runs/ contains no runs, a run that does not exist is similar to one, or the
            command cannot read an object store.
    """
    from decoupled_diloco.launch.launch_folder import was_launched

    if (here or or_config) and is_store(run):
        raise ConfigError(
            f"{run} is an object store, which this command cannot read: copy the run first with "
            f"ddiloco train --resume {run}"
        )
    if run:
        if not or_config:
            _refuse_misspelt(run)
        return run
    started = runs_in(RUNS)
    if not started:
        raise ConfigError(f"runs/ contains no runs: name one, as in {example}")
    # A start that failed leaves only a folder: a run with a tape, or one on a cluster, goes first.
    newest = max(started, key=lambda run: (has_tape(run) or was_launched(run), started[run]))
    typer.echo(f"run: {newest}, the newest in {RUNS}/", err=True)
    return str(newest)


_copies: list[object] = []
"""Copies of runs in object stores, which are deleted when this command ends."""


def folder_of(run: str, *parts: str) -> Path:
    """Return the folder of a run; for one in an object store, a copy of these parts of it."""
    if not is_store(run):
        return Path(run)
    from decoupled_diloco.storage.mirror import StoredCopy

    copy = StoredCopy(run, *parts)
    _copies.append(copy)
    return copy.folder


def _refuse_misspelt(run: str) -> None:
    """Refuse a run that does not exist if there is one with a similar name."""
    from decoupled_diloco.launch.launch_folder import was_launched

    path = Path(run)
    if is_url(run) or is_store(run) or path.exists() or was_launched(path):
        return
    found = {each.name: each for folder in (RUNS, path.parent) for each in runs_in(folder)}
    near = nearest(path.name, found)
    if near is not None:
        raise ConfigError(f"{run} does not exist: did you mean {found[near]}?")


def fix_of_process(process: str, known: Sequence[str]) -> str:
    """Return the fix for an unknown process: the one with a similar name, or all.

    >>> fix_of_process("Lerner-0", ["learner-0"]), fix_of_process("learner-7", ["learner-0"])
    ("did you mean 'learner-0'?", 'give one of learner-0')
    """
    near = nearest(process, (name for name in known if _digits(name) == _digits(process)))
    return f"did you mean {near!r}?" if near else f"give one of {', '.join(known) or 'none'}"


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def runs_in(folder: Path) -> dict[Path, float]:
    """Return the runs in a folder, with the time at which each was started (seconds since 1970).

    A run that was launched on a cluster may have only its launch folder here.
    """
    from decoupled_diloco.config.resume import RUN_FILE
    from decoupled_diloco.launch.launch_folder import LAUNCH, was_launched

    started: dict[Path, float] = {}
    for path in folder.glob(f"*/{RUN_FILE}"):
        name = path.parent.name
        if name.endswith(LAUNCH) and not was_launched(path.parent):
            continue  # written by a dry run
        run = path.parent.with_name(name.removesuffix(LAUNCH))
        started[run] = max(path.stat().st_mtime, started.get(run, 0.0))
    return started


def has_tape(run: Path) -> bool:
    """Whether a shard has started to write the event tape."""
    from decoupled_diloco.tape.records import FOLDER_NAME, MERGED_NAME

    return (run / MERGED_NAME).exists() or any(run.glob(f"{FOLDER_NAME}/shard-*.jsonl"))
