"""Experiment trackers behind one small interface: TensorBoard, Weights & Biases, MLflow.

A place is ``"tensorboard"``, ``"wandb"`` or ``"mlflow"``, optionally with a name or address:
``"tensorboard:FOLDER"``, ``"wandb:PROJECT"``, ``"mlflow:TRACKING_URI"``. The libraries read all
other settings (keys, entities, offline mode) from their own configuration.
"""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from decoupled_diloco.errors import ConfigError

logger = logging.getLogger(__name__)

PROJECT = "decoupled-diloco"
"""Project in Weights & Biases, and experiment in MLflow."""


class Sink(Protocol):
    """A destination for numbers by step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; steps never decrease."""

    def close(self) -> None:
        """Finish, and wait until everything is written."""


def open_sink(place: str, name: str, folder: Path, settings: Mapping[str, Any]) -> Sink:
    """Open a sink.

    Args:
        place: Destination, see the module's docstring.
        name: Name of the run or learner.
        folder: Folder for files if ``place`` does not name one.
        settings: Shown as the configuration of the experiment.

    Raises:
        ConfigError: The place is unknown, its library is not installed, or opening it fails.
    """
    kind, _, where = place.partition(":")
    require_places([place])
    try:
        return _KINDS[kind](where, name, folder, settings)
    except Exception as error:
        raise ConfigError(f"tracker={place!r}: {kind} refuses: {error}") from error


def require_places(places: Iterable[str]) -> None:
    """Check that these places exist and that their libraries are installed.

    Raises:
        ConfigError: A place is unknown, or its library is missing.
    """
    for place in places:
        kind = place.partition(":")[0]
        if kind not in _KINDS:
            raise ConfigError(
                f"tracker={place!r} is not a valid tracker: write "
                f"{', '.join(map(repr, _KINDS))}, or one of them with a destination, as "
                "'tensorboard:runs/x'"
            )
        _library(kind)


def _library(kind: str) -> ModuleType:
    try:
        return importlib.import_module(kind)
    except ImportError as error:
        raise ConfigError(f"{kind} is not installed: {_INSTALL[kind]}") from error


class TensorBoardSink:
    """Event files in a folder, for `tensorboard --logdir`."""

    def __init__(self, where: str, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        path = where or str(folder / "tensorboard")
        self._writer: Any = SummaryWriter(path, flush_secs=10)
        self._writer.add_text("settings", _as_table(settings))
        logger.info("%s: tensorboard --logdir %s", name, path)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Sink`."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()


class WandbSink:
    """A run in Weights & Biases; ``WANDB_MODE=offline`` keeps it in the folder."""

    def __init__(self, where: str, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self._run: Any = _library("wandb").init(
            project=where or PROJECT,
            name=name,
            dir=str(folder),
            config=dict(settings),
            reinit="create_new",
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Sink`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Sink`."""
        self._run.finish()


class MlflowSink:
    """A run in MLflow, on its tracking server."""

    def __init__(self, where: str, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        mlflow: Any = _library("mlflow")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client: Any = mlflow.MlflowClient(tracking_uri=where or None)
        known = self._client.get_experiment_by_name(PROJECT)
        experiment = known.experiment_id if known else self._client.create_experiment(PROJECT)
        self._run: str = self._client.create_run(experiment, run_name=name).info.run_id
        for key, value in _flat(settings).items():
            self._client.log_param(self._run, key, value[:250])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Sink`."""
        instant = int(time.time() * 1000)
        metrics = [self._metric(key, value, instant, step) for key, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """See `Sink`."""
        self._client.set_terminated(self._run)


class Carefully:
    """A sink that is disabled at the first failure of a library; the failure is logged once.

    Numbers that are not finite are left out, because not every tracker can store them.
    """

    def __init__(self, sink: Sink, place: str) -> None:
        self._sink: Sink | None = sink
        self._place = place

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Sink`."""
        finite = {key: value for key, value in values.items() if math.isfinite(value)}
        self._do(lambda sink: sink.log(step, finite))

    def close(self) -> None:
        """See `Sink`."""
        self._do(lambda sink: sink.close())
        self._sink = None

    def _do(self, work: Callable[[Sink], None]) -> None:
        if self._sink is None:
            return
        try:
            work(self._sink)
        except Exception as error:
            self._sink = None
            logger.error("logging to %s has stopped; training continues: %s", self._place, error)


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Flatten nested tables to dotted keys."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = str(value)
    return found


def _as_table(settings: Mapping[str, Any]) -> str:
    """Return the settings as a Markdown table, which TensorBoard renders."""
    rows = [f"| {key} | {value} |" for key, value in _flat(settings).items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


_KINDS: dict[str, Callable[[str, str, Path, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}

_INSTALL = {
    "tensorboard": "run pip install -e '.[tensorboard]' in the clone",
    "wandb": "run pip install -e '.[wandb]' in the clone",
    "mlflow": "run pip install -e '.[mlflow]' in the clone",
}
