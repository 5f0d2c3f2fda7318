"""Report of a run, or of two runs side by side: one HTML file without scripts or other files."""

from __future__ import annotations

import contextlib
import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from decoupled_diloco.errors import StorageError
from decoupled_diloco.run_model import RunModel, read_run
from decoupled_diloco.run_model.accounts import TIME_PARTS, TOKEN_PARTS
from decoupled_diloco.run_model.facts import GAP_MEDIANS
from decoupled_diloco.run_model.phrases import ABSENT, listing, many, percent
from decoupled_diloco.show import figures
from decoupled_diloco.show.charts import DARK, LIGHT, Chart, picture
from decoupled_diloco.show.figures import RELAY_KEYS, TIMELINE_KEYS, timeline_chart
from decoupled_diloco.show.status import advice_of
from decoupled_diloco.show.tables import (
    ROUND_PARTS,
    Number,
    Row,
    Table,
    Total,
    absences,
    meanings,
    tables_of,
    time_bars,
    totals,
)
from decoupled_diloco.tape.reader import run_folder_of

OVER: tuple[tuple[figures.Over, str], ...] = (
    ("time", "time"),
    ("step", "global step"),
    ("tokens", "tokens"),
)
"""Axes of the loss charts, and their names."""


_Draw = Callable[[figures.Over], Chart | None]


def write_report(source: str | Path | RunModel, out: str | Path) -> RunModel:
    """Write the report of a run, including a run that failed: it shows whatever is on the tape.

    Args:
        source: The run folder, its tape folder, a tape file, or a run that has been read.
        out: Path of the self-contained page.

    Returns:
        The run in the report.

    Raises:
        StorageError: The tape does not exist or has another schema, or the page cannot be written.
    """
    run = source if isinstance(source, RunModel) else read_run(source)
    folder = Path(out).parent if isinstance(source, RunModel) else Path(source)
    write_page(Path(out), render_report(run, settings_near(folder)))
    return run


def render_report(run: RunModel, settings: str | None = None) -> str:
    """Return the page, with ``settings`` (a configuration) or else those in the start records."""
    name = str(run.settings_of("run").get("name") or "")
    recorded = [f"{key} = {json.dumps(value)}" for key, value in flattened(run.settings)]
    runs = [("", run)]
    return render_page(
        "report.html.j2",
        title=f"Decoupled DiLoCo: {name}" if name else "Decoupled DiLoCo run",
        subtitle=subtitle_of(run),
        problems=problems_of(run),
        outages=absences(run),
        totals=totals(run),
        losses=losses_over(
            lambda over: figures.evaluation_chart(runs, over),
            lambda over: figures.learner_losses_chart(run, over),
        ),
        legend=list(figures.colors_of(run).items())[: figures.LEGEND_MAX],
        unnamed=max(0, len(run.trained) - figures.LEGEND_MAX),
        timeline=timeline_chart(run),
        timeline_keys=(*TIMELINE_KEYS, *(RELAY_KEYS if run.sites else ())),
        has_relays=bool(run.sites),
        bars=time_bars(run.account),
        participation=figures.participation_chart(run),
        round_parts=figures.round_parts_chart(run),
        round_part_names=ROUND_PARTS,
        tables=tables_of(run),
        meanings=meanings,
        token_parts=TOKEN_PARTS,
        gap_medians=f"{GAP_MEDIANS:g}",
        rounds_merged=run.rounds_merged,
        sample_text=run.sample_text,
        pictures=[(each.caption, picture(each.caption, each.rows)) for each in run.pictures],
        settings=settings if settings is not None else "\n".join(recorded) or None,
        settings_recorded=settings is None,
    )


def render_page(template: str, **values: Any) -> str:
    """Return a page from a template in this folder; all values are escaped."""
    maker = Environment(
        loader=PackageLoader("decoupled_diloco.show", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = {"light": LIGHT, "dark": DARK, "time_parts": TIME_PARTS}
    return maker.get_template(template).render(shared, **values)


class LossCharts(NamedTuple):
    """Loss charts over one of the axes."""

    over: str
    name: str
    evaluation: Chart | None
    learners: Chart | None


def losses_over(evaluation: _Draw, learners: _Draw) -> list[LossCharts]:
    """Return the loss charts over each axis; empty if there are no losses."""
    charts = [LossCharts(over, name, evaluation(over), learners(over)) for over, name in OVER]
    return [chart for chart in charts if charts[0].evaluation or charts[0].learners]


def subtitle_of(run: RunModel) -> str:
    """Return the number of participants and the start time."""
    text = f"{many(len(run.trained), 'learner')}, {many(len(run.shards), 'syncer shard')}"
    if not run.records:
        return text
    if run.virtual:
        return f"{text}, in virtual time"
    return text + time.strftime(", started %Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started_wall))


def problems_of(run: RunModel) -> list[str]:
    """Return the caveats for the numbers of a report, one sentence each."""
    problems = [*run.problems, *advice_of(run)]
    if run.afar:
        problems.append(
            f"The tapes of {listing(run.afar)} are on other machines: their numbers come from "
            "the syncer."
        )
    elif not run.trained:
        problems.append("No learner is on the tape: none wrote a record.")
    if run.trained and not any(learner.steps for learner in run.trained.values()):
        problems.append("No step is on the tape: no learner began to train.")
    if run.shards and not any(shard.rounds for shard in run.shards.values()):
        problems.append("No round was finished: the learners trained without merging.")
    if run.trained and not run.shards:
        problems.append("No shard of the syncer is on the tape: its decisions are unknown.")
    for learner in run.trained.values():
        if learner.losses_not_finite:
            problems.append(
                f"{learner.name} had {learner.losses_not_finite} losses that are not finite: its "
                "training diverged."
            )
    return problems


def flattened(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings as dotted names with values.

    >>> dict(flattened({"sync": {"sync_every": 24}}))
    {'sync.sync_every': 24}
    """
    for key, value in settings.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        else:
            yield name, value


def settings_near(path: Path) -> str | None:
    """Return the ``run.toml`` of the run folder of a tape; ``None`` if there is none."""
    try:
        return (run_folder_of(path) / "run.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_page(path: Path, page: str) -> None:
    """Write a page atomically; unpaired surrogates in it become ``?``.

    Raises:
        StorageError: It cannot be written.
    """
    torn = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn.write_text(page, encoding="utf-8", errors="replace")
        torn.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # only the first error matters
            torn.unlink()
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Side:
    """One of two compared runs."""

    label: str
    run: RunModel
    settings: Mapping[str, str]


def write_comparison(first: Path, second: Path, out_html: Path) -> tuple[RunModel, RunModel]:
    """Write two runs side by side, from their run folders, tape folders or tape files.

    Raises:
        StorageError: A tape is missing, unreadable or has another schema, or the page cannot be
            written.
    """
    labels = (_label(first), _label(second))
    if labels[0] == labels[1]:
        labels = (str(first), str(second))
    if labels[0] == labels[1]:
        labels = (f"{labels[0]} (first)", f"{labels[1]} (second)")
    sides = (_side(labels[0], first), _side(labels[1], second))
    write_page(out_html, render_comparison(*sides))
    return (sides[0].run, sides[1].run)


def render_comparison(first: Side, second: Side) -> str:
    runs = [(side.label, side.run) for side in (first, second)]
    settings = _settings_table(first, second)
    differing = [row for row in settings.rows if row[0] in settings.marked]
    return render_page(
        "comparison.html.j2",
        title=f"{first.label} and {second.label}",
        subtitle="Comparison of two Decoupled DiLoCo runs",
        sides=[
            {
                "label": label,
                "subtitle": subtitle_of(run),
                "problems": problems_of(run),
                "bars": time_bars(run.account),
            }
            for label, run in runs
        ],
        numbers=_numbers_table(first, second),
        losses=losses_over(
            lambda over: figures.evaluation_chart(runs, over),
            lambda over: figures.mean_losses_chart(runs, over),
        ),
        legend=[(first.label, "ink"), (second.label, "second")],
        shares=_shares_table(first, second),
        settings=settings,
        differing=settings._replace(rows=differing),
    )


def _numbers_table(first: Side, second: Side) -> Table:
    """Return the totals of both runs, and their differences."""
    ours = {total.name: total for total in totals(first.run)}
    theirs = {total.name: total for total in totals(second.run)}
    rows: list[Row] = []
    for name in {**ours, **theirs}:
        both = (ours.get(name), theirs.get(name))
        shown: list[str | Number] = [
            ABSENT if t is None else t.text if t.number is None else Number(t.text, t.number)
            for t in both
        ]
        rows.append([name, *shown, difference_of(*both)])
    return Table(["", first.label, second.label, "difference"], rows)


def difference_of(first: Total | None, second: Total | None) -> str:
    """Return the difference between two totals as text.

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
    text = sign + first.show(abs(difference))
    if first.number <= 0:
        return text
    return f"{text} ({sign}{100 * abs(difference) / first.number:.3g} %)"


def _points(difference: float) -> str:
    """Return a difference of shares in percentage points."""
    text = f"{abs(100 * difference):.1f} points"
    return text if text.startswith("0.0") else ("+" if difference > 0 else "−") + text


def _shares_table(first: Side, second: Side) -> Table:
    times = (first.run.account.time, second.run.account.time)
    rows: list[Row] = []
    for part in TIME_PARTS if any(each.allocated for each in times) else ():
        ours, theirs = (each.share(part) for each in times)
        shown = [Number(percent(share), share) for share in (ours, theirs)]
        rows.append([part, *shown, _points(theirs - ours)])
    return Table(["", first.label, second.label, "difference"], rows)


def _settings_table(first: Side, second: Side) -> Table:
    """Return the settings of both runs, if both are known; differing rows are marked."""
    ours, theirs = first.settings, second.settings
    names = list({**ours, **theirs}) if ours and theirs else []
    rows = [[name, ours.get(name, ABSENT), theirs.get(name, ABSENT)] for name in names]
    differing = {name for name, mine, other in rows if mine != other}
    return Table(["setting", first.label, second.label], rows, differing)


def _side(label: str, path: Path) -> Side:
    """Return a run with the settings in its folder, or else those in its start records."""
    run = read_run(path)
    settings: Mapping[str, Any] = run.settings
    with contextlib.suppress(tomllib.TOMLDecodeError):
        settings = tomllib.loads(settings_near(path) or "") or settings
    texts = {name: json.dumps(value, default=str) for name, value in flattened(settings)}
    return Side(label, run, texts)


def _label(path: Path) -> str:
    """Return the name of a run folder, of the folder that contains a tape, or of a single file."""
    path = path.resolve()
    if path.name in ("tape", "tape.jsonl"):
        path = path.parent
    return path.stem if path.suffix == ".jsonl" else path.name
