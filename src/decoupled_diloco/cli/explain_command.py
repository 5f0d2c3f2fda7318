"""`ddiloco explain`: explain a round, a learner or a step of a run in words."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    RunSource,
    make_console,
)
from decoupled_diloco.errors import ConfigError

WIDTH_MAX = 100
"""Longer lines are tiring to read."""


class What(StrEnum):
    """The kinds of things that can be explained."""

    ROUND = "round"
    LEARNER = "learner"
    STEP = "step"


class ExplainOptions(ConnectOptions):
    """Options of `ddiloco explain`."""

    what: Annotated[
        str,
        typer.Argument(
            metavar="round|learner|step", help="What to explain.", autocompletion=lambda: list(What)
        ),
    ]
    which: Annotated[
        str,
        typer.Argument(
            metavar="WHICH", help="Number of the round or step, or name of the learner."
        ),
    ]
    run: RunSource = ""
    shard: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            help="Explain the round or step of this shard only. Each shard counts its own rounds. "
            "Default: all shards.",
        ),
    ] = None


@command(ExplainOptions)
def explain(options: ExplainOptions) -> None:
    """Explain why a round closed, what a learner did, or what happened at a step.

    Example: ddiloco explain round 118 runs/quickstart
    """
    from decoupled_diloco.run_model import run_of
    from decoupled_diloco.run_model.phrases import wrapped
    from decoupled_diloco.show.explain import explain_learner, explain_round, explain_step

    what, which = options.what, options.which

    if what not in list(What):
        raise ConfigError(f"{what!r} cannot be explained: choose one of {', '.join(What)}")
    chosen = chosen_run(options.run, f"ddiloco explain {what} {which} runs/quickstart")
    source = options.open_run(chosen, detail=True)
    run = run_of(source.poll(), "details")
    if not run.records:
        raise ConfigError(f"the tape of {chosen} is empty: there is nothing to explain yet")
    if what == What.LEARNER:
        lines = explain_learner(run, which, live=source.live)
    elif what == What.ROUND:
        lines = explain_round(run, _number(which), options.shard)
    else:
        lines = explain_step(run, _number(which), options.shard)
    lines += [f"The tape is incomplete: {problem}" for problem in source.problems()]
    console = make_console()
    typer.echo(wrapped(lines, min(WIDTH_MAX, console.width)))


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(
            f"{text!r} is not a valid number: give the number of a round or step, 0 or above"
        )
    return int(text)
