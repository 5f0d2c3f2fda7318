"""How the usage line of a command is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

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
        """As that of `Typer`."""
        return super().command(name, cls=Command, **arguments)
