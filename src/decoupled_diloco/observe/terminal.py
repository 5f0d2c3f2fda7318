"""What commands print with: lines as they are, tables without rules, names with values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


class SteadyConsole(Console):
    """A console that prints text as it is, and whose reader may go away.

    What is printed names folders and repeats what others say: brackets in it are no markup. When
    its reader goes away, as in ``ddiloco train … | head``, rich would end the process with exit
    code 1; here the command goes on and prints nothing more.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(markup=False, highlight=False, **arguments)

    def on_broken_pipe(self) -> None:
        """Sends what is left of the output to nowhere; what is buffered fails at exit otherwise."""
        self.quiet = True
        drop_output(self.file)

    def say(self, text: str | Text, style: str = "") -> None:
        """Prints a line without breaking it, so that a path in it can be copied."""
        self.print(text, style=style, soft_wrap=True)


def drop_output(file: IO[str]) -> None:
    """Lets what is written there lead to nowhere from now on."""
    with contextlib.suppress(OSError):  # one without a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def plain_table(
    *header: str, gap: int = 2, left: Collection[str] | None = None, wrap: bool = True
) -> Table:
    """A table without rules.

    Args:
        header: Names of the columns; a name of two lines stands at the bottom, as its cells do.
        gap: Blanks between two of them.
        left: Names of the columns of text; the others hold numbers, flush right. Default: all.
        wrap: Whether a long cell takes several lines, where it would be cut off otherwise.
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
    """Names in a column, and what they stand for beside them."""
    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        grid.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    return grid
