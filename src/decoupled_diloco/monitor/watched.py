"""What of a process is looked at when somebody asks for its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.monitor.tally import LearnerTally, ShardTally
from decoupled_diloco.protocol.learner_state import LearnerState
from decoupled_diloco.protocol.syncer import SyncerMachine
from decoupled_diloco.transport.base import Client, Server


@dataclass(frozen=True)
class WatchedShard:
    """A shard.

    Attributes:
        heard: When a byte of each connected learner or observer was last received.
        durable: Where the shard keeps its fragments.
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
    """A learner at one instant; its machine's lock is held while this is looked through.

    Attributes:
        steps: Those of earlier lives included, as are ``tokens`` and ``discarded_tokens``.
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
