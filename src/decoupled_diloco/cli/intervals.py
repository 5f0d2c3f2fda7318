"""`ddiloco intervals`: print every interval of a run and what it is derived from."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.runs import chosen_run, is_url
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    Sets,
    complete_config_or_run,
    fail,
    make_console,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.launch.timing import Interval
    from decoupled_diloco.show.console import SteadyConsole


class IntervalsOptions(ConnectOptions):
    """Options of `ddiloco intervals`."""

    run: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN",
            help="TOML file of a run, or name of a shipped recipe. Or a run folder, event tape or "
            "URL of a running syncer: then the table has the measured values. Default: the "
            "newest run in runs/.",
            autocompletion=complete_config_or_run,
            show_default=False,
        ),
    ] = ""
    settings: Sets = None


@command(IntervalsOptions)
def intervals(options: IntervalsOptions) -> None:
    """Print every interval, window, lease and deadline, and what each is derived from."""
    from decoupled_diloco.config import load_config
    from decoupled_diloco.config.toml_files import RECIPES
    from decoupled_diloco.launch.timing import intervals as intervals_of
    from decoupled_diloco.run_model import RunModel
    from decoupled_diloco.show.explain import options_in

    run = chosen_run(options.run, "ddiloco intervals runs/quickstart", or_config=True)
    if not is_url(run) and (run.endswith(".toml") or not Path(run).exists()):
        config = load_config(RECIPES.find(run), options.settings or ())
        _print(_rows(config), make_console())
        return
    if options.settings:
        fail(f"--set cannot be combined with the run {run}: give a TOML file or a recipe")
    source = options.open_run(run)
    measured = RunModel()
    measured.take_all(source.poll())
    found = options_in(measured)
    if found is None:
        fail(f"the tape of {run} does not hold the run's settings yet: give its run.toml")
    _print(intervals_of(found, run=measured), make_console())


def import_intervals() -> None:
    """Import the module of the intervals, and PyTorch; an interrupted import cannot be repeated."""
    from decoupled_diloco.launch.placement import interrupts_deferred

    with interrupts_deferred():
        import decoupled_diloco.launch.timing  # noqa: F401


def print_essential(config: RunConfig, folder: Path, console: SteadyConsole) -> None:
    """Print the short table for the start of a run."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for wrapped in (False, False, True):
        table.add_column(style="dim", no_wrap=not wrapped)
    for row in _rows(config):
        if row.essential:
            value = row.value.replace("not measured yet", "measured")
            table.add_row(*map(Text, (row.name, value, row.essential)))
    console.print(table)
    console.print_text(f"all intervals: ddiloco intervals {folder}\n", style="dim")


def _rows(config: RunConfig) -> list[Interval]:
    from decoupled_diloco.config.method import options_of

    import_intervals()
    from decoupled_diloco.launch.timing import intervals

    return intervals(
        options_of(config),
        give_up_seconds=config.learner.disconnect_seconds,
        lease_seconds=config.syncer.lease_seconds if config.syncer.standby else None,
    )


def _print(rows: Iterable[Interval], console: SteadyConsole) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("interval", no_wrap=True)
    table.add_column("derived from")
    table.add_column("now", style="bold")
    for group, members in groupby(rows, key=lambda row: row.group):
        table.add_row(Text(group, style="dim italic"))
        for row in members:
            table.add_row(*map(Text, (row.name, row.rule, row.value)))
    console.print(table)
