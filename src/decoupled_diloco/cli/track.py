"""`ddiloco track`: write a run's metrics to TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decoupled_diloco.cli.command_line import command
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.cli.shared_options import (
    ConnectOptions,
    IntervalSeconds,
    RunSource,
    StopWithParent,
    prepare,
)
from decoupled_diloco.cli.watch import Reader
from decoupled_diloco.launch.termination import handling, interrupt

if TYPE_CHECKING:
    from decoupled_diloco.monitor.sinks import Sink
    from decoupled_diloco.show.status import RunStatus

LAST_EVALUATION_SECONDS = 30.0
"""How long the command waits for the last evaluation after the end of a run."""


class TrackOptions(ConnectOptions):
    """Options of `ddiloco track`."""

    to: Annotated[
        list[str],
        typer.Option(
            metavar="TRACKER",
            help="tensorboard, wandb or mlflow, each with an optional destination: "
            "tensorboard:FOLDER, wandb:PROJECT, mlflow:TRACKING_URI. Can be given several times.",
        ),
    ]
    run: RunSource = ""
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write files here if TRACKER names no destination. Default: the run folder, or "
            "the current folder for a URL.",
        ),
    ] = None
    interval_seconds: IntervalSeconds = 5.0
    stop_with_parent: StopWithParent = False


@command(TrackOptions)
def track(options: TrackOptions) -> None:
    """Write a run's metrics to an experiment tracker until the run ends."""
    from decoupled_diloco.monitor.sinks import require_places

    prepare(options.stop_with_parent)
    require_places(options.to)
    run = chosen_run(options.run, "ddiloco track runs/quickstart --to tensorboard")
    source = options.open_run(run)
    reader = Reader(source, options.interval_seconds)
    folder = options.out or (Path(run) if Path(run).is_dir() else Path())
    with contextlib.suppress(KeyboardInterrupt), handling(interrupt, signal.SIGTERM):
        follow(reader, options.to, folder, options.interval_seconds)
    if reader.failure is not None:
        raise reader.failure


def follow(reader: Reader, places: list[str], folder: Path, interval_seconds: float) -> None:
    """Log what a reader reads until the run ends, and the last status in any case."""
    reader.start()
    while (seen := reader.status) is None or (not seen.name and not reader.over):
        time.sleep(interval_seconds)
    sinks = [_open(place, seen, folder) for place in places]
    logged: tuple[int, int | None] = (-1, None)
    over_at: float | None = None
    try:
        while not (over_at is not None and _is_whole(reader, over_at)):
            logged = _log(sinks, reader.status or seen, logged)
            time.sleep(interval_seconds)
            if reader.over and over_at is None:
                over_at = time.monotonic()
    finally:
        reader.stopping.set()
        _log(sinks, reader.status or seen, logged)
        for sink in sinks:
            sink.close()


def _open(place: str, status: RunStatus, folder: Path) -> Sink:
    from decoupled_diloco.monitor.sinks import Carefully, open_sink

    facts: dict[str, Any] = {
        "run": status.name,
        "max_steps": status.max_steps,
        "max_tokens": status.max_tokens,
        "learners": len(status.learners),
    }
    return Carefully(open_sink(place, status.name, folder, facts), place)


def _is_whole(reader: Reader, over_at: float) -> bool:
    """Whether a run that has ended was evaluated at its end, or will not be."""
    status = reader.status
    evaluated = status is None or status.evaluation_step in (None, status.step)
    return evaluated or time.monotonic() - over_at > LAST_EVALUATION_SECONDS


def _log(
    sinks: list[Sink], status: RunStatus, logged: tuple[int, int | None]
) -> tuple[int, int | None]:
    """Log a status if it is new; return its step and the step of its evaluation."""
    from decoupled_diloco.monitor.values import run_values

    now = (max(status.step, logged[0]), status.evaluation_step)
    if now != logged:
        for sink in sinks:
            sink.log(now[0], run_values(status))
    return now
