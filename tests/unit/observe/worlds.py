"""A virtual run in which learners miss rounds for every cause, and its tape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of
from decoupled_diloco.simulate.faults import Fault, strike
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.tapes import VirtualTapes
from decoupled_diloco.simulate.world import World

KILLED_AT, BACK_AT = 20.0, 32.0
"""When ``c`` is killed and started again."""

CUT_AT, HEALED_AT = 40.0, 46.0
"""When the connections of ``b`` are cut, and heal."""

SHARD_KILLED_AT, SHARD_BACK_AT = 25.0, 27.0
SHARD_CRASH = Fault(SHARD_KILLED_AT, "crash", "shard-1", SHARD_BACK_AT - SHARD_KILLED_AT)
"""What a world may suffer besides: the second shard loses all it knows."""


def settings(folder: Path, **sync: object) -> RunConfig:
    """The settings of the run."""
    return RunConfig(
        run={"name": "causes", "folder": folder, "learners": 4, "budget_steps": 80},
        sync={"fragments": 4, "period": 4, "overlap": 2, "quorum": 2, **sync},
        syncer={"shards": 2, "port": 0},
        workload={"name": "gpt"},
    )


def write_world(
    folder: Path,
    *,
    until: float | None = None,
    faults: Sequence[Fault] = (),
    inbox_seconds: float = 0.0,
    **sync: object,
) -> World:
    """Runs the world and writes its tape into the run folder.

    ``a`` and ``b`` take a step a second, ``c`` needs 1.7 s and is killed on the way, ``d`` has a
    link on which a body takes ten seconds, far more than the others wait. An observer looks on.
    """
    config = settings(folder, **sync)
    world = World(
        options_of(config),
        [
            LearnerSpec("a", step_seconds=1.0),
            LearnerSpec("b", step_seconds=1.1, variance=0.05),
            LearnerSpec("c", step_seconds=1.7, tokens_per_step=16),
            LearnerSpec("d", step_seconds=1.0, up_bytes_per_second=50.0),
            LearnerSpec("evaluator-7", role="observer"),
        ],
        seed=7,
        fragment_bytes=[1000] * 4,
        inbox_seconds=inbox_seconds,
    )
    tapes = VirtualTapes(folder, world, config.public())
    strike(
        world,
        [
            Fault(KILLED_AT, "crash", "c", BACK_AT - KILLED_AT),
            Fault(CUT_AT, "cut", "b", HEALED_AT - CUT_AT),
            *faults,
        ],
    )
    world.run(until=until)
    tapes.close()
    return world


def lines_of(path: Path) -> list[dict[str, object]]:
    """A tape's records as they were written, past every reader of the package."""
    return [json.loads(line) for line in path.read_text().splitlines()]
