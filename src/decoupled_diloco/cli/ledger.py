"""`ddiloco ledger`: which learner trained which part of the data, and does it add up?"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import exit_with, make_console

if TYPE_CHECKING:
    from decoupled_diloco.observe.data_ledger import DataAccount
    from decoupled_diloco.observe.terminal import SteadyConsole

SHOWN_MAX = 20
"""Lines of each list that are shown; --json has them all."""


def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Every part, for programs.")] = False,
) -> None:
    """Which learner trained which part of the data, what was repeated, and if a part is missing.

    Exit code 1: a part is skipped, or durable twice, or two learners had it at once.
    """
    from decoupled_diloco.observe.data_ledger import read_data

    account = read_data(run)
    if as_json:
        typer.echo(json.dumps(asdict(account), indent=1))
    else:
        _show(account, make_console())
    exit_with(1 if account.problems else 0)


def _show(account: DataAccount, console: SteadyConsole) -> None:
    from decoupled_diloco.observe.terminal import plain_table

    def say(text: str) -> None:
        console.print(text)

    if not account.parts:
        say("The data of this run were not leased (data.leases): there is no account of them.")
        return
    say(f"The data are {account.parts} parts. For each pass over them, the parts that are")
    header = ("pass", "durable", "in training", "returned", "not begun", "durable batches of")
    table = plain_table(*header, left=header[-1:])
    for turn, parts in account.turns.items():
        counts = [account.count(turn, each) for each in ("durable", "training", "returned")]
        shares = ", ".join(f"{name} {n}" for name, n in sorted(account.shares(turn).items()))
        rest = account.parts - len(parts)
        table.add_row(str(turn), *map(str, counts), str(rest), shares or "none yet")
    console.print(table)
    handed = [
        f"part {part.part} of pass {turn}: "
        + ", then ".join(f"{s.learner} from batch {s.first}" for s in part.spans)
        for turn, parts in account.turns.items()
        for part in parts.values()
        if len(part.spans) > 1
    ]
    repeats = [
        f"part {r.part} of pass {r.turn}: {r.end - r.first} batches from {r.first} on, by "
        f"{r.learner} (epoch {r.epoch}): {r.reason}"
        for r in account.repeats
    ]
    for title, lines in (
        ("Trained by several leases, one after the other:", handed),
        ("Trained more than once:", repeats),
        ("Errors:", account.problems),
    ):
        if lines:
            more = [f"… and {len(lines) - SHOWN_MAX} more"] if len(lines) > SHOWN_MAX else []
            say("\n".join([title, *(f"- {line}" for line in lines[:SHOWN_MAX] + more)]))
    if account.undone:
        say(f"{account.undone} entries count no longer: the run went back to an earlier state.")
    if not account.problems:
        say("Nothing is skipped, and nothing is durable twice.")
