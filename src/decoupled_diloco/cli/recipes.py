"""`ddiloco recipes`: list the recipes that `ddiloco train` accepts by name."""

from __future__ import annotations

from typing import Annotated

import typer

from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.shared_options import complete_recipe, make_console
from decoupled_diloco.config.toml_files import RECIPES, Shipped, title_of
from decoupled_diloco.errors import ConfigError


class RecipesOptions(CommandOptions):
    """Options of `ddiloco recipes`."""

    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Print this recipe. Default: list all recipes.",
            autocompletion=complete_recipe,
        ),
    ] = None


@command(RecipesOptions)
def recipes(options: RecipesOptions) -> None:
    """List the recipes that come with the package, or print one of them.

    Example: ddiloco recipes quickstart > mine.toml starts a configuration of your own.
    """
    print_shipped(RECIPES, options.name)


def print_shipped(shipped: Shipped, name: str | None) -> None:
    """List the shipped files of a kind, or print the named one."""
    if name is None:
        _print_list({name: title_of(path) for name, path in shipped.files().items()})
    else:
        typer.echo(_read(shipped, name), nl=False)


def _read(shipped: Shipped, name: str) -> str:
    try:
        return shipped.find(name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except OSError as error:
        problem = error.strerror or str(error)
    raise ConfigError(
        f"{name} cannot be printed: {problem}: ddiloco {shipped.kind}s lists the available names"
    )


def _print_list(titles: dict[str, str]) -> None:
    console = make_console()
    if not console.is_terminal:
        for name, title in titles.items():
            typer.echo(f"{name}\t{title}")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, title in titles.items():
        table.add_row(Text(name, style="bold"), title)
    console.print(table)
