"""The commands of `ddiloco`, in their groups, and the end of the process."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from decoupled_diloco._version import __version__
from decoupled_diloco.cli.audit_command import audit
from decoupled_diloco.cli.certs import certs
from decoupled_diloco.cli.checkpoint_command import checkpoint
from decoupled_diloco.cli.command_groups import DEBUG, INSPECT, OPERATE, PLAN, RUN, Commands
from decoupled_diloco.cli.data_command import data
from decoupled_diloco.cli.doctor import doctor
from decoupled_diloco.cli.events import events
from decoupled_diloco.cli.explain_command import explain
from decoupled_diloco.cli.export import export
from decoupled_diloco.cli.extra_commands import add_command
from decoupled_diloco.cli.intervals import intervals
from decoupled_diloco.cli.kill import kill
from decoupled_diloco.cli.launch_command import launch, stop
from decoupled_diloco.cli.list import list_runs
from decoupled_diloco.cli.logs import logs
from decoupled_diloco.cli.metrics import metrics
from decoupled_diloco.cli.mirror_command import mirror
from decoupled_diloco.cli.parties_command import parties
from decoupled_diloco.cli.plugins_command import plugins
from decoupled_diloco.cli.privacy_command import privacy
from decoupled_diloco.cli.recipes import recipes
from decoupled_diloco.cli.replay_command import replay
from decoupled_diloco.cli.report_command import report
from decoupled_diloco.cli.run_commands import evaluator, learner, relay, syncer, train
from decoupled_diloco.cli.shared_options import fail
from decoupled_diloco.cli.status_command import status
from decoupled_diloco.cli.traces_command import traces
from decoupled_diloco.cli.track import track
from decoupled_diloco.cli.watch import watch
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.launch.termination import INTERRUPTED

RENAMED = {
    "tape": "events",
    "ledger": "data",
    "timing": "intervals",
    "log": "track",
    "certificates": "certs",
}
"""Old names of commands, and what the commands are called now."""

GROUPS: dict[str, tuple[Callable[..., None] | tuple[str, str], ...]] = {
    RUN: (train, launch, syncer, relay, learner, evaluator, recipes, export),
    INSPECT: (
        *(list_runs, status, watch, logs, report, explain, data),
        *(audit, track, metrics, traces),
    ),
    OPERATE: (stop, checkpoint, kill, mirror),
    PLAN: (doctor, ("plan", "plan"), ("goodput", "plan"), intervals, privacy, plugins),
    DEBUG: (events, replay, ("simulate", "lab"), ("scenarios", "lab"), ("chaos", "lab")),
}
"""The commands of each group; a pair names a command of another distribution, and its extra."""

app = Commands(
    name="ddiloco",
    help="Train on machines that fail, differ and are far apart (Decoupled DiLoCo).",
    renamed=RENAMED,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 2 wrong configuration or usage, 3 protocol, 4 transport, 5 access "
    "refused, 6 storage, 7 merge, 8 another process acts for the shard, 130 interrupted, 1 "
    "anything else.",
)

for panel, commands in GROUPS.items():
    for each in commands:
        if isinstance(each, tuple):
            add_command(app, *each, panel)
        else:
            name = "list" if each is list_runs else None
            app.command(name, rich_help_panel=panel)(each)
app.add_typer(certs, rich_help_panel=OPERATE)
app.add_typer(parties, rich_help_panel=OPERATE)


@app.command(hidden=True)
def fork_server(
    run: Annotated[str, typer.Argument(help="TOML file of the run.")],
    room: Annotated[str, typer.Argument(help="Blanks, for the command lines of its children.")],
) -> None:
    """Import everything, then fork the processes that run another of these commands."""
    from decoupled_diloco.launch.fork_server import serve

    app(serve())


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line; every operating error is one sentence and an exit code."""
    try:
        try:
            app(standalone_mode=True)
        except DilocoError as error:
            fail(str(error), error.exit_code)
        _end(0)
    except KeyboardInterrupt:
        _end(INTERRUPTED)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)


UNWRITTEN = 120
"""The exit code of Python if its output cannot be written and nothing else failed."""


def _end(code: int) -> NoReturn:
    """End the process without Python's own shutdown.

    With PyTorch loaded, that shutdown takes a second of CPU time. A forked process takes longer,
    because it copies all the memory that it shares. Ctrl-C would wait for every process of a run.
    """
    if code != INTERRUPTED:
        threading._shutdown()  # type: ignore[attr-defined]  # as Python does: threads, then atexit
        atexit._run_exitfuncs()
    logging.shutdown()
    for each in gc.get_objects():  # a file that a user's workload has left open
        if issubclass(type(each), io.IOBase) and each not in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                each.flush()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or UNWRITTEN
    os._exit(code)
