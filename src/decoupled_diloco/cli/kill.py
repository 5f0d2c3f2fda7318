"""`ddiloco kill`: send a signal to one process of a run on this machine."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.cli.shared_options import RunFolder
from decoupled_diloco.errors import ConfigError

if TYPE_CHECKING:
    from decoupled_diloco.launch.run_processes import LocalProcess


class KillOptions(CommandOptions):
    """Options of `ddiloco kill`."""

    process: Annotated[
        str,
        typer.Argument(
            metavar="PROCESS",
            help="Name of the process, such as learner-1, shard-0 or evaluator (see ddiloco "
            "status --pids).",
        ),
    ]
    run: RunFolder = ""
    signal_name: Annotated[
        str, typer.Option("--signal", metavar="NAME", help="Signal to send, such as TERM or STOP.")
    ] = "KILL"


@command(KillOptions)
def kill(options: KillOptions) -> None:
    """Kill one process of a run on this machine; the launcher starts it again.

    Example: ddiloco kill learner-1 shows how a run heals.
    """
    from decoupled_diloco.launch.termination import send_to_all_of

    number = _signal_of(options.signal_name)
    name, folder = options.process, options.run
    alone = not folder and "/" in name  # processes have no slash
    if alone or (folder and _is_folder(name) and not _is_folder(folder)):  # as ddiloco logs has it
        name, folder = folder, name
    if not name:
        raise ConfigError(
            f"{folder} is a run folder: name a process as well, as in ddiloco kill learner-1 "
            f"{folder}"
        )
    run = Path(chosen_run(folder, f"ddiloco kill {name} runs/quickstart", here=True))
    found = _find(name, run)
    send_to_all_of(found.pid, number)
    typer.echo(f"sent {number.name} to {found.name} (process {found.pid}) of {run}")


def _is_folder(word: str) -> bool:
    return "/" in word or Path(word).is_dir()


def _signal_of(name: str) -> signal.Signals:
    known = {each.name.removeprefix("SIG"): each for each in signal.Signals}
    found = known.get(name.upper().removeprefix("SIG"))
    if found is None:
        raise ConfigError(f"--signal {name!r} is not a valid signal: give one such as KILL or TERM")
    return found


def _find(name: str, run: Path) -> LocalProcess:
    """Return the process of a run that is to receive the signal.

    Raises:
        ConfigError: The run is not running on this machine, or the process does not exist.
    """
    from decoupled_diloco.launch.launch_folder import was_launched
    from decoupled_diloco.launch.run_folder import launcher_of
    from decoupled_diloco.launch.run_processes import local_processes

    if was_launched(run):
        raise ConfigError(
            f"{run} runs on a cluster: ddiloco kill works for runs on this machine only, so use "
            "the commands of the cluster"
        )
    launcher_of(run, "ddiloco kill")
    processes = {each.name: each for each in local_processes(run)}
    if name not in processes:
        raise ConfigError(
            f"{name!r} is not a process of {run}: give one of {', '.join(processes) or 'none'}"
        )
    found = processes[name]
    if found.ended:
        raise ConfigError(f"{name} is not running: {found.ended}")
    if not found.exists:
        raise ConfigError(
            f"{name} is not running: process {found.pid} has ended, or its id belongs to another "
            "program now"
        )
    return found
