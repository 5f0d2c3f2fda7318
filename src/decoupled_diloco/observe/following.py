"""A run that is going on, read as its tape grows; several may look at it."""

from __future__ import annotations

from pathlib import Path

from decoupled_diloco.observe.reader import Follower
from decoupled_diloco.observe.run_data import Remark
from decoupled_diloco.observe.run_model import RunModel


class FollowedRun:
    """The model of a run, brought up to date by each `poll`.

    Args:
        run_folder: The run's folder; its tape need not exist yet.

    Attributes:
        problems: What could not be read, one sentence each.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self.run = RunModel()
        self._follower = Follower(run_folder)
        self.problems = self._follower.problems
        self._remarks_taken = 0

    def poll(self) -> None:
        """Takes in what has been added to the tape.

        Raises:
            StorageError: A file cannot be read or is of another schema.
        """
        self.run.take_all(self._follower.poll())

    def take_remarks(self) -> list[Remark]:
        """What has been worth a line since the last call."""
        fresh = self.run.remarks_told - self._remarks_taken
        self._remarks_taken += fresh
        return self.run.remarks[-fresh:] if fresh else []
