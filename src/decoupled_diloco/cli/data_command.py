"""`ddiloco data`: print which learner trained which partition of the data."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run, folder_of
from decoupled_diloco.cli.shared_options import Json, RunFolder, exit_with, make_console

if TYPE_CHECKING:
    from decoupled_diloco.run_model.data_usage import DataAccount
    from decoupled_diloco.show.console import SteadyConsole

SHOWN_MAX = 20
"""The most lines of each list that are printed; --json prints all."""


class DataOptions(CommandOptions):
    """Options of `ddiloco data`."""

    run: RunFolder = ""
    as_json: Json = False


@command(DataOptions)
def data(options: DataOptions) -> None:
    """Print which learner trained which partition of the data, and what is missing.

    Exit code 1: a partition was skipped, is durable twice, or was leased to two learners at once.
    """
    from decoupled_diloco.run_model.data_usage import read_data

    account = read_data(folder_of(chosen_run(options.run, "ddiloco data runs/quickstart")))
    if options.as_json:
        typer.echo(json.dumps(asdict(account), indent=1))
    else:
        _show(account, make_console())
    exit_with(1 if account.problems else 0)


def _show(account: DataAccount, console: SteadyConsole) -> None:
    from decoupled_diloco.show.console import plain_table

    def say(text: str) -> None:
        console.print(text)

    if not account.parts:
        say("The data of this run were not leased (data.elastic), so they have no ledger.")
        return
    say(f"The data have {account.parts} partitions. Partitions per epoch:")
    header = (
        "epoch",
        "durable",
        "in training",
        "returned",
        "not started",
        "durable batches per learner",
    )
    table = plain_table(*header, left=header[-1:])
    for turn, parts in account.turns.items():
        counts = [account.count(turn, each) for each in ("durable", "training", "returned")]
        shares = ", ".join(f"{name} {n}" for name, n in sorted(account.shares(turn).items()))
        rest = account.parts - len(parts)
        table.add_row(str(turn), *map(str, counts), str(rest), shares or "none yet")
    console.print(table)
    handed = [
        f"partition {part.part} of epoch {turn}: "
        + ", then ".join(f"{s.learner} from batch {s.first}" for s in part.spans)
        for turn, parts in account.turns.items()
        for part in parts.values()
        if len(part.spans) > 1
    ]
    repeats = [
        f"partition {r.part} of epoch {r.turn}: {r.end - r.first} batches from batch {r.first}, by "
        f"{r.learner} (incarnation {r.epoch}): {r.reason}"
        for r in account.repeats
    ]
    for title, lines in (
        ("Trained under several leases, one after the other:", handed),
        ("Trained more than once:", repeats),
        ("Errors:", account.problems),
    ):
        if lines:
            more = [f"… and {len(lines) - SHOWN_MAX} more"] if len(lines) > SHOWN_MAX else []
            say("\n".join([title, *(f"- {line}" for line in lines[:SHOWN_MAX] + more)]))
    if account.undone:
        say(f"{account.undone} entries no longer count: the run went back to an earlier state.")
    if not account.problems:
        say("No partition was skipped, and none is durable twice.")
