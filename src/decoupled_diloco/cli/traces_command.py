"""`ddiloco traces`: send the rounds of a run to an OpenTelemetry collector."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    IntervalSeconds,
    RunSource,
)
from decoupled_diloco.cli.watch import is_over
from decoupled_diloco.errors import AccessError, StorageError, TransportError
from decoupled_diloco.launch.termination import handling, interrupt

if TYPE_CHECKING:
    from decoupled_diloco.monitor.collector import Collector
    from decoupled_diloco.tape.records import Record
    from decoupled_diloco.tape.sources import Source

NOT_OVER = "the tape ends before the round does"
"""Why a round has no end."""


class TracesOptions(ConnectOptions):
    """Options of `ddiloco traces`."""

    collector: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Collector that receives OTLP over HTTP, such as http://HOST:4318. Headers are "
            "read from OTEL_EXPORTER_OTLP_HEADERS.",
        ),
    ]
    run: RunSource = ""
    interval_seconds: IntervalSeconds = 5.0
    once: Annotated[
        bool,
        typer.Option("--once", help="Send all rounds until now, open ones included, then exit."),
    ] = False


@command(TracesOptions)
def traces(options: TracesOptions) -> None:
    """Send every round of a run as an OpenTelemetry trace until the run ends."""
    from decoupled_diloco.monitor.collector import Collector

    collector = Collector(options.collector)
    run = chosen_run(
        options.run, "ddiloco traces runs/quickstart --collector http://127.0.0.1:4318"
    )
    opened = options.open_run(run, detail=True)
    reading = Reading(opened, collector)
    with handling(interrupt, signal.SIGTERM), contextlib.closing(collector):
        try:
            reading.follow(options.interval_seconds, once=options.once)
        except KeyboardInterrupt:
            reading.end()
    if not reading.rounds:
        raise StorageError(_nothing(run, opened))
    typer.echo(f"sent {reading.rounds} rounds with {collector.sent} spans to {collector.url}")


class Reading:
    """Reads a run and sends its traces.

    Attributes:
        rounds: Number of rounds that were sent.
    """

    def __init__(self, source: Source, collector: Collector) -> None:
        self._source, self._collector = source, collector
        self._generation = source.generation
        self._rounds_before = 0
        self._start_again()

    def _start_again(self) -> None:
        from decoupled_diloco.monitor.traces import Tracer

        self._fold = Tracer()

    @property
    def rounds(self) -> int:
        return self._rounds_before + self._fold.rounds

    def follow(self, interval_seconds: float, *, once: bool) -> None:
        """Send traces until the run ends; ``once``: only what can be read now.

        Raises:
            TransportError: The collector rejects spans, or no syncer answers at the start.
            StorageError: The tape cannot be read.
        """
        self._send(self._records())
        if not (once or self._fold.run.records):
            typer.echo("no tape yet: waiting for one; Ctrl-C ends", err=True)
        silent_since: float | None = None
        while not (once or self._is_over(silent_since)):
            time.sleep(interval_seconds)
            try:
                records = self._records()
            except AccessError:
                raise
            except TransportError:
                silent_since = silent_since or time.monotonic()
                continue
            silent_since = None
            self._send(records)
        self.end(NOT_OVER)

    def _is_over(self, silent_since: float | None) -> bool:
        from decoupled_diloco.show.status import status_of

        status = status_of(self._fold.run, self._source.now(), self._source.problems())
        away = 0.0 if silent_since is None else time.monotonic() - silent_since
        return is_over(status, away)

    def end(self, problem: str = "") -> None:
        """Send the remaining spans; with a ``problem``, open rounds too."""
        self._collector.send(self._fold.rest(problem))
        self._collector.flush()

    def _records(self) -> Iterable[Record]:
        """Return the new records; those of a tape one by one, however long it is."""
        from decoupled_diloco.tape.sources import FolderSource

        source = self._source
        if isinstance(source, FolderSource):
            records: Iterable[Record] = source.stream(skim=False)
        else:
            records = source.poll()
        if source.generation != self._generation:
            self._generation = source.generation
            self._rounds_before += self._fold.rounds
            self._start_again()
        return records

    def _send(self, records: Iterable[Record]) -> None:
        for record in records:
            self._collector.send(self._fold.spans_of(record))
        self._collector.flush()


def _nothing(run: str, opened: Source) -> str:
    problems = opened.problems()
    why = f" ({problems[0]})" if problems else ""
    return (
        f"{run} has no round that has ended{why}: give a run folder with the tapes of shards, or "
        "the URL of the syncer"
    )
