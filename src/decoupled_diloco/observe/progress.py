"""The progress of a run while it is going on, read from its event tape alone.

On a terminal: a display that is drawn anew at every poll, and above it the lines that are worth
keeping (faults, processes that ended and came back, evaluations). Anywhere else: those lines, and
one line on the whole run every few seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from decoupled_diloco.errors import Error
from decoupled_diloco.observe.live import LearnerView, LiveView, ShardView
from decoupled_diloco.observe.reader import Follower
from decoupled_diloco.observe.words import percent
from decoupled_diloco.units import format_count, format_duration

_log = logging.getLogger(__name__)

LINE_SECONDS = 5.0
"""Where there is no terminal, a line on the whole run comes this often."""

ROWS_MAX = 16
"""More learners than this are summed up in one row."""

_STYLES = {
    "stepping": "green",
    "cut off": "bold yellow",
    "out of reach": "bold yellow",
    "running": "green",
    "finished": "dim",
    "down": "bold red",
    "restarting": "yellow",
    "starting": "yellow",
    "joining": "yellow",
}


class SteadyConsole(Console):
    """A console that prints text as it is, and whose reader may go away.

    What is printed names folders and repeats what others say: brackets in it are no markup. And
    when nobody reads any more, rich would end the process, with exit code 1.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(markup=False, **arguments)

    def on_broken_pipe(self) -> None:
        """Leaves the `BrokenPipeError`, which rich is handling here, to whoever printed."""
        raise


class Progress:
    """Shows how a run is going; call `poll` a few times a second.

    It never ends a run: when it fails, it says so once and shows nothing more.

    Args:
        run_folder: The run's folder; its tape need not exist yet.
        budget_steps: The run ends at this global step; ``None``: no limit.
        budget_tokens: The run ends after this many tokens; ``None``: no limit.
        console: Where to show it; a `SteadyConsole` on standard output by default.
        clock: Seconds, for the distance of plain lines.
        virtual: The run is simulated: its time is not that of whoever waits for its end.
    """

    def __init__(
        self,
        run_folder: str | Path,
        budget_steps: int | None = None,
        budget_tokens: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        virtual: bool = False,
    ) -> None:
        self.view = LiveView()
        self.budget_steps = budget_steps
        self.budget_tokens = budget_tokens
        self.console = console or SteadyConsole()
        self._clock, self._since, self._virtual = clock, clock(), virtual
        self._follower = Follower(run_folder)
        self._live: Live | None = None
        self._line_at = clock() + LINE_SECONDS
        self._problems_told = 0
        self._stopped = False

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.poll()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def poll(self) -> None:
        """Reads what is new on the tape and shows it."""
        if self._stopped:
            return
        try:
            self._read()
            self._show()
        except Exception as error:  # a display that fails must not end hours of training
            self._stopped = True
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        name = "" if isinstance(error, Error) else f"{type(error).__name__}: "
        text = f"progress is no longer shown, the run goes on: {name}{error}"
        _log.debug("%s", text, exc_info=error)
        try:
            self.console.print(text, style="red", markup=False, soft_wrap=True)
        except OSError:  # the console itself is gone, for example a closed pipe
            _log.error("%s", text)

    def _read(self) -> None:
        for record in self._follower.poll():
            for at, line in self.view.take(record):
                self._tell(at, line)
        for problem in self._follower.problems[self._problems_told :]:
            self._tell(self.view.elapsed, problem)
        self._problems_told = len(self._follower.problems)

    def _tell(self, at: float, line: str) -> None:
        text = Text.assemble((clock_face(at), "dim"), "  ", line)
        self.console.print(text, soft_wrap=self._live is None)

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self.render(), refresh=True)
        elif self._clock() >= self._line_at and self.view.began is not None:
            self._line_at = self._clock() + LINE_SECONDS
            self._tell(self.view.elapsed, self.line())

    # ---- in one line

    def line(self) -> str:
        """The whole run in one line."""
        view = self.view
        parts = [self._position(), f"{format_count(view.tokens)} tokens"]
        rate = view.token_rate.per_second()
        if rate is not None:
            parts.append(f"{format_count(rate)} tok/s")
        training = [x for x in view.learners.values() if view.state_of(x) == "stepping"]
        losses = [x.loss for x in training or view.learners.values() if x.loss is not None]
        if losses:
            parts.append(f"loss {sum(losses) / len(losses):.3f}")
        parts.append(f"{len(training)}/{len(view.learners)} learners")
        parts.append(f"{sum(s.merged for s in view.shards.values())} rounds")
        return ", ".join([*parts, *self._left()])

    def _position(self) -> str:
        view = self.view
        if self.budget_steps is None:
            return f"step {view.step}"
        return f"step {view.step}/{self.budget_steps}"

    # ---- the budget

    def fraction(self) -> float | None:
        """How much of the budget is spent, 0 to 1; the budget that ends the run first counts."""
        spent = []
        if self.budget_steps:
            spent.append(self.view.step / self.budget_steps)
        if self.budget_tokens:
            spent.append(self.view.tokens / self.budget_tokens)
        return min(1.0, max(spent)) if spent else None

    def remaining_seconds(self) -> float | None:
        """How long the budget lasts at the present rates; ``None``: too early to tell."""
        view, remaining = self.view, []
        if self.fraction() == 1.0:
            return None
        for budget, spent, rate in (
            (self.budget_steps, view.step, view.clock_rate.per_second()),
            (self.budget_tokens, view.tokens, view.token_rate.per_second()),
        ):
            if budget and rate is not None and rate > 0.0:
                remaining.append(max(0.0, (budget - spent) / rate))
        return min(remaining, default=None)

    def _left(self) -> list[str]:
        """In words, and in the time of whoever waits; nothing when it is too early to tell."""
        remaining, elapsed = self.remaining_seconds(), self.view.elapsed
        if remaining is None or (self._virtual and not elapsed):
            return []
        if self._virtual:
            real = (self._clock() - self._since) / elapsed
            return [f"{format_duration(remaining * real)} left in real time"]
        return [f"{format_duration(remaining)} left"]

    # ---- on a terminal

    def render(self) -> RenderableType:
        """The display; fits 80 columns."""
        view = self.view
        parts: list[RenderableType] = [Text(""), self._budget_bar()]
        if view.learners:
            parts += [Text(""), self._learner_table()]
        if view.shards:
            parts += [Text(""), self._shard_table()]
        if view.evaluation is not None and view.evaluation.loss is not None:
            where = f" (step {view.evaluation.global_step})"
            loss = f"{view.evaluation.loss:.4f}"
            parts += [
                Text(""),
                Text.assemble("evaluation loss ", (loss, "bold"), (where, "dim")),
            ]
        return Group(*parts)

    def _budget_bar(self) -> RenderableType:
        fraction = self.fraction()
        grid = Table.grid(padding=(0, 2))
        cells: list[RenderableType] = [Text(self._position(), style="bold")]
        if fraction is not None:
            bar = ProgressBar(
                total=1.0,
                completed=fraction,
                width=24,
                style="grey37",
                complete_style="cyan",
                finished_style="cyan",
            )
            cells += [bar, Text(f"{100 * fraction:.0f} %")]
        cells.append(Text(clock_face(self.view.elapsed)))
        cells += [Text(left, style="dim") for left in self._left()]
        grid.add_row(*cells)
        return grid

    def _learner_table(self) -> Table:
        table = _table("learner", "state", "steps", "tok/s", "loss", "took part")
        learners = sorted(self.view.learners.values(), key=lambda x: natural(x.name))
        merged = sum(shard.merged for shard in self.view.shards.values())
        for learner in learners[:ROWS_MAX]:
            table.add_row(*self._learner_row(learner, merged))
        if len(learners) > ROWS_MAX:
            table.add_row(f"… {len(learners) - ROWS_MAX} more", *[""] * 5)
        return table

    def _learner_row(self, learner: LearnerView, merged: int) -> Iterable[RenderableType]:
        state = self.view.state_of(learner)
        rate = learner.token_rate.per_second() if learner.state == "stepping" else None
        return (
            Text(learner.name),
            Text(state, style=_STYLES.get(state, "yellow")),
            Text(str(learner.steps)),
            Text("–" if rate is None else format_count(rate)),
            Text("–" if learner.loss is None else f"{learner.loss:.3f}"),
            Text(percent(learner.folded / merged if merged else None)),
        )

    def _shard_table(self) -> Table:
        table = _table("syncer", "state", "clock", "merged", "given up", "open", "grace")
        for shard in sorted(self.view.shards.values(), key=lambda x: natural(x.name)):
            table.add_row(*self._shard_row(shard))
        return table

    def _shard_row(self, shard: ShardView) -> Iterable[RenderableType]:
        grace = shard.grace_seconds
        return (
            Text(shard.name),
            Text(shard.state, style=_STYLES.get(shard.state, "yellow")),
            Text(str(shard.clock)),
            Text(str(shard.merged)),
            Text(str(shard.abandoned), style="" if shard.abandoned == 0 else "yellow"),
            Text(str(len(shard.open))),
            Text("–" if grace is None else f"{1000 * grace:.0f} ms"),
        )


def clock_face(seconds: float) -> str:
    """Seconds as minutes and seconds.

    >>> clock_face(75.4), clock_face(3675)
    ('01:15', '1:01:15')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def natural(name: str) -> tuple[str, int]:
    """A key that sorts ``learner-10`` behind ``learner-9``.

    >>> sorted(["learner-10", "learner-9"], key=natural)
    ['learner-9', 'learner-10']
    """
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, -1)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        wide = {0: 12, 1: 14}.get(index)
        table.add_column(column, justify="left" if index < 2 else "right", min_width=wide)
    return table
