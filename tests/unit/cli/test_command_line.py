"""Commands from models, and options that are settings."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from decoupled_diloco.cli.certs import certs
from decoupled_diloco.cli.command_line import (
    CommandOptions,
    command,
    option_of,
    overrides,
    setting,
)
from decoupled_diloco.cli.main import app
from decoupled_diloco.cli.parties_command import parties
from decoupled_diloco.cli.shared_options import listed
from decoupled_diloco.config import SyncerSettings


class MineOptions(CommandOptions):
    """Options of the command below."""

    what: Annotated[str, typer.Argument(metavar="WHAT")]
    """The topic."""

    port: Annotated[int | None, setting(SyncerSettings, "port")] = None
    addresses: Annotated[
        tuple[str, ...], setting(SyncerSettings, "addresses", metavar="URL[,URL…]", parser=listed)
    ] = ()
    share: Annotated[float, typer.Option("--how-much", parser=float)] = 0.25
    """The share. Default: a quarter."""

    loud: Annotated[bool, typer.Option("--loud/--quiet")] = False
    """Whether the output is loud."""


def run(*arguments: str) -> tuple[str, list[MineOptions]]:
    received: list[MineOptions] = []

    @command(MineOptions)
    def mine(options: MineOptions) -> None:
        """Does nothing."""
        received.append(options)

    own = typer.Typer(pretty_exceptions_enable=False)
    own.command()(mine)
    result = CliRunner().invoke(own, [*arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output, received


def test_the_help_is_the_documentation_of_fields_and_settings() -> None:
    text, _ = run("--help")
    assert "Does nothing." in text
    assert "The topic." in text
    assert "Port of the first shard. The other shards use the following ports." in text
    assert "URL[,URL…]" in text
    assert "The share. Default: a quarter." in text
    assert "0.25" in text


def test_options_record_what_was_given() -> None:
    _, [bare] = run("this")
    assert bare.given == {"what": "this"}
    assert (bare.port, bare.addresses, bare.share, bare.loud) == (None, (), 0.25, False)
    _, [options] = run(
        "this", "--addresses", "http://a:1, http://b:2", "--loud", "--how-much", "0.5"
    )
    assert options.given == {
        "what": "this",
        "addresses": ("http://a:1", "http://b:2"),
        "share": 0.5,
        "loud": True,
    }
    settings = overrides(options, SyncerSettings, "port", "addresses")
    assert settings == ['syncer.addresses=["http://a:1", "http://b:2"]']
    assert option_of(MineOptions, "share") == "--how-much"
    assert option_of(MineOptions, "loud") == "--loud"
    assert option_of(MineOptions, "port") == "--port"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "70000"], "port=70000 in [syncer] is out of range"),
        (["--addresses", "syncer:7070"], "addresses in [syncer] has 1 entries, but shards=2"),
        (["--auth-token-file", "no/such"], "token_file='no/such' cannot be read"),
        (["--new", "--shard", "0"], "--new cannot be combined with --resume or --shard"),
        (["--standby"], "--standby requires --shard, and a run with syncer.standby=true"),
        (["--checkpoint", "last"], "--checkpoint requires --resume"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_the_syncer_are_settings(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["syncer", "homelab", *arguments])
    printed = result.stderr + str(result.exception)
    assert sentence in printed, result.output


def test_every_command_has_an_options_model() -> None:
    by_hand = {
        each.callback.__name__
        for group in (app, certs, parties)
        for each in group.registered_commands
        if each.callback is not None and each.callback.__module__ != command.__module__
    }
    assert by_hand == {"fork_server"}, "this hidden command has no options"
