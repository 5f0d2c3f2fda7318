"""`ddiloco replay`: replay a run from its event tape, and compare two runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.extra_commands import HOW
from decoupled_diloco.cli.runs import chosen_run, folder_of
from decoupled_diloco.cli.shared_options import RunTape, exit_with, fail, make_console
from decoupled_diloco.config import load_config
from decoupled_diloco.config.resume import RUN_FILE

if TYPE_CHECKING:
    from decoupled_diloco.show.console import SteadyConsole
    from decoupled_diloco.tape.replay import Divergence, ProcessReplay

GROUP = "decoupled_diloco.replay"
"""The group of the entry point `weights`, which replays a run's weights."""

SHOWN_MAX = 3
"""The most differences of a process that are printed; the first one matters."""

TEXT_MAX = 300


class ReplayOptions(CommandOptions):
    """Options of `ddiloco replay`."""

    run: RunTape = ""
    until_seconds: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Replay only the first seconds of the run. Default: the whole run.",
        ),
    ] = None
    diff: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Also compare with this run folder or event tape: print the first record of each "
            "process that differs.",
        ),
    ] = None
    check_weights: Annotated[
        bool | None,
        typer.Option(
            "--check-weights/--no-check-weights",
            help="Also compute the weights again and compare them. Default: only if the run has "
            "recorded its payloads.",
        ),
    ] = None
    without: Annotated[
        str,
        typer.Option(
            metavar="LEARNER",
            help="Also compute the weights as they would be without this learner's contributions, "
            "and write them to a file. It needs recorded payloads.",
        ),
    ] = ""
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from",
            min=0,
            metavar="STEP",
            help="With --without: leave out only contributions since this global step. Default: "
            "all.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --without: the file to write. Default: "
            "RUN/weights-without-LEARNER.safetensors.",
        ),
    ] = None


@command(ReplayOptions)
def replay(options: ReplayOptions) -> None:
    """Replay a run: feed its events to new state machines and compare their orders.

    With syncer.record_payloads, replay also computes every published version again and compares it
    bit by bit. --without writes the weights as they would be without one learner.

    Exit code 1: orders or bits differ, or the two runs of --diff differ.
    """
    from decoupled_diloco.syncer.payload_archive import PAYLOADS
    from decoupled_diloco.tape.replay import divergences, replay_run

    run, until = (
        folder_of(chosen_run(options.run, "ddiloco replay runs/quickstart")),
        options.until_seconds,
    )
    for given, option in ((options.from_step, "--from"), (options.output, "--output")):
        if given is not None and not options.without:
            fail(f"{option} has no effect without --without: name the learner to leave out")
    console = make_console()
    if (run / RUN_FILE).is_file():
        load_config(run / RUN_FILE)  # imports the modules with the methods that it names
    results, problems = replay_run(run, until)
    for problem in problems:
        console.print(f"note: {problem}")
    if not results:
        console.print(
            f"no process on the tape of {run} has a state machine: there is nothing to replay"
        )
    _show(results, console)
    different = any(result.differences for result in results)
    check = True if options.without else options.check_weights
    if check or (check is None and (run / PAYLOADS).is_dir()):
        shown = _weights_replay(required=bool(check))
        without = (options.without, options.from_step or 0, options.output)
        different = not shown(run, until, console, *without) or different
    if options.diff is not None:
        parted = divergences(run, options.diff)
        _show_divergences(parted, options.diff, console)
        different = different or bool(parted)
    exit_with(1 if different else 0)


def _weights_replay(*, required: bool) -> Callable[..., bool]:
    """Return a function that computes and prints a run's weights, and returns whether all agree."""
    for entry in entry_points(group=GROUP, name="weights"):
        found: Callable[..., bool] = entry.load()
        return found
    lacking = f"the weights are not checked: {HOW.format('lab')}"
    if required:
        fail(lacking)

    def none(run: Path, until: float | None, console: SteadyConsole, *_: object) -> bool:
        console.print(f"note: {lacking}")
        return True

    return none


def _show(results: list[ProcessReplay], console: SteadyConsole) -> None:
    from decoupled_diloco.show.console import plain_table

    left = ("process", "replay")
    table = plain_table("process", "starts", "events", "orders", "replay", left=left)
    for each in results:
        count = len(each.differences)
        result = "the same" if not count else f"{count} differ"
        table.add_row(each.process, str(each.lives), str(each.events), str(each.effects), result)
    if results:
        console.print(table)
    for each in results:
        for difference in each.differences[:SHOWN_MAX]:
            where = f"{each.process}, start {difference.life}, event {difference.cause}"
            taped, replayed = _cut_both(_text(difference.taped), _text(difference.replayed))
            console.print(
                f"\n{where} ({difference.event}):\n"
                f"  on the tape: {taped}\n  replayed:    {replayed}"
            )


def _show_divergences(parted: list[Divergence], other: Path, console: SteadyConsole) -> None:
    if not parted:
        console.print(f"{other} has the same records for every process")
    for each in parted:
        here, there = _cut_both(_record(each.left), _record(each.right))
        console.print(
            f"\n{each.process} differs after {each.after} records:\n"
            f"  here:  {here}\n  there: {there}"
        )


def _record(record: tuple[str, Mapping[str, Any]] | None) -> str:
    return "its tape ends" if record is None else f"{record[0]} {_text(record[1])}"


def _text(value: Mapping[str, Any] | None) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)


def _cut_both(left: str, right: str) -> tuple[str, str]:
    """Cut two long texts so that the first difference is visible."""
    pairs = zip(left, right, strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    begin = 0 if max(len(left), len(right)) <= TEXT_MAX else max(0, common - TEXT_MAX // 3)
    return _cut(left, begin), _cut(right, begin)


def _cut(text: str, begin: int) -> str:
    end = begin + TEXT_MAX
    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")
