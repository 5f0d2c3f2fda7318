"""`ddiloco launch`, `ddiloco stop`: a run where its settings place it, and its end."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import Sets, exit_with, fail, make_console
from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.files import find_shipped
from decoupled_diloco.errors import ConfigError

if TYPE_CHECKING:
    from decoupled_diloco.engines.launch import Launch

DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Write what would be submitted, show it, and submit nothing."),
]


def launch(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The run's TOML file, or a launch folder: its files are submitted as they are.",
        ),
    ],
    settings: Sets = None,
    dry_run: DryRun = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the run in its folder, after its cluster was lost (Ray)."
        ),
    ] = False,
) -> None:
    """Start a run on the engine that its file names: this machine, or a cluster.

    Exit code 0: it is submitted; on this machine: it has finished.
    """
    from decoupled_diloco.engines.launch import Launch, engine_of, write_launch

    folder = Path(run)
    if folder.is_dir():
        if settings:
            fail("--set changes a TOML file, and a launch folder is submitted as it is: edit it")
        _submit(Launch(folder), dry_run, resume)
        return
    config = load_config(find_shipped("recipes", run), settings or ())
    if config.where.engine == "local":
        if resume:
            fail('[where] says "local": ddiloco train --resume goes on with a run of this machine')
        _here(config, run, settings or [], dry_run)
    if not dry_run:
        engine_of(config).require(config)
    _submit(write_launch(config), dry_run, resume)


def _here(config: RunConfig, run: str, settings: list[str], dry_run: bool) -> None:
    from decoupled_diloco.cli.train import train_locally

    if dry_run:
        told = "".join(f" --set {each}" for each in settings)
        typer.echo(f'[where] says "local": this would run ddiloco train {run}{told}')
        exit_with(0)
    exit_with(train_locally(config, make_console()))


def _submit(launch: Launch, dry_run: bool, resume: bool) -> None:
    folder = os.path.relpath(launch.folder)
    if dry_run:
        for name in sorted(launch.engine.files(launch.config, launch.folder)):
            typer.echo(f"--- {folder}/{name}\n{(launch.folder / name).read_text()}")
        typer.echo(f"edit them if you like, then: ddiloco launch {folder}")
        return
    for job in launch.submit(resume=resume):
        typer.echo(f"{job.name}: job {job.id} of {launch.config.where.engine}")
    run = os.path.relpath(launch.config.run.folder)
    logs = launch.engine.logs(launch.config, Path(folder))
    typer.echo(f"\nlook: ddiloco status {run}\nlogs: {logs}\nend it: ddiloco stop {run}")


def stop(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run folder of a run that was launched, here or on a cluster."
        ),
    ],
) -> None:
    """End a run: learners hand in what they have; ddiloco train --resume goes on with it."""
    from decoupled_diloco.engines.base import JOBS
    from decoupled_diloco.engines.launch import Launch, launch_folder

    folder = launch_folder(Path(run))
    if (folder / JOBS).exists():
        count = Launch(folder).stop()
        typer.echo(f"{count} jobs are told to end" if count else "no job of it is there any more")
        return
    _stop_here(Path(run))


def _stop_here(run: Path) -> None:
    from decoupled_diloco.launch.folder import launcher_of

    number, host = launcher_of(run)
    if host != socket.gethostname():
        raise ConfigError(f"{run} was launched on {host}: stop it there")
    try:
        os.kill(number, signal.SIGTERM)
    except ProcessLookupError:
        typer.echo(f"{run} does not run")
        return
    typer.echo(f"process {number}, which launched {run}, is told to end all")
