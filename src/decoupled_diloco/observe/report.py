"""The report of a run: one HTML file that needs no network, and one image."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe import plots
from decoupled_diloco.observe.accounts import account_for
from decoupled_diloco.observe.historian import read_history
from decoupled_diloco.observe.history import GAP_MEDIANS, RunHistory
from decoupled_diloco.observe.summary import (
    learner_rows,
    outage_line,
    shard_rows,
    totals,
)

REMARKS_MAX = 200
"""The report lists no more lines of what happened than this."""

_CAPTIONS = {
    "evaluation": "Loss of the global weights on held-out data, as the evaluator measured it.",
    "losses": "Faint: every measured step; strong: smoothed over the steps around it.",
    "timeline": "Learners: the higher the bar, the faster the steps; a gap is time without a step. "
    "Syncer: one short bar a round, from its opening to the new published copy.",
}


@dataclass(frozen=True, slots=True)
class _Source:
    media: str
    uri: str


@dataclass(frozen=True, slots=True)
class _Plot:
    alt: str
    caption: str
    uri: str
    sources: tuple[_Source, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    title: str
    rows: list[list[str]]
    missing: str
    caption: str = ""
    left: bool = False


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
        _write_whole(Path(out_png), lambda path: plots.save_png(history, path))
    if out_html is not None:
        folder = Path(out_html).parent if isinstance(source, RunHistory) else Path(source)
        page = render_report(history, _settings_near(folder))
        _write_whole(Path(out_html), lambda path: path.write_text(page, encoding="utf-8"))
    return history


def render_report(history: RunHistory, settings: str | None = None) -> str:
    """The page as text.

    Args:
        history: The run.
        settings: Its resolved configuration, to be shown as it is.
    """
    environment = Environment(
        loader=PackageLoader("decoupled_diloco.observe", "."),
        autoescape=True,
        undefined=StrictUndefined,
    )
    rows = _remark_rows(history)
    return environment.get_template("report.html.j2").render(
        title=_title(history),
        subtitle=_subtitle(history),
        problems=_problems(history),
        outages=[outage_line(history, outage) for outage in history.outages],
        totals=totals(history, account_for(history)),
        plots=[_plot(history, name) for name in plots.DRAWS],
        tables=_tables(history),
        sample_text=history.sample_text,
        remarks=[["time", "process", "what"], *rows[:REMARKS_MAX]],
        remarks_left_out=max(0, len(rows) - REMARKS_MAX),
        settings=settings,
    )


def _title(history: RunHistory) -> str:
    names = (
        header.get("settings", {}).get("run", {}).get("name") for header in history.headers.values()
    )
    name = next(filter(None, names), None)
    return f"Decoupled DiLoCo: {name}" if name else "Decoupled DiLoCo run"


def _subtitle(history: RunHistory) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(history.started_wall))
    learners, shards = len(history.learners), len(history.shards)
    return f"{learners} learners, {shards} syncer shards, began {began}"


def _problems(history: RunHistory) -> list[str]:
    problems = list(history.problems)
    if not history.learners:
        problems.append("No learner is on the tape: none got as far as its first record.")
    if history.shards and not any(shard.rounds for shard in history.shards.values()):
        problems.append("No round was finished: the learners trained on their own, unmerged.")
    for learner in history.learners.values():
        if learner.losses_not_finite:
            problems.append(
                f"{learner.name} had {learner.losses_not_finite} losses that are not finite: its "
                "training has diverged."
            )
    return problems


def _plot(history: RunHistory, name: str) -> _Plot:
    """A plot in four variants; the browser takes the one for its width and colours."""
    narrow, dark = "(max-width: 640px)", "(prefers-color-scheme: dark)"
    return _Plot(
        alt=f"Plot: {_CAPTIONS[name]}",
        caption=_CAPTIONS[name],
        uri=_svg_uri(history, name, plots.LIGHT, narrow=False),
        sources=(
            _Source(f"{narrow} and {dark}", _svg_uri(history, name, plots.DARK, narrow=True)),
            _Source(narrow, _svg_uri(history, name, plots.LIGHT, narrow=True)),
            _Source(dark, _svg_uri(history, name, plots.DARK, narrow=False)),
        ),
    )


def _svg_uri(history: RunHistory, name: str, theme: plots.Theme, *, narrow: bool) -> str:
    image = plots.svg(history, name, theme, narrow=narrow)
    return "data:image/svg+xml;base64," + base64.b64encode(image).decode()


def _tables(history: RunHistory) -> list[_Table]:
    return [
        _Table(
            "Learners",
            learner_rows(history, account_for(history)),
            "No learner is on the tape.",
            "“took part”: share of all merged rounds that its contribution went into. “discarded”: "
            "tokens whose training a merged fragment overwrote. “longest gap”: the longest time "
            "from one step to the next while the process lived. Lost steps are those that would "
            f"have fitted into gaps longer than {GAP_MEDIANS:.0f} median steps.",
        ),
        _Table("Syncer", shard_rows(history), "No shard of the syncer is on the tape."),
        _Table("Rounds", _round_rows(history), "No round was finished.", left=True),
        _Table(
            "Corpus", _corpus_rows(history), "The tape does not say what was trained.", "", True
        ),
        _Table("Versions", _version_rows(history), "The tape does not name any.", "", True),
    ]


def _round_rows(history: RunHistory) -> list[list[str]]:
    """How rounds ended, and what became of the learners that they asked."""
    results = [r.result for shard in history.shards.values() for r in shard.rounds]
    rounds = Counter((result.verdict, result.reason) for result in results)
    asked = Counter(p.state for result in results for p in result.participants)
    rows = [["what", "how many", "why"]]
    words = {"merged": "round merged", "abandoned": "round given up"}
    rows += [[words[v], str(n), why if why != v else ""] for (v, why), n in rounds.most_common(12)]
    rows += [[f"contribution {state}", str(n), ""] for state, n in asked.most_common()]
    return rows


def _corpus_rows(history: RunHistory) -> list[list[str]]:
    corpus = history.corpus or {}
    return [["", ""], *([str(name), str(value)] for name, value in corpus.items())]


def _version_rows(history: RunHistory) -> list[list[str]]:
    rows = [["", ""]]
    rows += [["decoupled-diloco", version] for version in sorted(set(history.versions.values()))]
    named = {
        (str(name), str(version))
        for header in history.headers.values()
        for name, version in header.get("versions", {}).items()
    }
    return rows + [list(pair) for pair in sorted(named)]


def _remark_rows(history: RunHistory) -> list[list[str]]:
    lines = [(remark.at, remark.who, remark.text) for remark in history.remarks]
    lines += [(at, "fault", f"{fault.kind} {fault.target}") for at, fault in history.faults]
    return [[f"{at:.1f} s", who, text] for at, who, text in sorted(lines)]


def _settings_near(path: Path) -> str | None:
    """The ``run.toml`` of the run folder that a tape belongs to."""
    for folder in (path, path.parent, path.parent.parent):
        try:
            return (folder / "run.toml").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    return None


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """The file is either whole or not there."""
    torn = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(torn)
        torn.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # what matters is the first error
            torn.unlink()
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error
