"""The report of a run: one HTML file that fetches nothing and runs no script, and one image."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from decoupled_diloco.observe import figures, tables
from decoupled_diloco.observe.accounts import TIME_PARTS
from decoupled_diloco.observe.charts import DARK, LIGHT, Chart
from decoupled_diloco.observe.reader import run_folder_of
from decoupled_diloco.observe.run_model import RunModel, read_run
from decoupled_diloco.observe.summary import absences, totals
from decoupled_diloco.observe.timeline import TIMELINE_KEYS, timeline_chart
from decoupled_diloco.observe.whole_files import write_whole
from decoupled_diloco.observe.words import listing

LEGEND_MAX = 12
"""More learners than this are not named beside the plot of their losses."""

OVER: tuple[tuple[figures.Over, str], ...] = (
    ("time", "time"),
    ("step", "global step"),
    ("tokens", "tokens"),
)
"""What losses are drawn over, and how that is called."""


def write_report(
    source: str | Path | RunModel, out_html: str | Path | None, out_png: str | Path | None
) -> RunModel:
    """Writes the report of a run, also of one that went wrong: what there is, is shown.

    Args:
        source: The run folder, its tape folder, a tape file, or a run that has been read.
        out_html: The self-contained page; ``None``: none is written.
        out_png: The plots as one image; ``None``: none is written.

    Returns:
        The run that the report tells.

    Raises:
        StorageError: There is no tape, it is of a newer schema, or a file cannot be written.
    """
    run = source if isinstance(source, RunModel) else read_run(source)
    if out_png is not None:
        from decoupled_diloco.observe.images import save_png  # matplotlib takes a second to import

        write_whole(Path(out_png), lambda path: save_png(run, path))
    if out_html is not None:
        folder = Path(out_html).parent if isinstance(source, RunModel) else Path(source)
        page = render_report(run, settings_near(folder))
        write_page(Path(out_html), page)
    return run


def render_report(run: RunModel, settings: str | None = None) -> str:
    """The page as text.

    Args:
        run: The run.
        settings: Its resolved configuration, to be shown as it is; ``None``: what the start
            records say.
    """
    names = list(run.trained)
    return (
        page_maker()
        .get_template("report.html.j2")
        .render(
            title=f"Decoupled DiLoCo: {name_of(run)}" if name_of(run) else "Decoupled DiLoCo run",
            subtitle=subtitle_of(run),
            problems=problems_of(run),
            outages=absences(run),
            totals=totals(run),
            losses=_losses(run),
            legend=list(figures.colors_of(run).items())[:LEGEND_MAX],
            unnamed=max(0, len(names) - LEGEND_MAX),
            timeline=timeline_chart(run),
            timeline_keys=TIMELINE_KEYS,
            bars=tables.time_bars(run.account),
            time_parts=TIME_PARTS,
            participation=figures.participation_chart(run),
            round_parts=figures.round_parts_chart(run),
            round_part_names=figures.ROUND_PARTS,
            tables=_tables(run),
            sample_text=run.sample_text,
            settings=settings if settings is not None else _told_settings(run),
            settings_told=settings is None,
        )
    )


def page_maker() -> Environment:
    """Makes pages from the templates beside this file; whatever is put in is escaped."""
    maker = Environment(
        loader=PackageLoader("decoupled_diloco.observe", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    maker.globals |= {"light": LIGHT, "dark": DARK}
    return maker


def name_of(run: RunModel) -> str:
    """The run's name by its settings; empty: no start record has one."""
    return str(run.settings_of("run").get("name") or "")


@dataclass(frozen=True, slots=True)
class LossCharts:
    """Losses over one of three axes."""

    over: str
    name: str
    evaluation: Chart | None
    learners: Chart | None


def _losses(run: RunModel) -> list[LossCharts]:
    charts = [
        LossCharts(
            over,
            name,
            figures.evaluation_chart([("", run)], over),
            figures.learner_losses_chart(run, over),
        )
        for over, name in OVER
    ]
    return charts if charts[0].evaluation or charts[0].learners else []


def _tables(run: RunModel) -> dict[str, tables.Table]:
    every = (
        tables.time_table(run),
        tables.token_table(run),
        tables.bytes_table(run),
        tables.participation_table(run),
        tables.round_parts_table(run),
        tables.verdict_table(run),
        tables.learner_table(run),
        tables.shard_table(run),
        tables.corpus_table(run),
        tables.version_table(run),
        tables.remark_table(run),
    )
    return {table.id: table for table in every}


def subtitle_of(run: RunModel) -> str:
    """How many took part, and when it began."""
    learners = _counted(len(run.trained), "learner")
    shards = _counted(len(run.shards), "syncer shard")
    if not run.records:
        return f"{learners}, {shards}"
    if run.virtual:
        return f"{learners}, {shards}, in virtual time"
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started_wall))
    return f"{learners}, {shards}, began {began}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def problems_of(run: RunModel) -> list[str]:
    """What the reader of a report should know before its numbers, one sentence each."""
    problems = list(run.problems)
    if run.afar:
        problems.append(
            f"The tapes of {listing(run.afar)} are not here: what is told of them is what the "
            "syncer has heard."
        )
    elif not run.trained:
        problems.append("No learner is on the tape: none got as far as its first record.")
    if run.trained and not any(learner.steps for learner in run.trained.values()):
        problems.append("No step is on the tape: no learner got as far as training.")
    if run.shards and not any(shard.rounds for shard in run.shards.values()):
        problems.append("No round was finished: the learners trained on their own, unmerged.")
    if run.trained and not run.shards:
        problems.append("No shard of the syncer is on the tape: what it decided is not known.")
    for learner in run.trained.values():
        if learner.losses_not_finite:
            problems.append(
                f"{learner.name} had {learner.losses_not_finite} losses that are not finite: its "
                "training has diverged."
            )
    return problems


def _told_settings(run: RunModel) -> str | None:
    lines = [f"{name} = {json.dumps(value)}" for name, value in flattened(run.settings)]
    return "\n".join(lines) or None


def flattened(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Settings as dotted names with values.

    >>> dict(flattened({"sync": {"period": 24}}))
    {'sync.period': 24}
    """
    for key, value in settings.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        else:
            yield name, value


def settings_near(path: Path) -> str | None:
    """The ``run.toml`` of the run folder that a tape belongs to; ``None``: there is none."""
    try:
        return (run_folder_of(path) / "run.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_page(path: Path, page: str) -> None:
    """Writes a page, whole or not at all; half of a surrogate pair in it becomes a ``?``.

    Raises:
        StorageError: It cannot be written.
    """
    write_whole(path, lambda torn: torn.write_text(page, encoding="utf-8", errors="replace"))
