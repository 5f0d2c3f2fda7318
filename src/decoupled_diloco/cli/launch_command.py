"""`ddiloco launch` and `ddiloco stop`: start a run where its settings place it, and end it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run, is_url
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    RunHereOrSyncer,
    Sets,
    complete_recipe,
    exit_with,
    fail,
    make_console,
)
from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.toml_files import RECIPES

if TYPE_CHECKING:
    from decoupled_diloco.launch.launch_folder import Launch

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Write and print the files to submit, and submit nothing."),
]


class LaunchOptions(CommandOptions):
    """Options of `ddiloco launch`."""

    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="TOML file of the run, or name of a shipped recipe (see ddiloco recipes). Or a "
            "launch folder, whose files are submitted unchanged.",
            autocompletion=complete_recipe,
        ),
    ]
    settings: Sets = None
    dry_run: DryRun = False
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Ray only: continue the run in its folder after the cluster was lost."
        ),
    ] = False


@command(LaunchOptions)
def launch(options: LaunchOptions) -> None:
    """Start a run on the backend that its TOML file names: this machine or a cluster.

    Exit code 0: the run is submitted. On this machine: the run has finished.
    """
    from decoupled_diloco.launch.launch_folder import Launch, engine_of, write_launch

    folder = Path(options.config)
    if folder.is_dir():
        if options.settings:
            fail("--set cannot be combined with a launch folder: edit the files in it")
        _submit(Launch(folder), options.dry_run, options.resume)
        return
    config = load_config(RECIPES.find(options.config), options.settings or ())
    if config.launch.backend == "local":
        if options.resume:
            fail('backend="local" in [launch]: continue the run with ddiloco train --resume')
        _train_here(config, options)
    if not options.dry_run:
        engine_of(config).require(config)
    _submit(write_launch(config), options.dry_run, options.resume)


def _train_here(config: RunConfig, options: LaunchOptions) -> None:
    from decoupled_diloco.cli.local_training import train_locally

    if options.dry_run:
        sets = "".join(f" --set {each}" for each in options.settings or [])
        typer.echo(f'backend="local" in [launch]: runs ddiloco train {options.config}{sets}')
        exit_with(0)
    exit_with(train_locally(config, make_console()))


def _submit(launch: Launch, dry_run: bool, resume: bool) -> None:
    folder = os.path.relpath(launch.folder)
    if dry_run:
        for name in sorted(launch.engine.files(launch.config, launch.folder)):
            typer.echo(f"--- {folder}/{name}\n{(launch.folder / name).read_text()}")
        typer.echo(f"to submit these files, also after a change: ddiloco launch {folder}")
        return
    for job in launch.submit(resume=resume):
        typer.echo(f"{job.name}: job {job.id} of {launch.config.launch.backend}")
    run = os.path.relpath(launch.config.run.folder)
    logs = launch.engine.logs(launch.config, Path(folder))
    typer.echo(f"\nstatus: ddiloco status {run}\nlogs: {logs}\nstop: ddiloco stop {run}")


class StopOptions(ConnectOptions):
    """Options of `ddiloco stop`."""

    run: RunHereOrSyncer = ""


@command(StopOptions)
def stop(options: StopOptions) -> None:
    """Stop a run: learners do a final sync, then all processes end.

    ddiloco train --resume continues the run later. With a URL, the run ends as if its budget were
    reached: the result is written, and a later resume needs another budget.
    """
    from decoupled_diloco.launch.launch_folder import Launch, launch_folder, was_launched
    from decoupled_diloco.run_model.phrases import many

    given = options.certificates()
    chosen = chosen_run(options.run, "ddiloco stop runs/quickstart", here=True)
    if is_url(chosen):
        from decoupled_diloco.cli.coordinator_client import stop_run
        from decoupled_diloco.launch.run_folder import read_token

        stop_run(chosen, read_token(options.auth_token_file), given)
        typer.echo(
            f"{chosen} ends the run: each fragment has a closing round, then the result is written"
        )
        return
    if given is not None or options.auth_token_file is not None:
        fail("--auth-token-file, --ca-cert, --cert and --key are for a URL: leave them out")
    run = Path(chosen)
    if was_launched(run):
        count = Launch(launch_folder(run)).stop()
        typer.echo(f"asked {many(count, 'job')} to stop" if count else f"{run} has no job any more")
        return
    _stop_here(run)


def _stop_here(run: Path) -> None:
    from decoupled_diloco.launch.run_folder import launcher_of

    number = launcher_of(run, "ddiloco stop")
    try:
        os.kill(number, signal.SIGTERM)
    except ProcessLookupError:
        typer.echo(f"{run} is not running")
        return
    typer.echo(f"asked process {number}, which launched {run}, to stop all processes")
