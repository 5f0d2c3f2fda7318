"""What the commands of `ddiloco` share: options, the console, exit codes."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from decoupled_diloco.config.files import Kind, find_shipped, shipped, title_of

if TYPE_CHECKING:
    from decoupled_diloco.observe.terminal import SteadyConsole
    from decoupled_diloco.transport.tls import Tls

TITLE_WIDTH_MAX = 60
"""Characters of a recipe's title beside its name: a shell shows one line for each."""


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """The shipped recipes that begin so, for the shell; files complete when there is none."""
    return _complete("recipes", incomplete)


def complete_scenario(incomplete: str) -> list[tuple[str, str]]:
    """The shipped scenarios that begin so, for the shell; files complete when there is none."""
    return _complete("scenarios", incomplete)


def _complete(kind: Kind, incomplete: str) -> list[tuple[str, str]]:
    return [
        (name, shorten(title_of(path), TITLE_WIDTH_MAX, placeholder=" …"))
        for name, path in shipped(kind).items()
        if name.startswith(incomplete)
    ]


def find_recipe(name: str) -> Path:
    """The file of a run, given by its path or by a recipe's name."""
    return find_shipped("recipes", name)


RunFile = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="The run's TOML file, or the name of a shipped recipe (see ddiloco recipes).",
        parser=find_recipe,
        autocompletion=complete_recipe,
    ),
]
RunOrFolder = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="The run's TOML file, or the name of a shipped recipe (see ddiloco recipes); with "
        "--resume, the folder of a run.",
        autocompletion=complete_recipe,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in the folder RUN, where it was.")
]
CheckpointToGoBackTo = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="last|NUMBER",
        help="With --resume: go back to this consistent checkpoint of the whole run.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, as sync.period=48."),
]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="File with the run's secret.")]
Authority = Annotated[
    Path | None,
    typer.Option(
        "--authority",
        metavar="PEM",
        help="For https://: the authority that has signed the syncer's certificate.",
    ),
]
Certificate = Annotated[
    Path | None,
    typer.Option(
        "--certificate", metavar="PEM", help="Certificate of one's own, if the syncer wants one."
    ),
]
CertificateKey = Annotated[
    Path | None, typer.Option("--key", metavar="PEM", help="Private key of --certificate.")
]
SyncerAddresses = Annotated[
    str,
    typer.Option(
        "--syncer",
        metavar="URL[,URL…]|RUN",
        help="Where the shards are; or the run folder, which the syncer's machine shares.",
    ),
]
RunSource = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A run folder, a tape, or a running syncer: http://HOST:PORT, with --token-file. "
        "Default: the newest run in runs/.",
    ),
]
StopWithParent = Annotated[bool, typer.Option("--stop-with-parent", hidden=True)]


def listed(text: str) -> tuple[str, ...]:
    """The items of an option that takes several, separated by commas."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def tls_of(authority: Path | None, certificate: Path | None, key: Path | None) -> Tls | None:
    """What a command trusts and shows.

    Raises:
        ConfigError: only one of certificate and key is given.
    """
    from decoupled_diloco.transport.tls import Tls

    given = (authority, certificate, key)
    return None if given == (None, None, None) else Tls(*given)


def make_console() -> SteadyConsole:
    from decoupled_diloco.observe.terminal import SteadyConsole

    return SteadyConsole()


def exit_with(code: int) -> NoReturn:
    raise typer.Exit(code)


def fail(message: str, code: int = 2) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
