"""Commands of other distributions, by the entry points in which those name them.

`ddiloco plan` and `ddiloco goodput` are decoupled-diloco-plan's. Where it is not installed, or does
not fit, a command of that name says how to install it, whatever it is given; all others work.
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
    why = "is not installed"
    for entry in entry_points(group=GROUP, name=name):
        try:
            app.command(name)(entry.load())
        except (ImportError, AttributeError) as error:
            why = f"cannot be loaded ({error})"
        else:
            return
    app.command(name, context_settings=ANYTHING)(_lacking(name, why))


def _lacking(name: str, why: str) -> Callable[[], None]:
    def lacking() -> None:
        fail(f"ddiloco {name} {why}: {HOW}")

    lacking.__doc__ = f"Not here: ddiloco {name} says why, and how to install it."
    return lacking
