"""`ddiloco parties`: create the keys of parties, and check the file that all of them hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from decoupled_diloco.cli.command_groups import Commands
from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.shared_options import listed
from decoupled_diloco.config.settings import NAME
from decoupled_diloco.errors import ConfigError

parties = Commands(
    name="parties",
    help="Create keys of the organizations that train together, and check parties.toml.",
)


class CreateKeyOptions(CommandOptions):
    """Options of `ddiloco parties create-key`."""

    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the party, such as hospital-a.")
    ]
    folder: Annotated[Path, typer.Option(metavar="FOLDER")] = Path()
    """Folder for the private key, NAME.key. Default: the current folder."""

    learners: Annotated[tuple[str, ...], typer.Option(metavar="NAME[,NAME…]", parser=listed)] = ()
    """Names of the party's learners; "*" at the end of a name stands for anything. Default:
    NAME-*."""


@command(CreateKeyOptions)
def create_key(options: CreateKeyOptions) -> None:
    """Create a party's key pair, and print its entry for parties.toml."""
    import re

    from decoupled_diloco.config.signing_keys import create_signing_key

    name = options.name
    if not re.match(NAME, name):
        raise ConfigError(
            f"party {name!r} is not a valid name: use letters, digits, '.', '_' and '-', and begin "
            "with a letter or a digit"
        )
    path = options.folder / f"{name}.key"
    public = create_signing_key(path).public
    learners = json.dumps(options.learners or [f"{name}-*"])
    typer.echo(f'[[parties]]\nname = "{name}"\nlearners = {learners}\nkey = "{public}"\n')
    typer.echo(
        f"{path} is the private key: keep it secret. Send the lines above to the other parties: "
        "all of them add them to parties.toml",
        err=True,
    )


class CheckOptions(CommandOptions):
    """Options of `ddiloco parties check`."""

    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file, parties.toml.")]


@command(CheckOptions)
def check(options: CheckOptions) -> None:
    """Check a file of parties, and print what it says and its digest."""
    from decoupled_diloco.config.parties import load_parties

    found = load_parties(options.file)
    width = max(len(party.name) for party in found.parties)
    for party in found.parties:
        most = f"{party.share_min:.0%} to {party.share_max:.0%} of a merge"
        sees = "sees all learners" if party.sees == "all" else "sees its own learners"
        learners = ", ".join(party.learners)
        stops = ", may stop the run" if party.may_stop else ""
        typer.echo(f"{party.name:{width}}  {learners}: {most}, {sees}{stops}")
    typer.echo(f"digest {found.digest}: it must be equal at all parties")


for name, each in (("create-key", create_key), ("check", check)):
    parties.command(name)(each)
