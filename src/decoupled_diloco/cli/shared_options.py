"""Options that several commands of `ddiloco` share, with the console and the exit codes."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from decoupled_diloco.cli.command_line import CommandOptions
from decoupled_diloco.config.toml_files import RECIPES, Shipped, title_of
from decoupled_diloco.errors import ConfigError

if TYPE_CHECKING:
    from decoupled_diloco.show.console import SteadyConsole
    from decoupled_diloco.tape.sources import Source
    from decoupled_diloco.transport.tls import TLSConfig

TITLE_WIDTH_MAX = 60
"""Characters of a recipe's title beside its name: a shell shows one line for each."""

INTERVAL_SECONDS_MIN = 0.2
"""The shortest time between two reads of a run."""


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Return the shipped recipes that start with a text, for the shell."""
    return complete_shipped(RECIPES, incomplete)


def complete_shipped(shipped: Shipped, incomplete: str) -> list[tuple[str, str]]:
    """Return the shipped files whose names start with a text, with their titles."""
    return [
        (name, shorten(title_of(path), TITLE_WIDTH_MAX, placeholder=" …"))
        for name, path in shipped.files().items()
        if name.startswith(incomplete)
    ]


def complete_run(incomplete: str) -> list[str]:
    """Return the run folders in runs/ that start with a text, for the shell."""
    from decoupled_diloco.cli.runs import RUNS, runs_in

    return [str(run) for run in runs_in(RUNS) if str(run).startswith(incomplete)]


def complete_config_or_run(incomplete: str) -> list[str | tuple[str, str]]:
    """Return the run folders and the shipped recipes that start with a text, for the shell."""
    return [*complete_run(incomplete), *complete_recipe(incomplete)]


def find_recipe(name: str) -> Path:
    """Return the TOML file of a run, given by its path or by a recipe's name."""
    return find_shipped(RECIPES, name)


def find_shipped(shipped: Shipped, name: str) -> Path:
    """Return the file that an argument names, or end the command with one sentence."""
    try:
        return shipped.find(name)
    except ConfigError as error:  # a ValueError, which typer would put into a box
        fail(str(error), error.exit_code)


RunConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="TOML file of the run, or name of a shipped recipe (see ddiloco recipes).",
        parser=find_recipe,
        autocompletion=complete_recipe,
    ),
]
ConfigOrResumed = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="TOML file of the run, or name of a shipped recipe (see ddiloco recipes). With "
        "--resume: folder of the run, or its address in an object store. Default with --resume: "
        "the newest run in runs/.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
RunFolder = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run folder. Default: the newest run in runs/.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
RunTape = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run folder, event tape, or address in an object store (s3://…). Default: the "
        "newest run in runs/.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
RunSource = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run folder, event tape, address in an object store (s3://…), or URL of a running "
        "syncer (http://HOST:PORT, with --auth-token-file). Default: the newest run in runs/.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
RunHereOrSyncer = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run folder of a run on this machine, or URL of its syncer (http://HOST:PORT, with "
        "--auth-token-file). Default: the newest run in runs/.",
        autocompletion=complete_run,
        show_default=False,
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in its folder, from its last state.")
]
CheckpointToGoBackTo = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="last|NUMBER",
        help="With --resume: go back to this checkpoint of the whole run first.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting, such as sync.sync_every=48. Can be given several times.",
    ),
]
AuthTokenFile = Annotated[
    Path | None,
    typer.Option("--auth-token-file", metavar="FILE", help="File with the run's auth token."),
]
CaCert = Annotated[
    Path | None,
    typer.Option(
        "--ca-cert",
        metavar="PEM",
        help="For https://: certificate of the CA that signed the syncer's certificate.",
    ),
]
Cert = Annotated[
    Path | None,
    typer.Option(
        "--cert",
        metavar="PEM",
        help="For https://: certificate to present, if the syncer requires one.",
    ),
]
Key = Annotated[Path | None, typer.Option("--key", metavar="PEM", help="Private key for --cert.")]
SyncerAddresses = Annotated[
    str,
    typer.Option(
        "--syncer",
        metavar="URL[,URL…]|RUN",
        help="Addresses of the shards, or a run folder that this machine shares with the syncer.",
        show_default=False,
    ),
]
IntervalSeconds = Annotated[
    float,
    typer.Option(
        "--interval-seconds",
        metavar="SECONDS",
        min=INTERVAL_SECONDS_MIN,
        help="Time between two reads of the run, in seconds.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON to standard output instead of text.")
]
StopWithParent = Annotated[bool, typer.Option("--stop-with-parent", hidden=True)]


def listed(text: str) -> tuple[str, ...]:
    """Return the items of an option that takes several, separated by commas."""
    return tuple(item.strip() for item in text.split(",") if item.strip())


def require_urls(syncer: str, *, standby: bool = True, option: str = "--syncer") -> tuple[str, ...]:
    """Return the addresses in an option, or end the command with one sentence.

    Args:
        syncer: The text of the option.
        option: The option.
        standby: Whether an entry may have the address of a shard's standby as well.
    """
    from decoupled_diloco.config.addresses import address_problem, alternatives, without_password

    found = listed(syncer)
    each_alone = [one for each in found for one in (alternatives(each) if standby else [each])]
    if any(map(address_problem, each_alone)):
        fail(f"{option} {without_password(syncer)!r} is not a valid URL: write http://HOST:PORT")
    return found


class ConnectOptions(CommandOptions):
    """Options of a command that connects to a syncer."""

    auth_token_file: AuthTokenFile = None
    ca_cert: CaCert = None
    cert: Cert = None
    key: Key = None

    def certificates(self) -> TLSConfig | None:
        """Return the certificates that the command verifies with and presents.

        Raises:
            ConfigError: Only one of --cert and --key is given.
        """
        from decoupled_diloco.transport.tls import TLSConfig

        given = (self.ca_cert, self.cert, self.key)
        return None if given == (None, None, None) else TLSConfig(*given)

    def open_run(self, run: str, *, detail: bool = False) -> Source:
        """Open the run that the command line names, with its auth token and certificates."""
        from decoupled_diloco.launch.run_folder import read_token
        from decoupled_diloco.tape.sources import open_source

        return open_source(
            run, read_token(self.auth_token_file), self.certificates(), detail=detail
        )


def make_console() -> SteadyConsole:
    from decoupled_diloco.show.console import SteadyConsole

    return SteadyConsole()


def exit_with(code: int) -> NoReturn:
    raise typer.Exit(code)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the command with one sentence on stderr."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def prepare(parent_matters: bool, prefix: str = "") -> None:
    """Set up logging and the watch for the parent, before torch is imported."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {prefix}%(levelname)s %(message)s",
        stream=sys.stdout,
    )
    if parent_matters:
        from decoupled_diloco.launch.processes import stop_with_parent

        stop_with_parent()
