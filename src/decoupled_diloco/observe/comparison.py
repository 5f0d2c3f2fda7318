"""Two runs side by side, as one HTML file of the kind of the report."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoupled_diloco.observe import figures, report
from decoupled_diloco.observe.accounts import TIME_PARTS
from decoupled_diloco.observe.run_model import RunModel, read_run
from decoupled_diloco.observe.summary import Total, totals
from decoupled_diloco.observe.tables import Number, Row, Table, time_bars
from decoupled_diloco.observe.words import ABSENT, percent


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    label: str
    run: RunModel
    settings: Mapping[str, str]


def write_comparison(first: Path, second: Path, out_html: Path) -> tuple[RunModel, RunModel]:
    """Writes two runs side by side, from their run folders, tape folders or tape files.

    Raises:
        StorageError: A tape is missing, unreadable or of another schema, or the page cannot be
            written.
    """
    labels = (_label(first), _label(second))
    if labels[0] == labels[1]:
        labels = (str(first), str(second))
    if labels[0] == labels[1]:
        labels = (f"{labels[0]} (first)", f"{labels[1]} (second)")
    sides = (_side(labels[0], first), _side(labels[1], second))
    report.write_page(out_html, render_comparison(*sides))
    return (sides[0].run, sides[1].run)


def render_comparison(first: Side, second: Side) -> str:
    runs = [(side.label, side.run) for side in (first, second)]
    settings = _settings_table(first, second)
    differing = [row for row in settings.rows if row[0] in settings.marked]
    return report.render_page(
        "comparison.html.j2",
        title=f"{first.label} and {second.label}",
        subtitle="two runs of Decoupled DiLoCo, side by side",
        sides=[
            {
                "label": label,
                "subtitle": report.subtitle_of(run),
                "problems": report.problems_of(run),
                "bars": time_bars(run.account),
            }
            for label, run in runs
        ],
        numbers=_numbers_table(first, second),
        losses=report.losses_over(
            lambda over: figures.evaluation_chart(runs, over),
            lambda over: figures.mean_losses_chart(runs, over),
        ),
        legend=[(first.label, "ink"), (second.label, "second")],
        shares=_shares_table(first, second),
        settings=settings,
        differing=settings._replace(rows=differing),
    )


def _numbers_table(first: Side, second: Side) -> Table:
    """What is one number a run, of both, and by how much they differ."""
    ours = {total.name: total for total in totals(first.run)}
    theirs = {total.name: total for total in totals(second.run)}
    rows: list[Row] = []
    for name in {**ours, **theirs}:
        both = (ours.get(name), theirs.get(name))
        rows.append([name, *map(_shown_total, both), difference_of(*both)])
    return Table(["", first.label, second.label, "difference"], rows)


def _shown_total(total: Total | None) -> str | Number:
    if total is None or total.number is None:
        return ABSENT if total is None else total.text
    return Number(total.text, total.number)


def difference_of(first: Total | None, second: Total | None) -> str:
    """The difference between two numbers, in words.

    >>> difference_of(Total("x", "2", number=2.0), Total("x", "3", number=3.0))
    '+1 (+50 %)'
    """
    if first is None or second is None or first.number is None or second.number is None:
        return ABSENT
    difference = second.number - first.number
    if difference == 0:
        return "the same"
    if first.show is percent:
        return _points(difference)
    sign = "+" if difference > 0 else "−"
    told = sign + first.show(abs(difference))
    if first.number <= 0:
        return told
    return f"{told} ({sign}{100 * abs(difference) / first.number:.3g} %)"


def _points(difference: float) -> str:
    """A difference of shares in points of a per cent."""
    told = f"{abs(100 * difference):.1f} points"
    return told if told.startswith("0.0") else ("+" if difference > 0 else "−") + told


def _shares_table(first: Side, second: Side) -> Table:
    times = (first.run.account.time, second.run.account.time)
    rows: list[Row] = []
    for part in TIME_PARTS if any(time.allocated for time in times) else ():
        ours, theirs = (time.share(part) for time in times)
        shown = [Number(percent(share), share) for share in (ours, theirs)]
        rows.append([part, *shown, _points(theirs - ours)])
    return Table(["", first.label, second.label, "difference"], rows)


def _settings_table(first: Side, second: Side) -> Table:
    """All settings of both, if they are known; those that differ are marked."""
    ours, theirs = first.settings, second.settings
    names = list({**ours, **theirs}) if ours and theirs else []
    rows = [[name, ours.get(name, ABSENT), theirs.get(name, ABSENT)] for name in names]
    differing = {name for name, mine, other in rows if mine != other}
    return Table(["setting", first.label, second.label], rows, differing)


def _side(label: str, path: Path) -> Side:
    """A run, with the settings in its folder; if none, those that the processes agreed on."""
    run = read_run(path)
    settings: Mapping[str, Any] = run.settings
    with contextlib.suppress(tomllib.TOMLDecodeError):
        settings = tomllib.loads(report.settings_near(path) or "") or settings
    told = {name: json.dumps(value, default=str) for name, value in report.flattened(settings)}
    return Side(label, run, told)


def _label(path: Path) -> str:
    """The name of a run folder, of the folder around a tape, or of a bare file."""
    path = path.resolve()
    if path.name in ("tape", "tape.jsonl"):
        path = path.parent
    return path.stem if path.suffix == ".jsonl" else path.name
