"""`ddiloco scenarios`: list the scenarios that `ddiloco simulate` and `ddiloco chaos` accept."""

from __future__ import annotations

from typing import Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.recipes import print_shipped
from decoupled_diloco.cli.shared_options import complete_shipped
from decoupled_diloco_lab import SCENARIOS


def complete_scenario(incomplete: str) -> list[tuple[str, str]]:
    """Return the shipped scenarios that start with a text, for the shell."""
    return complete_shipped(SCENARIOS, incomplete)


class ScenariosOptions(CommandOptions):
    """Options of `ddiloco scenarios`."""

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Print this scenario. Default: list all scenarios.",
            autocompletion=complete_scenario,
        ),
    ] = None


@command(ScenariosOptions)
def scenarios(options: ScenariosOptions) -> None:
    """List the scenarios that come with the package, or print one of them."""
    print_shipped(SCENARIOS, options.name)
