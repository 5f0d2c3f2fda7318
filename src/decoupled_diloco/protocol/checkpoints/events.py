"""What the machines are told about checkpoints of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointHeard:
    """A message with this checkpoint number has come; told before the message itself."""

    number: int


@dataclass(frozen=True, slots=True)
class PartWritten:
    """This process's part of a checkpoint is on its disk; or it cannot be, and why."""

    number: int
    digest: str
    nbytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """Somebody asks for a checkpoint of the run now."""
