"""The report of a run: one HTML file that fetches nothing and runs no script, and one image."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe import figures, tables
from decoupled_diloco.observe.accounts import TIME_PARTS, RunAccount, account_for
from decoupled_diloco.observe.historian import read_history
from decoupled_diloco.observe.history import RunHistory
from decoupled_diloco.observe.progress import natural
from decoupled_diloco.observe.records import FOLDER_NAME
from decoupled_diloco.observe.shapes import learners_in_order
from decoupled_diloco.observe.summary import absences, totals
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
    source: str | Path | RunHistory, out_html: str | Path | None, out_png: str | Path | None
) -> RunHistory:
    """Writes the report of a run, also of one that went wrong: what there is, is shown.

    Args:
        source: The run folder, its tape folder, a tape file, or a history that has been read.
        out_html: The self-contained page; ``None``: none is written.
        out_png: The plots as one image; ``None``: none is written.

    Returns:
        The history that the report tells.

    Raises:
        StorageError: There is no tape, it is of a newer schema, or a file cannot be written.
    """
    history = source if isinstance(source, RunHistory) else read_history(source)
    if out_png is not None:
        from decoupled_diloco.observe import plots  # matplotlib takes a second to import

        write_whole(Path(out_png), lambda path: plots.save_png(history, path))
    if out_html is not None:
        folder = Path(out_html).parent if isinstance(source, RunHistory) else Path(source)
        page = render_report(history, settings_near(folder))
        write_page(Path(out_html), page)
    return history


def render_report(history: RunHistory, settings: str | None = None) -> str:
    """The page as text.

    Args:
        history: The run.
        settings: Its resolved configuration, to be shown as it is; ``None``: what the start
            records say.
    """
    account = account_for(history)
    names = [learner.name for learner in learners_in_order(history)]
    return (
        page_maker()
        .get_template("report.html.j2")
        .render(
            title=f"Decoupled DiLoCo: {name_of(history)}"
            if name_of(history)
            else "Decoupled DiLoCo run",
            subtitle=subtitle_of(history),
            problems=problems_of(history),
            outages=absences(history),
            totals=totals(history, account),
            losses=_losses(history),
            legend=list(figures.colors_of(history).items())[:LEGEND_MAX],
            unnamed=max(0, len(names) - LEGEND_MAX),
            timeline=figures.timeline_chart(history, account),
            bars=tables.time_bars(account, names),
            time_parts=TIME_PARTS,
            participation=figures.participation_chart(history),
            round_parts=figures.round_parts_chart(history),
            round_part_names=figures.ROUND_PARTS,
            tables=_tables(history, account),
            sample_text=history.sample_text,
            settings=settings if settings is not None else _told_settings(history),
            settings_told=settings is None,
        )
    )


def page_maker() -> Environment:
    """Makes pages from the templates beside this file; whatever is put in is escaped."""
    return Environment(
        loader=PackageLoader("decoupled_diloco.observe", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def name_of(history: RunHistory) -> str:
    """The run's name by its settings; empty: no start record has one."""
    run = settings_of(history).get("run")
    name = run.get("name") if isinstance(run, Mapping) else None
    return str(name) if name else ""


def settings_of(history: RunHistory) -> dict[str, Any]:
    """The run's public settings, as the first start record that has any tells them."""
    for header in history.headers.values():
        settings = header.get("settings")
        if isinstance(settings, dict) and settings:
            return settings
    return {}


@dataclass(frozen=True, slots=True)
class LossCharts:
    """Losses over one of three axes."""

    over: str
    name: str
    evaluation: Markup | None
    learners: Markup | None


def _losses(history: RunHistory) -> list[LossCharts]:
    charts = [
        LossCharts(
            over,
            name,
            figures.evaluation_chart([("", history)], over),
            figures.learner_losses_chart(history, over),
        )
        for over, name in OVER
    ]
    return charts if charts[0].evaluation or charts[0].learners else []


def _tables(history: RunHistory, account: RunAccount) -> dict[str, tables.Table]:
    every = (
        tables.time_table(history, account),
        tables.token_table(history, account),
        tables.bytes_table(history),
        tables.participation_table(history),
        tables.round_parts_table(history),
        tables.verdict_table(history),
        tables.learner_table(history, account),
        tables.shard_table(history),
        tables.corpus_table(history),
        tables.version_table(history),
        tables.remark_table(history),
    )
    return {table.id: table for table in every}


def subtitle_of(history: RunHistory) -> str:
    """How many took part, and when it began."""
    learners = _counted(len(history.learners), "learner")
    shards = _counted(len(history.shards), "syncer shard")
    if not history.records:
        return f"{learners}, {shards}"
    if any(header.get("virtual") for header in history.headers.values()):
        return f"{learners}, {shards}, in virtual time"
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(history.started_wall))
    return f"{learners}, {shards}, began {began}"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def problems_of(history: RunHistory) -> list[str]:
    """What the reader of a report should know before its numbers, one sentence each."""
    problems = list(history.problems)
    afar = sorted(history.afar, key=natural)
    if afar:
        problems.append(
            f"The tapes of {listing(afar)} are not here: what is told of them is what the syncer "
            "has heard."
        )
    elif not history.learners:
        problems.append("No learner is on the tape: none got as far as its first record.")
    if history.learners and not any(learner.steps for learner in history.learners.values()):
        problems.append("No step is on the tape: no learner got as far as training.")
    if history.shards and not any(shard.rounds for shard in history.shards.values()):
        problems.append("No round was finished: the learners trained on their own, unmerged.")
    if history.learners and not history.shards:
        problems.append("No shard of the syncer is on the tape: what it decided is not known.")
    for learner in history.learners.values():
        if learner.losses_not_finite:
            problems.append(
                f"{learner.name} had {learner.losses_not_finite} losses that are not finite: its "
                "training has diverged."
            )
    return problems


def _told_settings(history: RunHistory) -> str | None:
    lines = [f"{name} = {json.dumps(value)}" for name, value in flattened(settings_of(history))]
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
    inside = path.parent if path.suffix == ".jsonl" else path
    run = inside.parent if inside.name == FOLDER_NAME else inside
    try:
        return (run / "run.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_page(path: Path, page: str) -> None:
    """Writes a page, whole or not at all; half of a surrogate pair in it becomes a ``?``.

    Raises:
        StorageError: It cannot be written.
    """
    write_whole(path, lambda torn: torn.write_text(page, encoding="utf-8", errors="replace"))


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file that is either whole or not there.

    Raises:
        StorageError: It cannot be written.
    """
    torn = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(torn)
        torn.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # what matters is the first error
            torn.unlink()
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
