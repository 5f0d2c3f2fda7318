"""`ddiloco status`: print the status of a run once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.runs import chosen_run, has_tape, is_url
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    Json,
    RunSource,
    fail,
    make_console,
)
from decoupled_diloco.config.addresses import is_store
from decoupled_diloco.errors import DilocoError

if TYPE_CHECKING:
    from decoupled_diloco.show.console import SteadyConsole


class StatusOptions(ConnectOptions):
    """Options of `ddiloco status`."""

    run: RunSource = ""
    pids: Annotated[
        bool,
        typer.Option(
            "--pids", help="Also print the processes of a run on this machine, with their ids."
        ),
    ] = False
    as_json: Json = False


@command(StatusOptions)
def status(options: StatusOptions) -> None:
    """Print the status of a run: phase, progress, learners and shards."""
    from decoupled_diloco.run_model import run_of
    from decoupled_diloco.show.status import status_of
    from decoupled_diloco.show.terminal import render_status

    given = chosen_run(options.run, "ddiloco status runs/quickstart")
    elsewhere = is_url(given) or is_store(given)
    if options.pids and (options.as_json or elsewhere):
        fail("--pids cannot be combined with --json or a URL: give a run folder of this machine")
    on_cluster = not (elsewhere or options.as_json) and _print_jobs(Path(given))
    if on_cluster and not has_tape(Path(given)):
        return
    opened = options.open_run(given)
    run = run_of(opened.poll(), "now" if opened.live else "run")
    account = None if opened.live else run.account
    found = status_of(run, opened.now(), opened.problems(), account, stored=opened.stored)
    if options.as_json:
        typer.echo(json.dumps(found.to_json(), ensure_ascii=False, allow_nan=False))
        return
    console = make_console()
    console.print(render_status(found, width=console.width))
    if options.pids:
        _print_processes(Path(given), console)


def _print_jobs(run: Path) -> bool:
    """Print the jobs of a run that was launched on a cluster; return whether there are any.

    If the cluster does not answer, the status comes from the tape alone.
    """
    from decoupled_diloco.launch.launch_folder import Launch, launch_folder, was_launched

    if not was_launched(run):
        return False
    try:
        jobs = Launch(launch_folder(run)).states()
    except DilocoError as error:
        if not has_tape(run):
            raise
        typer.echo(f"the state of its jobs is not known: {error}", err=True)
        return False
    for job in jobs:
        typer.echo(f"{job.name}: job {job.id} {job.state} {job.where}".rstrip())
    return bool(jobs)


def _print_processes(run: Path, console: SteadyConsole) -> None:
    from decoupled_diloco.launch.run_processes import local_processes
    from decoupled_diloco.show.console import plain_table

    table = plain_table("process", "pid", "state", left=("process", "state"))
    for each in local_processes(run):
        table.add_row(each.name, str(each.pid), each.state)
    console.print()
    console.print(table)
