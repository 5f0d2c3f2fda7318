"""`ddiloco traces`: a run's rounds to a collector of OpenTelemetry, as it goes on."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    RunSource,
    TokenFile,
    tls_of,
)
from decoupled_diloco.cli.status import newest_run, source_of
from decoupled_diloco.cli.watch import is_over
from decoupled_diloco.errors import AccessError, StorageError, TransportError
from decoupled_diloco.launch.termination import handling, interrupt

if TYPE_CHECKING:
    from decoupled_diloco.monitor.collector import Collector
    from decoupled_diloco.observe.records import Record
    from decoupled_diloco.observe.sources import Source

NOT_OVER = "what is read of the run ends before the round"
"""Why a round has no end."""


def traces(
    to: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The collector, which takes OTLP over HTTP: http://HOST:4318. Keys are read from "
            "OTEL_EXPORTER_OTLP_HEADERS.",
        ),
    ],
    source: RunSource = "",
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 5.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Send what there is by now, open rounds too, and end."),
    ] = False,
) -> None:
    """Every round of a run as a trace of OpenTelemetry, until the run is over."""
    from decoupled_diloco.monitor.collector import Collector

    collector = Collector(to)
    source = source or newest_run("ddiloco traces runs/quickstart --to http://127.0.0.1:4318")
    tls = tls_of(authority, certificate, key)
    opened = source_of(source, token_file, tls, detail=True)
    reading = Reading(opened, collector)
    with handling(interrupt, signal.SIGTERM), contextlib.closing(collector):
        try:
            reading.follow(every, once=once)
        except KeyboardInterrupt:
            reading.end()
    if not reading.rounds:
        raise StorageError(_nothing(source, opened))
    typer.echo(f"{reading.rounds} rounds, {collector.sent} spans: sent to {collector.url}")


class Reading:
    """Reads a run and sends its traces.

    Attributes:
        rounds: How many rounds have been sent.
    """

    def __init__(self, source: Source, collector: Collector) -> None:
        self._source, self._collector = source, collector
        self._generation = source.generation
        self._rounds_before = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        from decoupled_diloco.monitor.traces import TraceFold
        from decoupled_diloco.observe.run_model import RunModel

        self._run, self._fold = RunModel(), TraceFold()

    @property
    def rounds(self) -> int:
        return self._rounds_before + self._fold.rounds

    def follow(self, every: float, *, once: bool) -> None:
        """Until the run is over; ``once``: no longer than there is something to read.

        Raises:
            TransportError: The collector takes nothing, or no syncer answers from the first.
            StorageError: The tape cannot be read.
        """
        self._send(self._records())
        if not (once or self._run.records):
            typer.echo("no tape yet: waiting for one, until Ctrl-C", err=True)
        silent_since: float | None = None
        while not (once or self._is_over(silent_since)):
            time.sleep(every)
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
        from decoupled_diloco.observe.status import status_of

        status = status_of(self._run, self._source.now(), self._source.problems())
        away = 0.0 if silent_since is None else time.monotonic() - silent_since
        return is_over(status, away)

    def end(self, problem: str = "") -> None:
        """Sends what is left: with a ``problem`` also rounds that are open."""
        self._collector.send(self._fold.rest(problem))
        self._collector.flush()

    def _records(self) -> Iterable[Record]:
        """What is new; of a tape one record after the other, however long it is."""
        from decoupled_diloco.observe.sources import FolderSource

        source = self._source
        if isinstance(source, FolderSource):
            records: Iterable[Record] = source.stream(skim=False)
        else:
            records = source.poll()
        if source.generation != self._generation:
            self._generation = source.generation
            self._rounds_before += self._fold.rounds
            self._begin_anew()
        return records

    def _send(self, records: Iterable[Record]) -> None:
        for record in records:
            self._run.take(record)
            self._collector.send(self._fold.take(record))
        self._collector.flush()


def _nothing(source: str, opened: Source) -> str:
    problems = opened.problems()
    why = f" ({problems[0]})" if problems else ""
    return (
        f"{source} tells of no round that is over{why}: give the folder of a run whose shards "
        "have written tapes, or the address of its syncer"
    )
