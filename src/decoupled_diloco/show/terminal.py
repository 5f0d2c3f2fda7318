"""Terminal views of a run: ``ddiloco status`` and ``watch``, the progress and summary of ``train``.

`ProgressDisplay` follows a run while it trains. On a terminal it redraws a display at every poll,
and prints important events above it (faults, ended and restarted processes, evaluations).
Elsewhere it prints these events, and one line about the whole run every few seconds.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.run_model import FollowedRun, RunModel
from decoupled_diloco.run_model.facts import TOOK_PART
from decoupled_diloco.run_model.phrases import clock_face, many, percent
from decoupled_diloco.show.console import SteadyConsole, named_values, plain_table
from decoupled_diloco.show.status import (
    ABSENT_STATES,
    AWAY,
    LearnerStatus,
    OpenRound,
    RunStatus,
    ShardStatus,
    SiteStatus,
    StoreStatus,
    advice_of,
    budget_share,
    headline,
    learner_cells,
    learners_in_words,
    position,
    shard_cells,
    site_cells,
    status_of,
)
from decoupled_diloco.show.tables import absences, learner_rows, shard_rows, totals
from decoupled_diloco.tape.writer import FLUSH_SECONDS
from decoupled_diloco.units import format_bytes, format_count, format_duration

_STYLES = {
    **dict.fromkeys(("stepping", "running", "connected"), "green"),
    **dict.fromkeys(("finished", "left", "ended", AWAY), "dim"),
    **dict.fromkeys(("interrupted", "down", "silent", "out of reach", "disconnected"), "bold red"),
    "cut off": "bold yellow",
}

HEADER_LINES = 3
"""An empty line and two header lines before a table's rows."""

LEARNERS_MAX = 17
"""Maximum rows of learners in `ddiloco train`; the last row summarizes the rest."""

SITES_MAX = 4
"""Maximum rows of sites if the height is limited; the last row counts the rest."""

REMARKS_MAX = 3
"""Number of remarks when the height of the terminal sets no limit."""

OPEN_ROUNDS_MAX = 3
"""Number of open rounds shown for each shard, oldest first."""

_DEVICE = "device"  # shown if it is known
_VIA = "via"  # shown in a run with sites
_PRIVACY = "privacy"  # shown in a run with differential privacy
_SCORE = "score"  # shown in a run with scores
_FAILED, _PREEMPTED = "failed", "preempted"  # shown if it has happened
_LEARNERS = (
    *(
        "learner",
        "state",
        _VIA,
        _DEVICE,
        _PRIVACY,
        "steps",
        "tok/s",
        "took\npart",
        "recent",
        _SCORE,
        _FAILED,
        _PREEMPTED,
    ),
    *("rounds\nbehind", "stale\ncopies", "discarded", "silent"),
)
_LEARNERS_TRAINING = ("learner", "state", _DEVICE, "steps", "tok/s", "loss", "took part")
_SHARDS = (
    *("syncer", "state", "term", "clock", "merged", "abandoned", "live", "open", "grace"),
    "versions",
)
_SHARDS_TRAINING = ("syncer", "state", "clock", "merged", "abandoned", "open", "grace")
_SITES = ("site", "state", "learners", "contributions", "sums", "refused", "sent", "saved")
"""Columns by command; those without room are left out."""

_LEFT_OUT_FIRST = (
    *("stale\ncopies", _DEVICE, "discarded", "rounds\nbehind", _PREEMPTED, _FAILED, "silent"),
    *(_VIA, "took\npart"),
    *("versions", "grace", "live", "term", "refused", "sums", "contributions", "sent"),
    *("abandoned", "recent", "learners"),
)
"""The columns that a narrow terminal leaves out, in this order."""

NAME_WIDTH = 24
"""Columns for a name; a longer one is wrapped if the table lacks room."""


_log = logging.getLogger(__name__)

LINE_SECONDS = 5.0
"""Without a terminal: interval between two lines about the whole run."""

LATE_SECONDS = 2 * FLUSH_SECONDS
"""Delay of a line, so that older lines of other tapes can come first: tapes are buffered."""

SILENT_SECONDS = 10.0
"""Time without a new record after which the line about the run mentions it."""

LINES_MAX = 24
"""Maximum number of learners, and of outages, in the summary; the report has all."""


def render_status(status: RunStatus, *, width: int = 80, rows: int | None = None) -> RenderableType:
    """Return the full status for a terminal of this size; ``rows=None``: no limit.

    A narrow terminal gets fewer columns, and a line that names the others. Learners that do not fit
    are summarized in one row.
    """
    left_out: list[str] = []
    parts: list[RenderableType] = [*_head(status, width), *_totals(status, width)]
    sites = len(status.sites) if rows is None else min(len(status.sites), SITES_MAX)
    tables = (len(status.shards), sites)
    used = len(parts) + HEADER_LINES + sum(count + HEADER_LINES for count in tables if count) + 1
    room = len(status.learners) if rows is None else max(2, rows - used)
    used += min(room, len(status.learners))
    if status.learners:
        parts += [Text(""), _learner_table(status, _LEARNERS, room, width, left_out)]
    if status.shards:
        shards = map(_shard_row, status.shards)
        parts += [Text(""), _table(_SHARDS, shards, width, left_out)]
    if status.sites:
        parts += [Text(""), _site_table(status, sites, width, left_out)]
    missing = _no_room(left_out)
    parts += missing
    notes = [Text(f"! {each}", style="yellow", overflow="fold") for each in status.problems]
    notes += _dim(_open_lines(status))
    count = REMARKS_MAX if rows is None else max(0, rows - used - len(notes) - 1)
    notes += _dim(f"{clock_face(at)}  {text}" for at, text in status.remarks[-count:] if count)
    if rows is not None:
        notes = notes[: max(0, rows - used - 1)]
        for line in (*missing, *notes):  # one line each: the terminal has no more
            line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*parts, *([Text("")] if notes else []), *notes)


def render_training(status: RunStatus, left: str) -> RenderableType:
    """Return the display of `ddiloco train`; fits 80 columns. ``left``: the remaining time."""
    left_out: list[str] = []
    parts: list[RenderableType] = [Text(""), _budget_bar(status, 80, left)]
    if status.learners:
        learners = _learner_table(status, _LEARNERS_TRAINING, LEARNERS_MAX, 80, left_out)
        parts += [Text(""), learners]
    if status.shards:
        shards = map(_shard_row, status.shards)
        parts += [Text(""), _table(_SHARDS_TRAINING, shards, 80, left_out)]
    parts += _no_room(left_out)
    if status.evaluation_loss is not None:
        loss, where = f"{status.evaluation_loss:.4f}", f" (step {status.evaluation_step})"
        where = _average(status) + where
        parts += [Text(""), Text.assemble("evaluation loss ", (loss, "bold"), (where, "dim"))]
    return Group(*parts)


def _average(status: RunStatus) -> str:
    return "" if status.average_loss is None else f", average {status.average_loss:.4f}"


def _no_room(left_out: Sequence[str]) -> list[Text]:
    """Return the line that names the columns without room."""
    names = ", ".join(name.replace("\n", " ") for name in left_out)
    return _dim([f"no room for: {names} (ddiloco status --json has all)"] if names else [])


def _dim(lines: Iterable[str]) -> list[Text]:
    return [Text(line, style="dim", overflow="fold") for line in lines]


def _head(status: RunStatus, width: int) -> list[RenderableType]:
    style = _STYLES.get(status.phase, "yellow")
    name = status.name or "(no name yet)"
    line = Text.assemble((name, "bold"), "  ", (headline(status), style))
    if status.phase == "empty":
        return [line]
    left = ""
    if status.seconds_left is not None:
        rate = f"{format_count(status.tokens_per_second or 0)} tok/s"
        if status.left_by == "steps":
            rate = f"{status.steps_per_second or 0:.3g}/s"
        left = f"{format_duration(status.seconds_left)} left, {rate}"
    return [line, _budget_bar(status, width, left)]


def _budget_bar(status: RunStatus, width: int, left: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [Text(position(status))]
    share = budget_share(status)
    if share is not None and width >= 60:
        bar = ProgressBar(1.0, share, width=min(24, width // 4), style="grey37")
        bar.complete_style = bar.finished_style = "cyan"
        cells.append(bar)
    if share is not None:
        cells.append(Text(percent(share)))
    cells.append(Text(clock_face(status.elapsed_seconds)))
    if left:
        cells.append(Text(left, style="dim", no_wrap=True))
    grid.add_row(*cells)
    return grid


def _totals(status: RunStatus, width: int) -> list[RenderableType]:
    if status.phase == "empty":
        return []
    tokens, budget = f"{format_count(status.tokens)} tokens", status.max_tokens
    if budget:
        is_over, limit = status.tokens > budget, format_count(budget)
        tokens += f" (budget {limit})" if is_over else f" of {limit}"
    if status.tokens_per_second is not None:
        tokens += f" ({format_count(status.tokens_per_second)}/s)"
    if status.tokens:
        least = "" if status.discarded_whole else "at least "
        tokens += f", {least}{percent(status.discarded_tokens / status.tokens)} discarded"
    parts = [tokens, f"{status.rounds_merged} rounds merged, {status.rounds_abandoned} abandoned"]
    if status.bytes_up is not None and status.bytes_down is not None:
        up, down = format_bytes(status.bytes_up), format_bytes(status.bytes_down)
        by_syncer = status.bytes_of == "syncer"
        moved = f"received {up}, sent {down}" if by_syncer else f"sent {up}, received {down}"
        parts.append(f"{status.bytes_of} {moved}")
    if status.privacy is not None:
        parts.append(f"privacy spent, at most: {status.privacy.spent} ({status.privacy.detail})")
    if status.evaluation_loss is not None:
        parts.append(f"evaluation loss {status.evaluation_loss:.4f}{_average(status)}")
    if status.checkpoint is not None:
        ago, size = (
            format_duration(round(status.checkpoint.seconds_ago)),
            format_bytes(status.checkpoint.nbytes),
        )
        without = (
            f", without {', '.join(status.checkpoint.missing)}" if status.checkpoint.missing else ""
        )
        parts.append(f"checkpoint {status.checkpoint.number} of {ago} ago ({size}{without})")
    if status.store is not None:
        parts.append(_store(status.store))
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 2 > width:
            lines.append(part)
        else:
            lines[-1] += f"; {part}"
    return [Text(line) for line in lines]


def _store(store: StoreStatus) -> str:
    """Return what the store has of the run, and what it lacks."""
    text = f"store {store.address} has no state yet"
    if store.seconds_ago is not None:
        ago = format_duration(round(store.seconds_ago))
        text = f"store {store.address} has state {store.state} of {ago} ago"
    if store.backlog_bytes or store.problem:
        text += f", backlog {format_bytes(store.backlog_bytes)}"
    for part in store.parts:
        ago = format_duration(round(part.seconds_ago))
        text += f", part {part.name} from {part.host} of {ago} ago"
    return text + (f" ({store.problem})" if store.problem else "")


def _site_table(status: RunStatus, room: int, width: int, left_out: list[str]) -> Table:
    """Return a table of the sites; if some do not fit, those with problems come first."""
    sites = list(status.sites)
    if len(sites) > room:
        sites.sort(key=lambda site: site.state in ("connected", "ended"))
        sites = sites[: room - 1]
    table = _table(_SITES, map(_site_row, sites), width, left_out)
    if len(sites) < len(status.sites):
        table.add_row(f"… {len(status.sites) - len(sites)} more")
    return table


def _learner_table(
    status: RunStatus, columns: Sequence[str], room: int, width: int, left_out: list[str]
) -> Table:
    """Return a table of the learners; those that have left are only counted."""
    learners = [learner for learner in status.learners if learner.state != "left"]
    left = len(status.learners) - len(learners)
    room -= bool(left)
    shown = learners if len(learners) <= room else _most_interesting(learners, room - 1)
    without = {_VIA} if status.has_ended or not status.sites else set[str]()
    if not any(learner.device for learner in status.learners):
        without.add(_DEVICE)
    if status.privacy is None:
        without.add(_PRIVACY)
    if all(learner.score is None for learner in status.learners):
        without.add(_SCORE)
    if not any(learner.failures for learner in status.learners):
        without.add(_FAILED)
    if not any(learner.preemptions for learner in status.learners):
        without.add(_PREEMPTED)
    columns = [name for name in columns if name not in without]
    table = _table(columns, map(_learner_row, shown), width, left_out)
    if len(shown) < len(learners):
        table.add_row(f"… {len(learners) - len(shown)} more")
    if left:
        table.add_row(Text(f"… {left} left", style="dim"))
    return table


def _most_interesting(learners: list[LearnerStatus], room: int) -> list[LearnerStatus]:
    """Return the learners with the most problems, as many as fit, in the order of their names."""

    def health(learner: LearnerStatus) -> tuple[bool, bool, float]:
        is_away = learner.state == AWAY
        return (is_away, learner.state == "stepping", learner.participation_recent or 0.0)

    worst = {learner.name for learner in sorted(learners, key=health)[: max(1, room)]}
    return [learner for learner in learners if learner.name in worst]


def _learner_row(learner: LearnerStatus) -> dict[str, str | Text]:
    recent, reasons = learner.participation_recent, learner.reasons_recent
    there = sum(reasons.values()) - reasons.get(AWAY, 0)
    absent = learner.state == "stepping" and reasons.get(TOOK_PART, 0) < 0.5 * there
    cells: dict[str, str | Text] = {**learner_cells(learner)}
    return cells | {
        "state": _state(learner.state),
        "recent": Text(percent(recent), style="bold yellow" if absent else ""),
    }


def _shard_row(shard: ShardStatus) -> dict[str, str | Text]:
    style = "yellow" if shard.abandoned else ""
    cells: dict[str, str | Text] = {**shard_cells(shard)}
    return cells | {
        "state": _state(shard.state),
        "abandoned": Text(str(shard.abandoned), style=style),
    }


def _site_row(site: SiteStatus) -> dict[str, str | Text]:
    cells: dict[str, str | Text] = {**site_cells(site)}
    return cells | {"state": _state(site.state)}


def _state(state: str) -> Text:
    return Text(state, style=_STYLES.get(state, "yellow"))


def _open_lines(status: RunStatus) -> list[str]:
    """Return what each open round waits for; empty at the end of a run."""
    lines = []
    for shard in status.shards:
        lines += [f"{shard.name} {open_line(r)}" for r in shard.open_rounds[:OPEN_ROUNDS_MAX]]
        more = len(shard.open_rounds) - OPEN_ROUNDS_MAX
        if more > 0:
            lines.append(f"{shard.name} and {more} more open rounds")
    return lines


def open_line(round: OpenRound) -> str:
    step = "" if round.step is None else f", step {round.step}"
    names = ", ".join(round.learners) or "no learner"
    awaited = {
        "merge": f"the merge of {', '.join(round.delivered)}",
        "quorum": f"its quorum; not yet requested from {names}",
        "grace": f"stragglers within its grace window: {names}",
        "upload": f"the upload of {names}",
    }[round.waits_for]
    text = f"round {round.number} (fragment {round.fragment}{step}) open for "
    return f"{text}{format_duration(round.open_seconds)}, waits for {awaited}"


def _table(
    columns: Sequence[str],
    rows: Iterable[dict[str, str | Text]],
    width: int,
    left_out: list[str],
) -> Table:
    """Return a table that fits the width; the columns without room are added to ``left_out``."""
    cells = [[row[name.replace("\n", " ")] for name in columns] for row in rows]
    needs = {
        name: max(map(len, (*name.split("\n"), *column)))
        for name, column in zip(columns, zip(*cells, strict=True), strict=False)
    }
    needs |= {name: min(needs[name], NAME_WIDTH) for name in columns[:1] if needs}
    without = [name for name in _LEFT_OUT_FIRST if name in needs]
    while without and sum(needs.values()) + len(needs) - 1 > width:
        left_out.append(without.pop(0))
        del needs[left_out[-1]]
    shown = [name for name in columns if name not in left_out]
    table = plain_table(*shown, gap=1, left=columns[:2], wrap=False)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for row in cells:
        kept = (cell for name, cell in zip(columns, row, strict=True) if name in shown)
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in kept))
    return table


class ProgressDisplay:
    """Shows the progress of a run; call `poll` a few times per second.

    It never ends a run: if it fails, it prints this once and stops.

    Args:
        source: A run folder, whose tape need not exist yet; or a run that is followed.
        max_steps: The run ends at this global step, or after ``max_tokens``; ``None``: no
            limit.
        console: The output; a `SteadyConsole` on standard output by default.
        clock: Returns seconds, for the interval of plain lines.
        virtual: Whether the run is simulated, so that its time differs from the user's.
    """

    def __init__(
        self,
        source: str | Path | FollowedRun,
        max_steps: int | None = None,
        max_tokens: int | None = None,
        console: SteadyConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
        virtual: bool = False,
    ) -> None:
        self.budget = (max_steps, max_tokens)
        self.console = console or SteadyConsole()
        self._clock, self._since, self._virtual = clock, clock(), virtual
        self._line_at, self._record_at = self._since + LINE_SECONDS, self._since
        self._followed = source if isinstance(source, FollowedRun) else FollowedRun(source)
        self.run = self._followed.run
        self._records = 0
        self._live: Live | None = None
        self._waiting: list[tuple[float, str]] = []
        self._problems_shown = 0
        self._has_line = False
        self._stopped = False

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._update(last=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def poll(self) -> None:
        """Read new records from the tape, and show them."""
        self._update(last=False)

    def _update(self, *, last: bool) -> None:
        if self._stopped:
            return
        try:
            self._read()
            self._print_waiting(last)
            if self._live is not None:
                self._live.update(self.render(), refresh=True)
        except Exception as error:  # a failing display must not end hours of training
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._stopped = True
        name = "" if isinstance(error, DilocoError) else f"{type(error).__name__}: "
        text = f"progress is no longer shown; the run continues: {name}{error}"
        _log.debug("%s", text, exc_info=error)
        try:
            self.console.print_text(text, "red")
        except OSError:  # the console itself is gone, for example a closed pipe
            _log.error("%s", text)

    def _read(self) -> None:
        self._followed.poll()
        if self.run.records > self._records:
            self._records, self._record_at = self.run.records, self._clock()
        self._waiting += [(r.at, r.text) for r in self._followed.take_remarks()]
        problems = self._followed.problems[self._problems_shown :]
        self._waiting += [(self.run.duration, problem) for problem in problems]
        self._problems_shown += len(problems)

    def _print_waiting(self, last: bool) -> None:
        """Print the lines that are old enough that no earlier line can still arrive."""
        due = self._clock() >= self._line_at or (last and not self._has_line)
        if self._live is None and due and self.run.records:
            self._has_line = True
            self._line_at = self._clock() + LINE_SECONDS
            self._waiting.append((self.run.duration + self._silent, self.line()))
        silent = self._clock() - self._record_at
        until = self.run.duration - LATE_SECONDS + (0.0 if self._virtual else silent)
        self._waiting.sort(key=lambda line: line[0])
        while self._waiting and (last or self._waiting[0][0] <= until):
            at, line = self._waiting.pop(0)
            text = Text.assemble((clock_face(at), "dim"), "  ", line)
            self.console.print(text, soft_wrap=self._live is None)

    @property
    def _silent(self) -> float:
        """Seconds without a record, if that is unusually long; otherwise 0."""
        silent = self._clock() - self._record_at
        return silent if silent > SILENT_SECONDS and not self._virtual else 0.0

    def status(self) -> RunStatus:
        return status_of(self.run, self.run.latest, budget=self.budget)

    def line(self) -> str:
        status = self.status()
        there = [each for each in status.learners if each.state not in ABSENT_STATES]
        training = [learner for learner in there if learner.state == "stepping"]
        parts = [position(status), f"{format_count(status.tokens)} tokens"]
        if status.tokens_per_second is not None:
            parts.append(f"{format_count(status.tokens_per_second)} tok/s")
        losses = [learner.loss for learner in training or there if learner.loss is not None]
        if losses:
            parts.append(f"loss {sum(losses) / len(losses):.3f}")
        parts.append(learners_in_words(status))
        parts.append(f"{status.rounds_merged} rounds")
        if self._silent:
            return ", ".join([*parts, f"nothing new for {format_duration(round(self._silent))}"])
        left = self._left(status)
        return ", ".join([*parts, *([left] if left else [])])

    def render(self) -> RenderableType:
        """Return the display; fits 80 columns."""
        status = self.status()
        return render_training(status, self._left(status))

    def _left(self, status: RunStatus) -> str:
        """Return the remaining time, in the user's time; empty if it cannot be estimated yet."""
        remaining, elapsed = status.seconds_left, self.run.duration
        if not remaining or (self._virtual and not elapsed):
            return ""
        if self._virtual:
            real = (self._clock() - self._since) / elapsed
            return f"{format_duration(remaining * real)} left in real time"
        return f"{format_duration(remaining)} left"


def print_summary(
    run: RunModel, files: Sequence[str | Path] = (), console: SteadyConsole | None = None
) -> None:
    """Print the summary of a run: totals, every learner and shard, outages, files written."""
    console = console or SteadyConsole()
    pairs = [(t.name, f"{t.text}, {t.detail}" if t.detail else t.text) for t in totals(run)]
    pairs += [("trained", devices)] if (devices := _devices(run)) else []
    console.print(named_values(pairs))
    for title, rows in (("learners", learner_rows(run)), ("syncer", shard_rows(run))):
        if len(rows) > 1:
            console.print()
            console.print(_summary_table(title, rows[: 1 + LINES_MAX]))
        if len(rows) > 1 + LINES_MAX:
            console.print(f"… and {len(rows) - 1 - LINES_MAX} more: see the report")
    lines = absences(run)
    if len(lines) > LINES_MAX:
        more = f"… and {len(lines) - LINES_MAX} more absences: see the report"
        lines = [*lines[:LINES_MAX], more]
    lines += [
        f"{many(learner.steps_unrecorded, 'step')} of {learner.name} known only from the shards: "
        "a killed process loses its last records"
        for learner in run.learners.values()
        if learner.steps_unrecorded
    ]
    lines += [f"the tape is incomplete: {problem}" for problem in run.problems]
    lines += advice_of(run)
    for line in lines:
        console.print()
        console.print_text(line)
    if files:
        console.print()
        console.print(named_values(("written", str(file)) for file in files))


def _devices(run: RunModel) -> str:
    """Return how many learners trained on each device; empty if the tape does not record it."""
    counted = Counter(each.device for each in run.trained.values() if each.device)
    return "; ".join(f"{many(count, 'learner')} on {text}" for text, count in counted.items())


def _summary_table(title: str, rows: list[list[str]]) -> Table:
    """Return a table whose headers are broken at spaces, so that it fits 80 columns."""
    header = [name.replace(" ", "\n") or title for name in rows[0]]
    table = plain_table(*header, left=header[:1])
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
