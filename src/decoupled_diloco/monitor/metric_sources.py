"""The parts of a process that its metrics read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.monitor.counters import LearnerTally, ShardTally
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.syncer_machine import SyncerMachine
from decoupled_diloco.transport.interface import Client, Server


@dataclass(frozen=True)
class WatchedShard:
    """The parts of a shard.

    Attributes:
        heard: Returns the time of the last byte from each connected learner or observer.
        durable: Folder in which the shard stores its fragments.
    """

    config: RunConfig
    machine: SyncerMachine
    tally: ShardTally
    server: Server
    heard: Callable[[], Mapping[str, float]]
    folder: Path
    durable: Path


@dataclass(frozen=True)
class WatchedLearner:
    """A learner at one instant; its machine's lock is held while this is read.

    Attributes:
        steps: Steps of all incarnations; so are ``tokens`` and ``discarded_tokens``.
    """

    name: str
    run: str
    epoch: int
    steps: int
    tokens: int
    discarded_tokens: int
    run_step: int
    state: LearnerState
    tally: LearnerTally
    client: Client
