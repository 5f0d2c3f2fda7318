"""`ddiloco list`: list the runs in a folder, with the state of each."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.runs import RUNS, has_tape, runs_in
from decoupled_diloco.cli.shared_options import Json, fail, make_console
from decoupled_diloco.errors import DilocoError

if TYPE_CHECKING:
    from decoupled_diloco.show.status import RunStatus


class ListOptions(CommandOptions):
    """Options of `ddiloco list`."""

    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with run folders.", show_default=True)
    ] = RUNS
    as_json: Json = False


@dataclass(frozen=True)
class ListedRun:
    """One run of the list.

    Attributes:
        run: Its folder.
        name: Its name in the settings.
        state: ``running``, ``ended``, ``failed`` or ``unknown``.
        phase: See `RunStatus`; ``submitted`` for a run on a cluster without a tape here.
        step: The last global step.
        max_steps: The step that ends the run, if any.
        started: When it started, in seconds since 1970.
        age_seconds: How long ago that was.
    """

    run: str
    name: str
    state: str
    phase: str
    step: int
    max_steps: int | None
    started: float
    age_seconds: float


@command(ListOptions)
def list_runs(options: ListOptions) -> None:
    """List the runs in a folder, the newest first: state, last step and start time."""
    if not options.folder.is_dir() and options.given.get("folder"):
        fail(f"{options.folder} is not a folder: pass a folder with run folders")
    now = time.time()
    started = runs_in(options.folder)
    newest_first = sorted(started, key=lambda run: started[run], reverse=True)
    found = [_listed(run, started[run], now) for run in newest_first]
    if options.as_json:
        typer.echo(json.dumps([asdict(each) for each in found], indent=1, ensure_ascii=False))
    elif found:
        _print(found)
    else:
        typer.echo(f"{options.folder} contains no runs", err=True)


def _listed(run: Path, started: float, now: float) -> ListedRun:
    from decoupled_diloco.launch.launch_folder import was_launched
    from decoupled_diloco.launch.run_folder import is_running_here
    from decoupled_diloco.tape.reader import Follower

    if not has_tape(run):
        launched = was_launched(run)
        state = "running" if not launched and is_running_here(run) else "unknown"
        phase = "submitted" if launched else "starting" if state == "running" else "no tape"
        return ListedRun(str(run), run.name, state, phase, 0, None, started, now - started)
    from decoupled_diloco.run_model import RunModel
    from decoupled_diloco.show.status import status_of

    model = RunModel()
    try:
        model.take_all(Follower(run).stream_progress())
    except DilocoError:
        phase = "unreadable"
        return ListedRun(str(run), run.name, "unknown", phase, 0, None, started, now - started)
    status = status_of(model, now)
    began = status.began or started
    return ListedRun(
        run=str(run),
        name=status.name or run.name,
        state=_state_of(run, status),
        phase=status.phase,
        step=status.step,
        max_steps=status.max_steps,
        started=began,
        age_seconds=max(0.0, now - began),
    )


def _state_of(run: Path, status: RunStatus) -> str:
    """Return whether a run is running, has ended or has failed, as far as that is known here."""
    from decoupled_diloco.launch.run_folder import is_running_here

    if status.has_ended:
        return "ended"
    if status.virtual:
        return "failed"  # a simulation that did not finish no longer has a process
    here = is_running_here(run)
    if here is not None:
        return "running" if here else "failed"
    return "unknown" if status.phase in ("silent", "empty") else "running"


def _print(found: list[ListedRun]) -> None:
    from decoupled_diloco.show.console import plain_table
    from decoupled_diloco.show.status import step_of_budget
    from decoupled_diloco.units import format_duration

    table = plain_table("run", "state", "phase", "step", "started", "age", left=_TEXT)
    for each in found:
        step = step_of_budget(each.step, each.max_steps)
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.started))
        phase = "" if each.phase == each.state else each.phase
        table.add_row(each.run, each.state, phase, step, at, format_duration(each.age_seconds))
    make_console().print(table)


_TEXT = ("run", "state", "phase", "started")
