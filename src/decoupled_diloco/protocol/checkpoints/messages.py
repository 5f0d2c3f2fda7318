"""What the coordinator and the others say to each other about checkpoints of the run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointOrdered:
    """Coordinator → everybody: take your part; of earlier checkpoints keep only ``keep``."""

    number: int
    keep: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PartSaved:
    """Learner or shard → coordinator: my part is on my disk; or it cannot be, and why."""

    number: int
    digest: str
    nbytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One participant's part of a complete checkpoint, as its manifest names it."""

    who: str
    digest: str
    nbytes: int
