"""`ddiloco recipes` and `ddiloco scenarios`: what `train` and `simulate` can be given by name."""

from __future__ import annotations

from typing import Annotated

import typer

from decoupled_diloco.cli.options import complete_recipe, complete_scenario, make_console
from decoupled_diloco.config.files import Kind, find_shipped, shipped, title_of
from decoupled_diloco.errors import ConfigError


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Print this one.", autocompletion=complete_recipe),
    ] = None,
) -> None:
    """The recipes that come with the package, for `ddiloco train`; with a name, that one's text.

    `ddiloco recipes quickstart > mine.toml` is the beginning of one's own.
    """
    _tell("recipes", name)


def scenarios(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Print this one.", autocompletion=complete_scenario),
    ] = None,
) -> None:
    """The scenarios that come with the package, for `ddiloco simulate`; with a name, that one's."""
    _tell("scenarios", name)


def _tell(kind: Kind, name: str | None) -> None:
    if name is None:
        _print_list({name: title_of(path) for name, path in shipped(kind).items()})
    else:
        typer.echo(_read(kind, name), nl=False)


def _read(kind: Kind, name: str) -> str:
    try:
        return find_shipped(kind, name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except OSError as error:
        problem = error.strerror or str(error)
    raise ConfigError(f"{name} cannot be printed: {problem}: ddiloco {kind} lists what there is")


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
