"""The report of a run: one HTML file that fetches nothing and runs no script, and one image."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from decoupled_diloco.observe import figures
from decoupled_diloco.observe.accounts import TIME_PARTS, TOKEN_PARTS
from decoupled_diloco.observe.advice import advice_of
from decoupled_diloco.observe.charts import DARK, LIGHT, Chart
from decoupled_diloco.observe.reader import run_folder_of
from decoupled_diloco.observe.run_data import GAP_MEDIANS
from decoupled_diloco.observe.run_model import RunModel, read_run
from decoupled_diloco.observe.summary import absences, totals
from decoupled_diloco.observe.tables import meanings, tables_of, time_bars
from decoupled_diloco.observe.timeline import TIMELINE_KEYS, timeline_chart
from decoupled_diloco.observe.whole_files import write_whole
from decoupled_diloco.observe.words import listing, many

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
        StorageError: There is no tape, it is of another schema, or a file cannot be written.
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
    """The page as text; without ``settings``, a configuration, what the start records say of it."""
    name = str(run.settings_of("run").get("name") or "")
    told = [f"{key} = {json.dumps(value)}" for key, value in flattened(run.settings)]
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
        timeline_keys=TIMELINE_KEYS,
        bars=time_bars(run.account),
        participation=figures.participation_chart(run),
        round_parts=figures.round_parts_chart(run),
        round_part_names=figures.ROUND_PARTS,
        tables=tables_of(run),
        meanings=meanings,
        token_parts=TOKEN_PARTS,
        gap_medians=f"{GAP_MEDIANS:g}",
        rounds_merged=run.rounds_merged,
        sample_text=run.sample_text,
        settings=settings if settings is not None else "\n".join(told) or None,
        settings_told=settings is None,
    )


def render_page(template: str, **values: Any) -> str:
    """A page from a template beside this file; whatever is put in is escaped."""
    maker = Environment(
        loader=PackageLoader("decoupled_diloco.observe", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shared = {"light": LIGHT, "dark": DARK, "time_parts": TIME_PARTS}
    return maker.get_template(template).render(shared, **values)


class LossCharts(NamedTuple):
    """Losses over one of three axes."""

    over: str
    name: str
    evaluation: Chart | None
    learners: Chart | None


_Draw = Callable[[figures.Over], Chart | None]


def losses_over(evaluation: _Draw, learners: _Draw) -> list[LossCharts]:
    """The charts of losses over each axis; none if there is no loss at all."""
    charts = [LossCharts(over, name, evaluation(over), learners(over)) for over, name in OVER]
    return [chart for chart in charts if charts[0].evaluation or charts[0].learners]


def subtitle_of(run: RunModel) -> str:
    """How many took part, and when it began."""
    told = f"{many(len(run.trained), 'learner')}, {many(len(run.shards), 'syncer shard')}"
    if not run.records:
        return told
    if run.virtual:
        return f"{told}, in virtual time"
    return told + time.strftime(", began %Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started_wall))


def problems_of(run: RunModel) -> list[str]:
    """What the reader of a report should know before its numbers, one sentence each."""
    problems = [*run.problems, *advice_of(run)]
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
