"""What the state machines order for a checkpoint of the run; see `checkpoints`."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.protocol.checkpoints.messages import CheckpointPart


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Take this process's part of a checkpoint as it is now, then say `PartWritten`.

    A shard: as of its worker's queue. A learner: at this boundary, at which nothing was applied;
    then say ``Paused``, so that it is.
    """

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class ForgetCheckpoints:
    """Parts of other checkpoints than these, and of those before ``before``, are needed no more."""

    keep: tuple[int, ...]
    before: int
    why: str


@dataclass(frozen=True, slots=True)
class BeginCheckpoint:
    """The coordinator's own part of this checkpoint is what it knows now."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class KeepCheckpoint:
    """A checkpoint is complete: write its manifest.

    ``missing``: learners that were there when it began and gave no part.
    """

    number: int
    shards: tuple[CheckpointPart, ...]
    learners: tuple[CheckpointPart, ...]
    missing: tuple[str, ...]
    why: str
