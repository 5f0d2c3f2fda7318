"""Tables that `ddiloco goodput` prints."""

from __future__ import annotations

from collections.abc import Sequence

from decoupled_diloco.show.console import SteadyConsole, plain_table
from decoupled_diloco.units import format_count
from decoupled_diloco_plan.goodput.calibrate import NAMES, Residual
from decoupled_diloco_plan.goodput.chip_time import CAUSES
from decoupled_diloco_plan.goodput.cluster_settings import SILENT_SECONDS, Constants
from decoupled_diloco_plan.goodput.study import Row

SHOWN_MIN = 0.05
"""A cause has a column if any row has at least this percentage of it."""


def print_rows(rows: Sequence[Row], tokens_per_chip_second: float, console: SteadyConsole) -> None:
    """Print a line per row, then an explanation of the columns."""
    known = any(row.published is not None for row in rows)
    shown = [cause for cause in CAUSES if any(row.badput[cause] >= SHOWN_MIN for row in rows)]
    heads = ("chips", "goodput", *["publ."] * known, "uptime", "tokens/h")
    causes = (CAUSES[cause][0] for cause in shown)
    table = plain_table("system", *heads, *causes, gap=1, left=("system",), wrap=False)
    for row in rows:
        published = "" if row.published is None else f"{row.published:g}"
        table.add_row(
            row.cluster.name,
            format_count(row.cluster.chips),
            _with_interval(row),
            *[published] * known,
            f"{row.uptime:.1f}",
            format_count(row.tokens_per_hour(tokens_per_chip_second)),
            *(f"{row.badput[cause]:.1f}" for cause in shown),
        )
    console.print(table)
    _print_notes(rows, shown, known, console)


def _print_notes(
    rows: Sequence[Row], shown: Sequence[str], known: bool, console: SteadyConsole
) -> None:
    """Explain the columns, and print the effects of unequal speeds."""
    notes = ["Percent of the allocated chip-time"]
    if any(row.interval is not None for row in rows):
        notes.append("±: 95 % interval of the mean over seeds")
    if known:
        notes.append("publ.: published for the same cluster")
    notes += [": ".join(CAUSES[cause]) for cause in shown]
    console.print("; ".join(notes), style="dim")
    for row in rows:
        if row.pace is not None:
            console.print(_pace(row))
        if row.relays is not None:
            console.print(_relays(row))


def _with_interval(row: Row) -> str:
    return f"{row.goodput:.1f}" + ("" if row.interval is None else f" ±{row.interval:.1f}")


def _pace(row: Row) -> str:
    assert row.pace is not None
    shares = sorted({f"{100 * share:.0f}" for share in row.pace.took_part}, key=int)
    least, most = shares[0], shares[-1]
    return (
        f"{row.cluster.system}, M={row.cluster.learners}, K={row.cluster.quorum}: the clock makes "
        f"{100 * row.pace.against_fastest:.0f} % of the fastest learner's steps; a learner is in "
        f"{least if least == most else f'{least} to {most}'} % of the rounds"
    )


def _relays(row: Row) -> str:
    found = row.relays
    assert found is not None
    return (
        f"{row.cluster.name}, {found['sites']:g} sites with a relay: "
        f"{found['failures_per_day']:.2g} relays fail per day; no step is lost, and their learners "
        f"are silent for at most {SILENT_SECONDS:g} s each time ({found['silent_percent']:.1g} % "
        f"of the time); the sites' links carry {found['link_bytes_percent']:.1f} % of the bytes "
        "without relays"
    )


def print_calibration(found: Constants, rows: Sequence[Residual], console: SteadyConsole) -> None:
    """Print the constants, and the simulated goodput of each published cell."""
    table = plain_table("constant", "seconds", gap=1, left=("constant",))
    for name in NAMES:
        table.add_row(name.removesuffix("_seconds").replace("_", " "), f"{getattr(found, name):g}")
    console.print(table)
    console.print()
    heads = ("M", "chips", "published", "simulated", "points", "")
    table = plain_table("system", *heads, gap=1, left=("system", ""))
    for row in rows:
        cell = row.cell
        table.add_row(
            cell.system,
            str(cell.learners),
            format_count(cell.chips),
            f"{cell.goodput:g}",
            f"{row.goodput:.1f}",
            f"{row.points:+.1f}",
            "fitted" if cell.calibrate else "predicted",
        )
    console.print(table)
