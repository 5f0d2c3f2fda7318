"""The messages that a command prints at the start and at the end of a run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from decoupled_diloco.cli.intervals import print_essential
from decoupled_diloco.config.addresses import alternatives, from_elsewhere

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.launch.local import LocalRun
    from decoupled_diloco.run_model import RunModel
    from decoupled_diloco.show.console import SteadyConsole


def print_start(
    config: RunConfig,
    folder: Path,
    moved_to: Path | None,
    console: SteadyConsole,
    *,
    here: bool = True,
) -> None:
    """Print what runs, the new name of an earlier run's folder, and the short table of intervals.

    ``here``: whether this command also starts the learners.
    """
    console.print_text(describe_run(config, here=here))
    if moved_to is not None:
        console.print_text(f"the earlier run is now in {moved_to}")
    console.print_text(f"run folder: {folder}; to follow the run: ddiloco watch {folder}\n")
    print_essential(config, folder, console)


def print_page_address(run: LocalRun, console: SteadyConsole) -> None:
    """Print the address of the run's page, and the file with the auth token, never the token."""
    address = alternatives(from_elsewhere(run.addresses[0]))[0]
    console.print_text(f"page: {address}/ (to sign in: the auth token in {run.secret_file})")


def describe_run(config: RunConfig, *, here: bool = True) -> str:
    """Describe a run in one line; learners that start elsewhere may bring their own model.

    >>> from decoupled_diloco.config import RunConfig
    >>> describe_run(RunConfig(run={"name": "small", "learners": 2, "max_steps": 60}))
    'small: workload gpt, 2 learners, 1 syncer shard, 60 steps'
    """
    from decoupled_diloco.run_model.phrases import many
    from decoupled_diloco.units import format_count

    run = config.run
    budgets = [f"{run.max_steps} steps"] if run.max_steps else []
    budgets += [f"{format_count(run.max_tokens)} tokens"] if run.max_tokens else []
    parts = [
        *([_work_of(config)] if here else []),
        many(run.learners, "learner") + _of_ranks(config) + ("" if here else " expected"),
        many(config.syncer.shards, "syncer shard") + (" with standbys" * config.syncer.standby),
        " or ".join(budgets),
    ]
    return f"{run.name}: {', '.join(parts)}"


def _work_of(config: RunConfig) -> str:
    if config.workload is None:
        return f"command {shlex.join(config.learner.command)}"
    return f"workload {config.workload.name}"


def _of_ranks(config: RunConfig) -> str:
    ranks = sum(map(config.learner.ranks_of, range(config.run.learners)))
    return f" of {ranks} ranks" if ranks > config.run.learners else ""


def print_outcome(
    folder: Path, weights: Path | None, console: SteadyConsole, run: RunModel | None = None
) -> None:
    """Write the report of a run, and print its summary."""
    from decoupled_diloco.show.report import (
        write_report,
    )  # imports numpy and jinja2, at the end only
    from decoupled_diloco.show.terminal import print_summary

    files = [folder / "report.html"]
    run = write_report(run or folder, files[0])
    if weights is not None:
        files.append(weights)
    print_summary(run, files, console)
    if run.sample_text:
        console.print("\ntext from the trained model:\n")
        console.print(run.sample_text)


def describe_remains(folder: Path, config: RunConfig, command: str = "train") -> str:
    """Describe what a run that did not finish has left, and how to continue it."""
    from decoupled_diloco.syncer.result import RESULT, SHARES
    from decoupled_diloco.syncer.stored_weights import kept_layout  # torch takes seconds

    names = [f"shard-{number}.safetensors" for number in range(config.syncer.shards)]
    if (folder / RESULT).exists():
        weights = (
            f"{folder / RESULT} is from before the run was resumed, and stays until the run "
            "finishes"
        )
    elif all((folder / SHARES / name).exists() for name in names):
        weights = (
            f"{RESULT} was not written, but every shard has written its part: "
            f"ddiloco export {folder} merges the parts"
        )
    elif kept_layout(folder, config) is not None:
        weights = (
            f"{RESULT} is written when the budget is spent; ddiloco export {folder} writes the "
            "current weights"
        )
    else:
        weights = "no weights were written: shards write them when the budget is spent"
    if not config.syncer.persist:
        return f"{weights}; with syncer.persist=false only the tape and the report remain"
    return f"{weights}\nto continue the run: ddiloco {command} --resume {folder}"
