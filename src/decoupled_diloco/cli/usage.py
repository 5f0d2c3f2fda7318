"""How the usage line of a command is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand

_F = TypeVar("_F", bound=Callable[..., Any])


class Command(TyperCommand):
    """A command whose usage says `RUN`, and `[NAME]` for what may be left out.

    Newer versions of typer put braces around the one, and brackets around the other's brackets.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the command's name."""
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^(?:\{(.*)\}|\[(\[.*\])\])$", r"\1\2", piece) for piece in pieces]


class Commands(typer.Typer):
    """A `Typer` all of whose commands are of class `Command`."""

    def command(self, name: str | None = None, **arguments: Any) -> Callable[[_F], _F]:
        """As that of `Typer`."""
        return super().command(name, cls=Command, **arguments)
