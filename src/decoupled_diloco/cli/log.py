"""`ddiloco log`: a run's numbers to TensorBoard, Weights & Biases or MLflow, as it goes on."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decoupled_diloco.cli.options import (
    Authority,
    Certificate,
    CertificateKey,
    RunSource,
    StopWithParent,
    TokenFile,
    tls_of,
)
from decoupled_diloco.cli.status import newest_run, source_of
from decoupled_diloco.cli.watch import Reader
from decoupled_diloco.launch.termination import handling, interrupt

if TYPE_CHECKING:
    from decoupled_diloco.monitor.sinks import Sink
    from decoupled_diloco.observe.status import RunStatus

LAST_EVALUATION_SECONDS = 30.0
"""How long after the end of a run its last evaluation is waited for."""


def log(
    to: Annotated[
        list[str],
        typer.Option(
            metavar="PLACE",
            help="tensorboard, wandb or mlflow, or one of them with what it is called there: "
            "tensorboard:FOLDER, wandb:PROJECT, mlflow:TRACKING_URI. May be given several times.",
        ),
    ],
    source: RunSource = "",
    token_file: TokenFile = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: CertificateKey = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where files go if PLACE does not say. Default: the run folder, or here.",
        ),
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 5.0,
    stop_with_parent: StopWithParent = False,
) -> None:
    """A run's numbers to a log of experiments, until the run is over."""
    from decoupled_diloco.monitor.sinks import require_places

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout
    )
    if stop_with_parent:
        from decoupled_diloco.launch.processes import stop_with_parent as follow_parent

        follow_parent()
    require_places(to)
    source = source or newest_run("ddiloco log runs/quickstart --to tensorboard")
    tls = tls_of(authority, certificate, key)
    reader = Reader(source_of(source, token_file, tls), every)
    folder = folder or (Path(source) if Path(source).is_dir() else Path())
    with contextlib.suppress(KeyboardInterrupt), handling(interrupt, signal.SIGTERM):
        follow(reader, to, folder, every)
    if reader.failure is not None:
        raise reader.failure


def follow(reader: Reader, places: list[str], folder: Path, every: float) -> None:
    """Logs what a reader sees until it is over, and the last in any case."""
    reader.start()
    while (seen := reader.status) is None or (not seen.name and not reader.over):
        time.sleep(every)
    sinks = [_open(place, seen, folder) for place in places]
    logged: tuple[int, int | None] = (-1, None)
    over_at: float | None = None
    try:
        while not (over_at is not None and _is_whole(reader, over_at)):
            logged = _log(sinks, reader.status or seen, logged)
            time.sleep(every)
            if reader.over and over_at is None:
                over_at = time.monotonic()
    finally:
        reader.stopping.set()
        _log(sinks, reader.status or seen, logged)
        for sink in sinks:
            sink.close()


def _open(place: str, status: RunStatus, folder: Path) -> Sink:
    from decoupled_diloco.monitor.sinks import Carefully, open_sink

    told: dict[str, Any] = {
        "run": status.name,
        "budget_steps": status.budget_steps,
        "budget_tokens": status.budget_tokens,
        "learners": len(status.learners),
    }
    return Carefully(open_sink(place, status.name, folder, told), place)


def _is_whole(reader: Reader, over_at: float) -> bool:
    """Whether a run that is over has been evaluated at its end, or will not be."""
    status = reader.status
    evaluated = status is None or status.evaluation_step in (None, status.step)
    return evaluated or time.monotonic() - over_at > LAST_EVALUATION_SECONDS


def _log(
    sinks: list[Sink], status: RunStatus, logged: tuple[int, int | None]
) -> tuple[int, int | None]:
    """Logs a status that is new; returns of which step and evaluation it is."""
    from decoupled_diloco.monitor.values import run_values

    now = (max(status.step, logged[0]), status.evaluation_step)
    if now != logged:
        for sink in sinks:
            sink.log(now[0], run_values(status))
    return now
