"""What a study shows: a progress bar, a table, and a picture of the loss curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.show.charts import Canvas, Chart, Point, framed, standalone
from decoupled_diloco.show.console import SteadyConsole, plain_table
from decoupled_diloco.show.figures import COLORS, loss_limits
from decoupled_diloco.units import format_bytes, format_duration

Interval = tuple[float, float, float]
"""Mean, lower and upper limit."""

KEY_HEIGHT = 18.0
"""Height of a line in the key of the picture."""


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on a terminal during the block; yields a function that advances it."""
    console = SteadyConsole(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        # Learners may take one more step until the end of the run arrives.
        yield lambda: None if bar.finished else bar.advance(task)


def print_table(
    rows: Sequence[tuple[str, float, Interval | None, float, float]], base: str, seeds: int
) -> None:
    """Print a table of methods.

    Args:
        rows: Name, mean loss, relative gap to the reference (``None`` for the reference), bytes
            per token, and seconds per run.
        base: Name of the reference.
        seeds: Number of seeds.
    """
    gap_column = f"gap to {base} (95 %)"
    columns = ("method", "loss", gap_column, "bytes/token", "time/run")
    table = plain_table(*columns, left={"method", gap_column}, wrap=False)
    for name, loss, gap, traffic, seconds in rows:
        shown = format_duration(seconds)
        table.add_row(name, f"{loss:.4f}", _gap(gap), format_bytes(traffic), shown)
    console = SteadyConsole(width=None if SteadyConsole().is_terminal else 100)
    console.print(table)
    console.print(f"{seeds} seeds" if seeds > 1 else "1 seed: no interval")


def _gap(gap: Interval | None) -> str:
    if gap is None:
        return "reference"
    mean, low, high = gap
    if math.isnan(mean):
        return "not finite"
    shown = f"{100 * mean:+.2f} %"
    return shown if math.isinf(low) else f"{shown} ({100 * low:+.2f} to {100 * high:+.2f})"


def curves_svg(lines: Sequence[tuple[str, Sequence[Point]]]) -> str:
    """Return the loss curves of methods as the text of an SVG file.

    Args:
        lines: Name, and pairs of step and loss, of each method.

    Raises:
        ConfigError: There are more methods than colors, or no loss is finite.
    """
    if not 1 <= len(lines) <= COLORS:
        raise ConfigError(
            f"{len(lines)} methods cannot be drawn in one picture: pass 1 to {COLORS} names"
        )
    finite = [(name, [p for p in points if math.isfinite(p[1])]) for name, points in lines]
    values = [loss for _, points in finite for _, loss in points]
    if not values:
        raise ConfigError("no training loss is finite, so there is nothing to draw")
    last = max(step for _, points in finite for step, _ in points)
    limits = loss_limits(values, [points[-1][1] for _, points in finite if points])

    def draw(canvas: Canvas) -> None:
        axis = (0.0, float(last), "step of each learner")
        frame = framed(canvas, axis, (*limits, "training loss, mean over learners and seeds"))
        right = frame.x.end
        for number, (name, points) in enumerate(finite):
            css = f"c{number}"
            inside = [(x, min(limits[1], max(limits[0], y))) for x, y in points]
            canvas.line(frame.points(inside), css, name)
            y = frame.y.end + KEY_HEIGHT * number + 12
            canvas.line([(right - 220, y - 4), (right - 196, y - 4)], css)
            end = f"{points[-1][1]:.4f}" if points else "not finite"
            canvas.text(right - 190, y, f"{name}: {end}")

    ends = "; ".join(f"{name} {points[-1][1]:.4f}" for name, points in finite if points)
    return standalone(Chart(f"Training loss of each method: {ends}.", lambda narrow: 360.0, draw))
