"""What a command that runs something tells at its beginning, and at its end."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from decoupled_diloco.cli.timing import print_essential
from decoupled_diloco.config.addresses import alternatives, from_elsewhere

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.launch.local import LocalRun
    from decoupled_diloco.observe.run_model import RunModel
    from decoupled_diloco.observe.terminal import SteadyConsole
    from decoupled_diloco.simulate.scenario import Happening


def tell_beginning(
    config: RunConfig,
    folder: Path,
    moved_to: Path | None,
    console: SteadyConsole,
    *,
    here: bool = True,
) -> None:
    """What runs, what an earlier run's folder is called now, and the short table of intervals.

    ``here``: whether this command also starts the learners.
    """
    console.say(in_words(config, here=here))
    if moved_to is not None:
        console.say(f"the earlier run is kept in {moved_to}")
    console.say(f"in {folder}; from another terminal: ddiloco watch {folder}\n")
    print_essential(config, folder, console)


def tell_page(run: LocalRun, console: SteadyConsole) -> None:
    """Where the run's page is; the secret itself is shown nowhere."""
    address = alternatives(from_elsewhere(run.addresses[0]))[0]
    console.say(f"page: {address}/ (to sign in: the secret in {run.secret_file})")


def in_words(config: RunConfig, *, here: bool = True) -> str:
    """A run in one line; learners from elsewhere may bring a model of their own.

    >>> from decoupled_diloco.config import RunConfig
    >>> in_words(RunConfig(run={"name": "small", "learners": 2, "budget_steps": 60}))
    'small: workload gpt, 2 learners, 1 syncer shard, 60 steps'
    """
    from decoupled_diloco.observe.words import many
    from decoupled_diloco.units import format_count

    run = config.run
    budgets = [f"{run.budget_steps} steps"] if run.budget_steps else []
    budgets += [f"{format_count(run.budget_tokens)} tokens"] if run.budget_tokens else []
    parts = [
        *([_what_learners_run(config)] if here else []),
        many(run.learners, "learner") + _of_ranks(config) + ("" if here else " expected"),
        many(config.syncer.shards, "syncer shard") + (" with standbys" * config.syncer.standbys),
        " or ".join(budgets),
    ]
    return f"{run.name}: {', '.join(parts)}"


def _what_learners_run(config: RunConfig) -> str:
    if config.workload is None:
        return f"command {shlex.join(config.learner.command)}"
    return f"workload {config.workload.name}"


def _of_ranks(config: RunConfig) -> str:
    ranks = sum(map(config.learner.ranks_of, range(config.run.learners)))
    return f" of {ranks} ranks" if ranks > config.run.learners else ""


def tell_outcome(
    folder: Path, weights: Path | None, console: SteadyConsole, run: RunModel | None = None
) -> None:
    """Writes the report of what is on the tape, and prints the summary."""
    from decoupled_diloco.observe.report import write_report  # numpy and jinja2, at the end only
    from decoupled_diloco.observe.summary import print_summary

    files = [folder / "report.html", folder / "report.png"]
    run = write_report(run or folder, *files)
    if weights is not None:
        files.append(weights)
    print_summary(run, files, console)
    if run.sample_text:
        console.print("\nwhat the trained model writes:\n")
        console.print(run.sample_text)


def tell_missed(missed: Iterable[Happening], console: SteadyConsole) -> None:
    """Says what of a scenario did not happen, because the run had ended before."""
    for each in missed:
        step = f"step {each.at_step}" if each.at_share is None else f"{each.at_share:.0%}"
        what = f"{each.kind} {each.target.name}"
        console.say(f"did not happen: {what} at {step}, which was not reached", "yellow")


def what_remains(folder: Path, config: RunConfig, command: str = "train") -> str:
    """What a run that did not finish has left, and what the command can do with it."""
    from decoupled_diloco.syncer.kept import kept_layout  # torch takes seconds
    from decoupled_diloco.syncer.result import RESULT, SHARES

    names = [f"shard-{number}.safetensors" for number in range(config.syncer.shards)]
    if (folder / RESULT).exists():
        weights = f"{folder / RESULT} is from before it went on, and stays until its new end"
    elif all((folder / SHARES / name).exists() for name in names):
        weights = (
            f"{RESULT} was not written, but every shard has handed in its share: "
            f"ddiloco export {folder} puts them together"
        )
    elif kept_layout(folder, config) is not None:
        weights = (
            f"{RESULT} is written when the budget is spent; ddiloco export {folder} writes the "
            "weights as they are now"
        )
    else:
        weights = "no weights were written: shards hand theirs in when the budget is spent"
    if not config.syncer.durable:
        return f"{weights}; the tape and the report remain, and syncer.durable=false keeps no more"
    return f"{weights}\nto go on where it was: ddiloco {command} --resume {folder}"
