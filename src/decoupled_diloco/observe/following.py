"""A run that is going on, read as its tape grows; several may look at it."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from decoupled_diloco.observe.reader import Follower
from decoupled_diloco.observe.run_data import Remark
from decoupled_diloco.observe.run_model import REMARKS_MAX, RunModel


class FollowedRun:
    """The model of a run, brought up to date by each `poll`.

    Args:
        run_folder: The run's folder; its tape need not exist yet.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self.run = RunModel()
        self._follower = Follower(run_folder)
        self._fresh: deque[Remark] = deque(maxlen=REMARKS_MAX)

    @property
    def problems(self) -> list[str]:
        """What could not be read, one sentence each."""
        return self._follower.problems

    def poll(self) -> None:
        """Takes in what has been added to the tape.

        Raises:
            StorageError: A file cannot be read or is of a newer schema.
        """
        for record in self._follower.poll():
            self._fresh += self.run.take(record)

    def take_remarks(self) -> list[Remark]:
        """What has been worth a line since the last call."""
        fresh = list(self._fresh)
        self._fresh.clear()
        return fresh
