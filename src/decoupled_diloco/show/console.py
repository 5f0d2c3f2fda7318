"""The console of all commands: literal text, tables without rules, names with values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class SteadyConsole(Console):
    """A console that prints text literally, and survives the end of its reader.

    The output contains paths and messages from other programs, so brackets in it are not markup.
    When the reader of a pipe exits, as in ``ddiloco train … | head``, rich would end the process
    with exit code 1. This console lets the command continue, without further output.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(markup=False, highlight=False, **arguments)

    def on_broken_pipe(self) -> None:
        """Discard all further output; buffered text would otherwise fail at exit."""
        self.quiet = True
        drop_output(self.file)

    def print_text(self, text: str | Text, style: str = "") -> None:
        """Print a line without wrapping it, so that a path in it can be copied."""
        self.print(text, style=style, soft_wrap=True)


def drop_output(file: IO[str]) -> None:
    """Discard everything that is written to a file from now on."""
    with contextlib.suppress(OSError):  # one without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def plain_table(
    *header: str, gap: int = 2, left: Collection[str] | None = None, wrap: bool = True
) -> Table:
    """Return a table without rules.

    Args:
        header: Names of the columns. A name may have two lines; cells are then bottom-aligned.
        gap: Spaces between two columns.
        left: Names of text columns; the others are right-aligned numbers. Default: all.
        wrap: Whether a long cell is wrapped; otherwise it is truncated.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for name in header:
        table.add_column(
            name,
            justify="left" if left is None or name in left else "right",
            vertical="bottom" if "\n" in "".join(header) else "top",
            no_wrap=not wrap,
            overflow="fold" if wrap else "ellipsis",
            min_width=None if wrap else max(map(len, name.split("\n"))),
        )
    return table


def named_values(pairs: Iterable[tuple[str, str]]) -> Table:
    """Return a table with names in one column and their values in the next."""
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    return grid
