"""`ddiloco watch`: how a run is doing, over and over, on the whole terminal."""

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
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    RunSource,
    TokenFile,
    fail,
    make_console,
    tls_of,
)
from decoupled_diloco.cli.status import newest_run, source_of
from decoupled_diloco.errors import AccessError, TransportError
from decoupled_diloco.launch.termination import handling, interrupt

if TYPE_CHECKING:
    from rich.console import RenderableType

    from decoupled_diloco.observe.sources import Source
    from decoupled_diloco.observe.status import RunStatus
    from decoupled_diloco.observe.terminal import SteadyConsole

FRAME_SECONDS = 0.25
"""How often the picture is drawn and the keyboard looked at."""

GONE_SECONDS = 15.0
"""A syncer that has gone for so long, and was so near its end or in its closing rounds, is done."""

ESCAPE_SECONDS = 0.05
"""What follows an escape within this time belongs to it: an arrow key is three bytes at once."""

ESCAPE = "\x1b"


def watch(
    source: RunSource = "",
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 1.0,
) -> None:
    """The status over and over, on the whole terminal, until the run is over or you press q."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("watch needs a terminal: use ddiloco status, for example with watch(1)")
    source = source or newest_run("ddiloco watch runs/quickstart")
    reader = Reader(source_of(source, token_file, tls_of(authority, certificate, key)), every)
    console = make_console()
    # The terminal is given back as it was, whichever signal ends this.
    told_to_end = handling(interrupt, signal.SIGTERM, signal.SIGHUP)
    with contextlib.suppress(KeyboardInterrupt), told_to_end:
        _show(reader, console)
    reader.stopping.set()
    if reader.failure is not None:
        raise reader.failure
    if reader.status is not None:
        console.print(_picture(reader, console, rows=None))


class Reader(threading.Thread):
    """Reads a source again and again, so that a syncer which does not answer blocks no key.

    Attributes:
        status: The run as of the last look; ``None`` before the first.
        trouble: Why it cannot be looked at just now, and since when.
        failure: Why it can never be looked at; the thread has ended.
    """

    def __init__(self, source: Source, every: float) -> None:
        super().__init__(name="reader", daemon=True)
        from decoupled_diloco.observe.run_model import RunModel

        self.status: RunStatus | None = None
        self.trouble: tuple[float, str] | None = None
        self.failure: Exception | None = None
        self.stopping = threading.Event()
        self._source = source
        self._every = every
        self._run = RunModel()
        self._generation = source.generation
        self._look()  # what is wrong from the start is told at once

    def run(self) -> None:
        while not self.stopping.wait(self._every):
            try:
                self._look()
                self.trouble = None
            except AccessError as error:
                self.failure = error
                return
            except TransportError as error:
                since = self.trouble[0] if self.trouble else time.monotonic()
                self.trouble = (since, str(error))
            except Exception as error:  # Who draws would show the last picture for ever.
                self.failure = error
                return

    def _look(self) -> None:
        from decoupled_diloco.observe.run_model import RunModel
        from decoupled_diloco.observe.status import status_of

        source = self._source
        records = source.poll()
        if source.generation != self._generation:
            self._generation = source.generation
            self._run = RunModel()
            records = records or source.poll()
        self._run.take_all(records)
        self.status = status_of(self._run, source.now(), source.problems())

    @property
    def over(self) -> bool:
        """Whether there is nothing more to come."""
        if self.failure is not None:
            return True
        away = time.monotonic() - self.trouble[0] if self.trouble else 0.0
        return is_over(self.status, away)

    @property
    def near_the_end(self) -> bool:
        """Whether a syncer that has gone has most likely finished."""
        return is_near_the_end(self.status)


def is_over(status: RunStatus | None, away: float) -> bool:
    """Whether nothing more will come of a run that could not be looked at for ``away`` seconds."""
    if status is not None and status.phase in ("finished", "interrupted"):
        return True
    return is_near_the_end(status) and away > GONE_SECONDS


def is_near_the_end(status: RunStatus | None) -> bool:
    """Whether a syncer that has gone has most likely finished: it does not wait for readers."""
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

    from decoupled_diloco.observe.status_view import render_status
    from decoupled_diloco.units import format_duration

    assert reader.status is not None
    trouble = reader.trouble
    room = None if rows is None else rows - (3 if trouble else 1)
    parts: list[RenderableType] = [render_status(reader.status, width=console.width, rows=room)]
    if trouble is not None:
        away = format_duration(time.monotonic() - trouble[0])
        text = f"out of reach for {away}, trying again: {trouble[1]}"
        if reader.near_the_end:
            text = "the syncer has gone right before the end: the run has most likely finished"
        parts.insert(0, Text(text, style="bold red"))
    return Group(*parts)


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Keys one by one, without echo; the terminal is as it was afterwards.

    A key that sends several bytes, as the arrows do, is all of them.
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
        # The terminal may be gone: its window was closed.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(number, termios.TCSADRAIN, before)


def _byte(number: int, seconds: float) -> str:
    """The next byte from the terminal, if it comes within so many seconds."""
    readable, _, _ = select.select([number], [], [], seconds)
    return os.read(number, 1).decode(errors="replace") if readable else ""
