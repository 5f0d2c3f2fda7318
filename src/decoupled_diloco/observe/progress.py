"""The progress of a run while it is going on, read from its event tape alone.

On a terminal: a display that is drawn anew at every poll, and above it the lines that are worth
keeping (faults, processes that ended and came back, evaluations). Anywhere else: those lines, and
one line on the whole run every few seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from decoupled_diloco.errors import Error
from decoupled_diloco.observe.following import FollowedRun
from decoupled_diloco.observe.headline import learners_in_words, position
from decoupled_diloco.observe.status import RunStatus, status_of
from decoupled_diloco.observe.status_view import render_training
from decoupled_diloco.observe.terminal import SteadyConsole
from decoupled_diloco.observe.words import clock_face
from decoupled_diloco.observe.writer import FLUSH_SECONDS
from decoupled_diloco.units import format_count, format_duration

_log = logging.getLogger(__name__)

LINE_SECONDS = 5.0
"""Where there is no terminal, a line on the whole run comes this often."""

LATE_SECONDS = 2 * FLUSH_SECONDS
"""So long a line waits for older ones: processes write their tapes when it suits them."""

SILENT_SECONDS = 10.0
"""When nothing has come for so long, the line on the run says so."""


class ProgressDisplay:
    """Shows how a run is going; call `poll` a few times a second.

    It never ends a run: when it fails, it says so once and shows nothing more.

    Args:
        source: A run's folder, whose tape need not exist yet; or a run that is followed.
        budget_steps: The run ends at this global step, or after ``budget_tokens``; ``None``: no
            limit.
        console: Where to show it; a `SteadyConsole` on standard output by default.
        clock: Seconds, for the distance of plain lines.
        virtual: The run is simulated: its time is not the user's.
    """

    def __init__(
        self,
        source: str | Path | FollowedRun,
        budget_steps: int | None = None,
        budget_tokens: int | None = None,
        console: SteadyConsole | None = None,
        clock: Callable[[], float] = time.monotonic,
        virtual: bool = False,
    ) -> None:
        self.budget = (budget_steps, budget_tokens)
        self.console = console or SteadyConsole()
        self._clock, self._since, self._virtual = clock, clock(), virtual
        self._line_at, self._heard_at = self._since + LINE_SECONDS, self._since
        self._followed = source if isinstance(source, FollowedRun) else FollowedRun(source)
        self.run = self._followed.run
        self._records = 0
        self._live: Live | None = None
        self._waiting: list[tuple[float, str]] = []
        self._problems_told = 0
        self._has_line = False
        self._stopped = False

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._look(last=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    def poll(self) -> None:
        """Reads what is new on the tape and shows it."""
        self._look(last=False)

    def _look(self, *, last: bool) -> None:
        if self._stopped:
            return
        try:
            self._read()
            self._tell_waiting(last)
            if self._live is not None:
                self._live.update(self.render(), refresh=True)
        except Exception as error:  # a display that fails must not end hours of training
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._stopped = True
        name = "" if isinstance(error, Error) else f"{type(error).__name__}: "
        text = f"progress is no longer shown, the run goes on: {name}{error}"
        _log.debug("%s", text, exc_info=error)
        try:
            self.console.say(text, "red")
        except OSError:  # the console itself is gone, for example a closed pipe
            _log.error("%s", text)

    def _read(self) -> None:
        self._followed.poll()
        if self.run.records > self._records:
            self._records, self._heard_at = self.run.records, self._clock()
        self._waiting += [(r.at, r.text) for r in self._followed.take_remarks()]
        problems = self._followed.problems[self._problems_told :]
        self._waiting += [(self.run.duration, problem) for problem in problems]
        self._problems_told += len(problems)

    def _tell_waiting(self, last: bool) -> None:
        """Tells what is old enough that nothing before it is still to come."""
        due = self._clock() >= self._line_at or (last and not self._has_line)
        if self._live is None and due and self.run.records:
            self._has_line = True
            self._line_at = self._clock() + LINE_SECONDS
            self._waiting.append((self.run.duration + self._silent, self.line()))
        silent = self._clock() - self._heard_at
        until = self.run.duration - LATE_SECONDS + (0.0 if self._virtual else silent)
        self._waiting.sort(key=lambda line: line[0])
        while self._waiting and (last or self._waiting[0][0] <= until):
            at, line = self._waiting.pop(0)
            text = Text.assemble((clock_face(at), "dim"), "  ", line)
            self.console.print(text, soft_wrap=self._live is None)

    @property
    def _silent(self) -> float:
        """Seconds without a record, when they are too many to be usual."""
        silent = self._clock() - self._heard_at
        return silent if silent > SILENT_SECONDS and not self._virtual else 0.0

    def status(self) -> RunStatus:
        return status_of(self.run, self.run.latest, budget=self.budget)

    def line(self) -> str:
        status = self.status()
        there = [learner for learner in status.learners if learner.state != "left"]
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
        """The display; fits 80 columns."""
        status = self.status()
        return render_training(status, self._left(status))

    def _left(self, status: RunStatus) -> str:
        """How long it will take, in the user's time; nothing when it is too early to tell."""
        remaining, elapsed = status.seconds_left, self.run.duration
        if not remaining or (self._virtual and not elapsed):
            return ""
        if self._virtual:
            real = (self._clock() - self._since) / elapsed
            return f"{format_duration(remaining * real)} left in real time"
        return f"{format_duration(remaining)} left"
