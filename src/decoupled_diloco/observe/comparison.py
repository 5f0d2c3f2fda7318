"""Two runs side by side, as one HTML file of the kind of the report."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoupled_diloco.observe import figures
from decoupled_diloco.observe.accounts import TIME_PARTS
from decoupled_diloco.observe.report import (
    flattened,
    losses_over,
    problems_of,
    render_page,
    settings_near,
    subtitle_of,
    write_page,
)
from decoupled_diloco.observe.run_model import RunModel, read_run
from decoupled_diloco.observe.summary import Total, totals
from decoupled_diloco.observe.tables import Number, Row, Table, time_bars
from decoupled_diloco.observe.words import ABSENT, percent


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    label: str
    run: RunModel
    settings: Mapping[str, Any]


def write_comparison(first: Path, second: Path, out_html: Path) -> tuple[RunModel, RunModel]:
    """Writes two runs side by side.

    Args:
        first: The run folder, tape folder or tape file that is compared with.
        second: The one that is compared.
        out_html: The page.

    Returns:
        Both runs.

    Raises:
        StorageError: A tape is missing, unreadable or of a newer schema, or the page cannot be
            written.
    """
    labels = (_label(first), _label(second))
    if labels[0] == labels[1]:
        labels = (str(first), str(second))
    if labels[0] == labels[1]:
        labels = (f"{labels[0]} (first)", f"{labels[1]} (second)")
    sides = [_side(label, path) for label, path in zip(labels, (first, second), strict=True)]
    page = render_comparison(*sides)
    write_page(out_html, page)
    return (sides[0].run, sides[1].run)


def render_comparison(first: Side, second: Side) -> str:
    """The page as text."""
    runs = [(side.label, side.run) for side in (first, second)]
    return render_page(
        "comparison.html.j2",
        title=f"{first.label} and {second.label}",
        subtitle="two runs of Decoupled DiLoCo, side by side",
        sides=[
            {
                "label": label,
                "subtitle": subtitle_of(run),
                "problems": problems_of(run),
                "bars": time_bars(run.account),
            }
            for label, run in runs
        ],
        numbers=numbers_table(first, second),
        losses=losses_over(
            lambda over: figures.evaluation_chart(runs, over),
            lambda over: figures.mean_losses_chart(runs, over),
        ),
        legend=[(first.label, "ink"), (second.label, "second")],
        shares=shares_table(first, second),
        differing=settings_table(first, second, every=False),
        settings=settings_table(first, second, every=True),
    )


def numbers_table(first: Side, second: Side) -> Table:
    """What is one number a run, of both, and by how much they differ."""
    ours = {total.name: total for total in totals(first.run)}
    theirs = {total.name: total for total in totals(second.run)}
    rows = [
        [name, *map(_shown_total, both), difference_of(*both)]
        for name in {**ours, **theirs}
        for both in [(ours.get(name), theirs.get(name))]
    ]
    return Table(
        "numbers", "Summary", ["", first.label, second.label, "difference"], rows,
        note="Difference: the second run less the first; shares differ by points of a per cent.",
    )  # fmt: skip


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


def shares_table(first: Side, second: Side) -> Table:
    """Where the learner-time of both went."""
    times = (first.run.account.time, second.run.account.time)
    rows: list[Row] = [
        [
            part,
            *(Number(percent(time.share(part)), time.share(part)) for time in times),
            _points(times[1].share(part) - times[0].share(part)),
        ]
        for part in TIME_PARTS
        if times[0].allocated or times[1].allocated
    ]
    return Table(
        "shares", "Shares of learner-time", ["", first.label, second.label, "difference"], rows,
        "In neither run did a learner take two steps.",
    )  # fmt: skip


def settings_table(first: Side, second: Side, *, every: bool) -> Table:
    """Settings of both: those that differ, or every one with those marked."""
    ours, theirs = dict(flattened(first.settings)), dict(flattened(second.settings))
    names = list({**ours, **theirs})
    differing = [n for n in names if _shown(ours, n) != _shown(theirs, n)]
    shown = names if every else differing
    rows = [[name, _shown(ours, name), _shown(theirs, name)] for name in shown]
    if not (ours and theirs):
        rows = []
    return Table(
        "settings-all" if every else "settings-differing",
        f"All {len(names)} settings" if every else "Settings that differ",
        ["setting", first.label, second.label],
        rows,
        "All settings are the same." if ours and theirs else "The settings of both are not known.",
        left=True,
        marked=differing,
    )


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name], default=str) if name in settings else ABSENT


def _shown_total(total: Total | None) -> str | Number:
    if total is None or total.number is None:
        return ABSENT if total is None else total.text
    return Number(total.text, total.number)


def _side(label: str, path: Path) -> Side:
    run = read_run(path)
    return Side(label, run, _settings(run, path))


def _settings(run: RunModel, path: Path) -> Mapping[str, Any]:
    """The settings in the run folder; if there are none, those that the processes agreed on."""
    try:
        return tomllib.loads(settings_near(path) or "") or run.settings
    except tomllib.TOMLDecodeError:
        return run.settings


def _label(path: Path) -> str:
    """The name of a run folder, of the folder around a tape, or of a bare file."""
    path = path.resolve()
    if path.name in ("tape", "tape.jsonl"):
        path = path.parent
    return path.stem if path.suffix == ".jsonl" else path.name
