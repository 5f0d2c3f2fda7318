"""The commands of `ddiloco` and their options. What they do is elsewhere."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from decoupled_diloco._version import __version__
from decoupled_diloco.cli.added import add_command
from decoupled_diloco.cli.certificates import certificates
from decoupled_diloco.cli.chaos import chaos
from decoupled_diloco.cli.checkpoint import checkpoint
from decoupled_diloco.cli.doctor import doctor
from decoupled_diloco.cli.explain import explain
from decoupled_diloco.cli.export import export
from decoupled_diloco.cli.launch import launch, stop
from decoupled_diloco.cli.ledger import ledger
from decoupled_diloco.cli.log import log
from decoupled_diloco.cli.metrics import metrics
from decoupled_diloco.cli.options import fail
from decoupled_diloco.cli.recipes import recipes, scenarios
from decoupled_diloco.cli.replay import replay
from decoupled_diloco.cli.report import report
from decoupled_diloco.cli.roles import evaluator, learner, syncer, train
from decoupled_diloco.cli.simulate import simulate
from decoupled_diloco.cli.status import status
from decoupled_diloco.cli.tape import tape
from decoupled_diloco.cli.timing import timing
from decoupled_diloco.cli.traces import traces
from decoupled_diloco.cli.watch import watch
from decoupled_diloco.errors import Error
from decoupled_diloco.launch.termination import INTERRUPTED

_F = TypeVar("_F", bound=Callable[..., Any])


class _PlainFlags:
    """Help that says nothing of the type of flags; newer versions of typer write ``<bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, flags without a name for what they take."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class Group(_PlainFlags, TyperGroup):
    """The command that has the others."""


class Command(_PlainFlags, TyperCommand):
    """A command whose usage says `RUN`, and `[NAME]` for what may be left out.

    Newer versions of typer put braces around the one, and brackets around the other's brackets.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the command's name."""
        pieces = super().collect_usage_pieces(ctx)
        return [
            re.sub(r"^(?:\{(.*)\}(?:\.{3})?|\[(\[.*\])\])$", r"\1\2", piece) for piece in pieces
        ]


class Commands(typer.Typer):
    """A `Typer` all of whose commands are of class `Command`, with `-h` for `--help`."""

    def __init__(self, **arguments: Any) -> None:
        short = {"help_option_names": ["-h", "--help"]}
        super().__init__(cls=Group, context_settings=short, **arguments)

    def command(self, name: str | None = None, **arguments: Any) -> Callable[[_F], _F]:
        return super().command(name, cls=Command, **arguments)


app = Commands(
    name="ddiloco",
    help="Train on machines that fail, differ and sit far apart (Decoupled DiLoCo).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 2 wrong configuration or usage, 3 protocol, 4 transport, 5 access "
    "refused, 6 storage, 7 merge, 8 another process acts for the shard, 130 interrupted, 1 "
    "anything else.",
)

for each in (train, launch, stop, syncer, learner, evaluator, recipes, scenarios, simulate):
    app.command()(each)
add_command(app, "plan")
for each in (
    chaos,
    export,
    doctor,
    status,
    watch,
    log,
    metrics,
    traces,
    timing,
    explain,
    report,
    tape,
    replay,
):
    app.command()(each)
add_command(app, "goodput")
for each in (ledger, checkpoint, certificates):
    app.command()(each)


@app.command(hidden=True)
def fork_server(
    run: Annotated[str, typer.Argument(help="Whose it is.")],
    room: Annotated[str, typer.Argument(help="Blanks, for the command lines of its children.")],
) -> None:
    """A process that has imported all, and forks those that run another of these commands."""
    from decoupled_diloco.launch.fork_server import serve

    app(serve())


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> NoReturn:
    """The entry point: every operating error is one sentence and an exit code."""
    try:
        app(standalone_mode=True)
    except Error as error:
        fail(str(error), error.exit_code)
    except (KeyboardInterrupt, SystemExit) as end:  # typer makes the one of the other
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        # At once: taking torch and its threads down can cost seconds on a busy machine, and the
        # user who interrupts a run waits for each of its processes.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    sys.exit(0)
