"""`ddiloco plugins`: list the methods, workloads and commands that a run can use."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import NamedTuple

import typer

from decoupled_diloco._version import __version__
from decoupled_diloco.cli.command_line import CommandOptions, command
from decoupled_diloco.cli.shared_options import make_console
from decoupled_diloco.config.plugins import GROUP, SHIPPED
from decoupled_diloco.workloads import BUILT_IN

KINDS = {GROUP: "method"} | {f"{GROUP}.{kind}s": kind for kind in ("workload", "command", "module")}
"""The kind of each entry-point group."""


class Plugin(NamedTuple):
    """One name that a run's file or the command line can use."""

    kind: str
    name: str
    version: str
    module: str


class PluginsOptions(CommandOptions):
    """Options of `ddiloco plugins`."""


@command(PluginsOptions)
def plugins(options: PluginsOptions) -> None:
    """List methods, workloads and commands that a run can use, with their versions.

    A method is a codec, merge rule, outer optimizer, participation rule or schedule. Those of this
    package come first, then those of other installed packages. Any class of torch.optim is an outer
    optimizer, too.
    """
    found = [*_shipped(), *_installed()]
    console = make_console()
    if not console.is_terminal:
        for each in found:
            typer.echo("\t".join(each))
        return
    from decoupled_diloco.show.console import plain_table

    table = plain_table(*Plugin._fields)
    for each in found:
        table.add_row(*each)
    console.print(table)


def _shipped() -> Iterator[Plugin]:
    for kind, names in {**SHIPPED, "workload": BUILT_IN}.items():
        yield from (Plugin(kind, name, __version__, GROUP) for name in names)


def _installed() -> Iterator[Plugin]:
    """Yield the entry points of installed packages, without an import of their code."""
    for group, kind in KINDS.items():
        for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
            version = entry.dist.version if entry.dist is not None else ""
            yield Plugin(kind, entry.name, version, entry.value)
