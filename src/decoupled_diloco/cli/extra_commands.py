"""Commands of other distributions, found by their entry points.

If a distribution is not installed or cannot be loaded, its command prints how to install it. All
other commands work.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import typer

from decoupled_diloco.cli.shared_options import fail

GROUP = "decoupled_diloco.commands"
HOW = "run pip install -e packages/{0} in the clone"
ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_command(app: typer.Typer, name: str, extra: str, panel: str | None = None) -> None:
    """Add the command of another distribution, or a command that names the extra to install.

    Args:
        app: The command line.
        name: Name of the command and of its entry point.
        extra: The extra of this distribution that installs the other one.
        panel: The group of `ddiloco --help`.
    """
    why = "is not installed"
    for entry in entry_points(group=GROUP, name=name):
        try:
            app.command(name, rich_help_panel=panel)(entry.load())
        except (ImportError, AttributeError) as error:
            why = f"cannot be loaded ({error})"
        else:
            return
    lacking = _lacking(name, f"{why}: {HOW.format(extra)}")
    app.command(name, context_settings=ANYTHING, rich_help_panel=panel)(lacking)


def _lacking(name: str, why: str) -> Callable[[], None]:
    def lacking() -> None:
        fail(f"ddiloco {name} {why}")

    lacking.__doc__ = f"Not installed: run ddiloco {name} to see how to install it."
    return lacking
