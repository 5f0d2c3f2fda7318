"""A learner's own experiment log; the training loop passes numbers to a thread and never waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from decoupled_diloco.monitor.metric_sources import WatchedLearner
from decoupled_diloco.monitor.sinks import Carefully, Sink, open_sink, require_places
from decoupled_diloco.runtime import runtime

LOG_SECONDS = 1.0
"""Minimum interval between two entries; more would be useless, and a slow tracker would lag."""


Look = Callable[[Callable[[WatchedLearner], dict[str, float]]], dict[str, float]]


class StepLog:
    """Logs a learner's numbers in a separate thread.

    Args:
        place: Destination, see `sinks`.
        name: Name of the learner.
        folder: Folder for files if ``place`` does not name one.

    Raises:
        ConfigError: See `require_places`.
    """

    def __init__(self, place: str, name: str, folder: Path) -> None:
        require_places([place])
        self._place, self._name, self._folder = place, name, folder
        self._sink: Sink | None = None
        self._due_at = 0.0
        self._step = -1

    def start(self) -> None:
        """Open the sink.

        Raises:
            ConfigError: See `open_sink`.
        """
        sink = open_sink(self._place, self._name, self._folder, {"learner": self._name})
        self._sink = Carefully(sink, self._place)
        self._worker = runtime().worker("ddiloco-log")

    def stepped(self, instant: float, step: int, look: Look) -> None:
        """Log a step if the interval has passed."""
        if self._sink is not None and instant >= self._due_at and step > self._step:
            self._due_at, self._step = instant + LOG_SECONDS, step
            self._worker.submit(self._sink.log, step, look(_values))

    def close(self) -> None:
        """Wait until everything is written; does nothing if it was not opened."""
        if self._sink is not None:
            self._worker.submit(self._sink.close)
            self._worker.shutdown(wait=True)
            self._sink = None


def _values(learner: WatchedLearner) -> dict[str, float]:
    """Return the numbers under the names that the frameworks' callbacks use."""
    loss = {} if learner.tally.loss is None else {"loss": learner.tally.loss}
    return loss | {
        "diloco/run_step": learner.run_step,
        "diloco/tokens": learner.tokens,
        "diloco/discarded_tokens": learner.discarded_tokens,
        "diloco/rounds": learner.tally.applied,
    }
