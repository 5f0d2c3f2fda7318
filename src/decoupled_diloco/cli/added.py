"""Commands of other distributions, by the entry points in which those name them.

`ddiloco plan` and `ddiloco goodput` are decoupled-diloco-plan's. Where it is not installed, a
command of that name says how to install it, whatever it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import typer

from decoupled_diloco.cli.options import fail

GROUP = "decoupled_diloco.commands"
HOW = "pip install 'decoupled-diloco[plan]' (in a clone: pip install -e packages/plan)"
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_command(app: typer.Typer, name: str) -> None:
    """Adds the command of this name that a distribution brings, or one that says that none does."""
    for entry in entry_points(group=GROUP, name=name):
        app.command(name)(entry.load())
        return
    app.command(name, context_settings=ANYTHING)(_lacking(name))


def _lacking(name: str) -> Callable[[], None]:
    def lacking() -> None:
        fail(f"ddiloco {name} is not installed: {HOW}")

    lacking.__doc__ = f"Not installed: {HOW}."
    return lacking
