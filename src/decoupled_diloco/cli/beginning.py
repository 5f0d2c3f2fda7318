"""How a command that runs something begins: what it is, where it writes, the intervals in force."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from decoupled_diloco.cli.timing import print_essential

if TYPE_CHECKING:
    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.observe.terminal import SteadyConsole


def tell_beginning(
    config: RunConfig,
    folder: Path,
    moved_to: Path | None,
    console: SteadyConsole,
    *,
    here: bool = True,
) -> None:
    """What runs, what an earlier run's folder is called now, and the short table of intervals.

    Args:
        config: The run.
        folder: Where it writes.
        moved_to: Where the earlier run in that folder is now.
        console: Where to tell it.
        here: Whether this command also starts the learners.
    """
    console.say(in_words(config, here=here))
    if moved_to is not None:
        console.say(f"the earlier run is kept in {moved_to}")
    console.say(f"in {folder}; from another terminal: ddiloco watch {folder}\n")
    print_essential(config, folder, console)


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
        *([f"workload {config.workload.name}"] if here else []),
        many(run.learners, "learner") + ("" if here else " expected"),
        many(config.syncer.shards, "syncer shard") + (" with standbys" * config.syncer.standbys),
        " or ".join(budgets),
    ]
    return f"{run.name}: {', '.join(parts)}"
