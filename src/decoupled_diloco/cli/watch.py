"""`ddiloco watch`: show the status of a run on the whole terminal, and refresh it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    IntervalSeconds,
    RunSource,
    fail,
    make_console,
)
from decoupled_diloco.errors import AccessError, TransportError
from decoupled_diloco.launch.termination import handling, interrupt

if TYPE_CHECKING:
    from rich.console import RenderableType

    from decoupled_diloco.show.console import SteadyConsole
    from decoupled_diloco.show.status import RunStatus
    from decoupled_diloco.tape.sources import Source

FRAME_SECONDS = 0.25
"""Time between two frames, and between two checks of the keyboard."""

GONE_SECONDS = 15.0
"""A syncer that was this near its end, and has not answered for as long, has finished."""

ESCAPE_SECONDS = 0.05
"""Bytes within this time after an escape belong to it: an arrow key sends three at once."""

ESCAPE = "\x1b"


class WatchOptions(ConnectOptions):
    """Options of `ddiloco watch`."""

    run: RunSource = ""
    interval_seconds: IntervalSeconds = 1.0


@command(WatchOptions)
def watch(options: WatchOptions) -> None:
    """Show the status of a run on the whole terminal until the run ends or you press q."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("watch requires a terminal: use ddiloco status, for example with watch(1)")
    run = chosen_run(options.run, "ddiloco watch runs/quickstart")
    source = options.open_run(run)
    reader = Reader(source, options.interval_seconds)
    console = make_console()
    # Any of these signals must restore the terminal.
    interrupted = handling(interrupt, signal.SIGTERM, signal.SIGHUP)
    with contextlib.suppress(KeyboardInterrupt), interrupted:
        _show(reader, console)
    reader.stopping.set()
    if reader.failure is not None:
        raise reader.failure
    if reader.status is not None:
        console.print(_picture(reader, console, rows=None))


class Reader(threading.Thread):
    """Reads a source in a thread, so that a syncer that does not answer blocks no key.

    Attributes:
        status: The run as of the last read; ``None`` before the first.
        trouble: Since when the source cannot be read, and why.
        failure: Why the source can never be read; the thread has ended.
    """

    def __init__(self, source: Source, interval_seconds: float) -> None:
        super().__init__(name="reader", daemon=True)
        from decoupled_diloco.run_model import RunModel

        self.status: RunStatus | None = None
        self.trouble: tuple[float, str] | None = None
        self.failure: Exception | None = None
        self.stopping = threading.Event()
        self._source = source
        self._interval_seconds = interval_seconds
        self._run = RunModel()
        self._generation = source.generation
        self._poll()  # an error of the first read is raised at once

    def run(self) -> None:
        while not self.stopping.wait(self._interval_seconds):
            try:
                self._poll()
                self.trouble = None
            except AccessError as error:
                self.failure = error
                return
            except TransportError as error:
                since = self.trouble[0] if self.trouble else time.monotonic()
                self.trouble = (since, str(error))
            except Exception as error:  # otherwise the last frame would stay forever
                self.failure = error
                return

    def _poll(self) -> None:
        from decoupled_diloco.run_model import RunModel
        from decoupled_diloco.show.status import status_of

        source = self._source
        records = source.poll()
        if source.generation != self._generation:
            self._generation = source.generation
            self._run = RunModel()
            records = records or source.poll()
        self._run.take_all(records)
        problems = source.problems()
        self.status = status_of(self._run, source.now(), problems, stored=source.stored)

    @property
    def over(self) -> bool:
        """Whether the run has ended, or can never be read."""
        if self.failure is not None:
            return True
        away = time.monotonic() - self.trouble[0] if self.trouble else 0.0
        return is_over(self.status, away)

    @property
    def near_the_end(self) -> bool:
        """Whether a syncer that does not answer has most likely finished."""
        return is_near_the_end(self.status)


def is_over(status: RunStatus | None, away: float) -> bool:
    """Whether a run that could not be read for ``away`` seconds has ended."""
    if status is not None and status.has_ended:
        return True
    return is_near_the_end(status) and away > GONE_SECONDS


def is_near_the_end(status: RunStatus | None) -> bool:
    """Whether a syncer that does not answer has most likely finished."""
    if status is None:
        return False
    left = status.seconds_left
    return status.phase == "closing" or (left is not None and left < GONE_SECONDS)


def _show(reader: Reader, console: SteadyConsole) -> None:
    from rich.live import Live

    with _single_keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        reader.start()
        while not reader.over:
            live.update(_picture(reader, console, rows=console.height), refresh=True)
            if pressed(FRAME_SECONDS) in ("q", "Q", ESCAPE):
                return


def _picture(reader: Reader, console: SteadyConsole, *, rows: int | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from decoupled_diloco.show.terminal import render_status
    from decoupled_diloco.units import format_duration

    assert reader.status is not None
    trouble = reader.trouble
    room = None if rows is None else rows - (3 if trouble else 1)
    parts: list[RenderableType] = [render_status(reader.status, width=console.width, rows=room)]
    if trouble is not None:
        away = format_duration(time.monotonic() - trouble[0])
        text = f"unreachable for {away}, retrying: {trouble[1]}"
        if reader.near_the_end:
            text = "the syncer stopped right before the end: the run has most likely finished"
        parts.insert(0, Text(text, style="bold red"))
    return Group(*parts)


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Read keys one by one, without echo, and restore the terminal afterwards.

    A key that sends several bytes, such as an arrow, is returned as one string.
    """
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def pressed(seconds: float) -> str:
        key = _byte(number, seconds)
        while key.startswith(ESCAPE) and (more := _byte(number, ESCAPE_SECONDS)):
            key += more
        return key

    try:
        tty.setcbreak(number)
        yield pressed
    finally:
        # the terminal may be closed already
        with contextlib.suppress(termios.error):
            termios.tcsetattr(number, termios.TCSADRAIN, before)


def _byte(number: int, seconds: float) -> str:
    """Return the next byte from the terminal, or nothing after this time."""
    readable, _, _ = select.select([number], [], [], seconds)
    return os.read(number, 1).decode(errors="replace") if readable else ""
