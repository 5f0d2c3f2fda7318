"""`ddiloco timing`: every interval in force and what it is derived from."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    Sets,
    TokenFile,
    fail,
    make_console,
    tls_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from decoupled_diloco.config import RunConfig
    from decoupled_diloco.launch.timing import Interval
    from decoupled_diloco.observe.terminal import SteadyConsole


def timing(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SOURCE",
            help="A run's TOML file or recipe; or a run folder, tape or running syncer, then with "
            "what the run has measured.",
        ),
    ],
    settings: Sets = None,
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
) -> None:
    """Every interval, window, lease and deadline, and what it is derived from: none is set."""
    from decoupled_diloco.cli.status import source_of
    from decoupled_diloco.config import load_config
    from decoupled_diloco.config.files import find_shipped
    from decoupled_diloco.launch.timing import intervals
    from decoupled_diloco.observe.explain import options_in
    from decoupled_diloco.observe.run_model import RunModel

    if not run.startswith(("http://", "https://")) and (
        run.endswith(".toml") or not Path(run).exists()
    ):
        config = load_config(find_shipped("recipes", run), settings or ())
        _print(_rows(config), make_console())
        return
    if settings:
        fail("--set changes a configuration, and this is a run that has one: leave it out")
    source = source_of(run, token_file, tls_of(authority, certificate, key))
    measured = RunModel()
    measured.take_all(source.poll())
    found = options_in(measured)
    if found is None:
        fail(f"the tape of {run} does not tell the run's settings (yet): give its run.toml")
    _print(intervals(found, run=measured), make_console())


def import_intervals() -> None:
    """Imports what knows the intervals, PyTorch with it: half of that import cannot be repeated."""
    from decoupled_diloco.launch.placement import interrupts_deferred

    with interrupts_deferred():
        import decoupled_diloco.launch.timing  # noqa: F401


def print_essential(config: RunConfig, folder: Path, console: SteadyConsole) -> None:
    """The short table for the start of a run."""
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
    console.say(f"all of them: ddiloco timing {folder}\n", style="dim")


def _rows(config: RunConfig) -> list[Interval]:
    from decoupled_diloco.config.method import options_of

    import_intervals()
    from decoupled_diloco.launch.timing import intervals

    return intervals(
        options_of(config),
        give_up_seconds=config.learner.give_up_seconds,
        lease_seconds=config.syncer.lease_seconds if config.syncer.standbys else None,
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
