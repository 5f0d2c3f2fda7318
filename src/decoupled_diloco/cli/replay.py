"""`ddiloco replay`: do tape and payloads explain the run exactly, and where do two runs part?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decoupled_diloco.cli.options import exit_with, make_console
from decoupled_diloco.config import load_config
from decoupled_diloco.config.resume import RUN_FILE

if TYPE_CHECKING:
    from decoupled_diloco.observe.terminal import SteadyConsole
    from decoupled_diloco.simulate.replay import Divergence, ProcessReplay
    from decoupled_diloco.simulate.weights_replay import WeightsReplay

SHOWN_MAX = 3
"""Differences of a process that are shown; the first one is what matters."""

TEXT_MAX = 300


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a tape.")],
    until: Annotated[
        float | None, typer.Option(min=0.0, metavar="SECONDS", help="Only the run's first seconds.")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Where this run and another one part.")
    ] = None,
    weights: Annotated[
        bool | None,
        typer.Option(
            "--weights/--no-weights",
            help="Compute the weights again, too. Default: if the run has kept its payloads.",
        ),
    ] = None,
) -> None:
    """Tells fresh state machines what is on the tape: they must order what is on it.

    With syncer.record_payloads every published version is computed again and compared, bit for bit.

    Exit code 1: they did not, some bits are others, or the two runs part.
    """
    from decoupled_diloco.simulate.replay import divergences, replay_run
    from decoupled_diloco.simulate.weights_replay import has_payloads, replay_weights

    console = make_console()
    if (run / RUN_FILE).is_file():
        load_config(run / RUN_FILE)  # for the methods that it names, and the modules with them
    results, problems = replay_run(run, until)
    for problem in problems:
        console.print(f"note: {problem}")
    if not results:
        console.print(f"nothing on the tape of {run} has a state machine: there is no replay")
    _show(results, console)
    different = any(result.differences for result in results)
    if weights or (weights is None and has_payloads(run)):
        computed = replay_weights(run, until)
        _show_weights(computed, console)
        wrong = any(each.differences or each.final == "others" for each in computed)
        different = different or wrong
    if diff is not None:
        parted = divergences(run, diff)
        _show_divergences(parted, diff, console)
        different = different or bool(parted)
    exit_with(1 if different else 0)


def _show(results: list[ProcessReplay], console: SteadyConsole) -> None:
    from decoupled_diloco.observe.terminal import plain_table

    left = ("process", "replay")
    table = plain_table("process", "lives", "events", "orders", "replay", left=left)
    for each in results:
        count = len(each.differences)
        says = "the same" if not count else f"{count} differ"
        table.add_row(each.who, str(each.lives), str(each.events), str(each.effects), says)
    if results:
        console.print(table)
    for each in results:
        for difference in each.differences[:SHOWN_MAX]:
            where = f"{each.who}, life {difference.life}, event {difference.cause}"
            taped, replayed = _apart(_text(difference.taped), _text(difference.replayed))
            console.print(
                f"\n{where} ({difference.event}):\n"
                f"  on the tape: {taped}\n  replayed:    {replayed}"
            )


def _show_weights(computed: list[WeightsReplay], console: SteadyConsole) -> None:
    from decoupled_diloco.observe.terminal import plain_table

    left = ("shard", "weights", "at the end")
    header = ("shard", "merges", "versions", "unknown", "weights", "at the end")
    table = plain_table(*header, left=left)
    for each in computed:
        count = len(each.differences)
        says = "the same bits" if not count else f"{count} differ"
        numbers = (str(each.merges), str(each.versions), str(each.unknown))
        table.add_row(each.who, *numbers, says, each.final)
    console.print()
    console.print(table)
    for each in computed:
        for note in each.notes[:SHOWN_MAX]:
            console.print(f"note: {each.who}: {note}")
        for difference in each.differences[:SHOWN_MAX]:
            console.print(f"{each.who}: other bits: {difference}")


def _show_divergences(parted: list[Divergence], other: Path, console: SteadyConsole) -> None:
    if not parted:
        console.print(f"{other} tells the same of every process")
    for each in parted:
        here, there = _apart(_record(each.left), _record(each.right))
        console.print(
            f"\n{each.who} parts after {each.after} records:\n  here:  {here}\n  there: {there}"
        )


def _record(record: tuple[str, Mapping[str, Any]] | None) -> str:
    return "its tape ends" if record is None else f"{record[0]} {_text(record[1])}"


def _text(value: Mapping[str, Any] | None) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)


def _apart(left: str, right: str) -> tuple[str, str]:
    """Two long texts, each cut so that the place where they part is seen."""
    pairs = zip(left, right, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    begin = 0 if max(len(left), len(right)) <= TEXT_MAX else max(0, common - TEXT_MAX // 3)
    return _cut(left, begin), _cut(right, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + TEXT_MAX
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")
