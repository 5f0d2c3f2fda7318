"""`ddiloco checkpoint`: take a consistent checkpoint of the whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.runs import chosen_run, is_url
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    RunHereOrSyncer,
    fail,
)

ABANDONED = 1


class CheckpointOptions(ConnectOptions):
    """Options of `ddiloco checkpoint`."""

    run: RunHereOrSyncer = ""
    timeout_seconds: Annotated[
        float,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Longest wait for all processes, in seconds."
        ),
    ] = 120.0


@command(CheckpointOptions)
def checkpoint(options: CheckpointOptions) -> None:
    """Take a checkpoint of the whole run, without a pause.

    ddiloco train --resume --checkpoint goes back to it. Exit code 1: no checkpoint was completed,
    because a process could not save its state, or not in time.
    """
    from decoupled_diloco.cli.coordinator_client import take_checkpoint
    from decoupled_diloco.config.addresses import on_this_machine
    from decoupled_diloco.launch.run_folder import read_token
    from decoupled_diloco.launch.secrets import secrets_in
    from decoupled_diloco.storage.shared_folder import read_addresses
    from decoupled_diloco.units import format_bytes

    tls = options.certificates()
    run = chosen_run(options.run, "ddiloco checkpoint runs/quickstart", here=True)
    if is_url(run):
        address, token = run, read_token(options.auth_token_file)
    else:
        address = on_this_machine(read_addresses(Path(run))[0])
        token, tls = secrets_in(Path(run), options.auth_token_file, tls)
    found = take_checkpoint(address, token, options.timeout_seconds, tls)
    if found.state != "complete":
        which = f"checkpoint {found.number}" if found.number else "no checkpoint"
        late = (
            f" after {options.timeout_seconds:g} s: it may still be completed"
            if found.state == "open"
            else ""
        )
        fail(f"{which}: {found.state}{late}: {found.words}", ABANDONED)
    size = format_bytes(found.nbytes)
    typer.echo(f"checkpoint {found.number} of the whole run: {size}, {found.folder}")
    if found.missing:
        typer.echo(f"without {', '.join(found.missing)}")
