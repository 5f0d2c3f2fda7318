"""A virtual run in which learners miss rounds for every cause, and its tape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.events import Reported
from decoupled_diloco.protocol.messages import FromLearner, StepReport
from decoupled_diloco.runtime import now
from decoupled_diloco.simulate.faults import Fault, strike
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.system import System
from decoupled_diloco.syncer.shard import Shard

A, B, C, D = (f"learner-{number}" for number in range(4))
"""Its learners."""

KILLED_AT, BACK_AT = 20.0, 32.0
"""When ``C`` is killed and started again."""

CUT_AT, HEALED_AT = 40.0, 46.0
"""When the connections of ``B`` are cut, and heal."""

SHARD_KILLED_AT, SHARD_BACK_AT = 25.0, 27.0
SHARD_CRASH = Fault(SHARD_KILLED_AT, "crash", "shard-1", SHARD_BACK_AT - SHARD_KILLED_AT)
"""What a world may suffer besides: the second shard loses all it knows."""


def config_of(folder: Path, **sync: object) -> RunConfig:
    """The run's settings."""
    return RunConfig(
        run={"name": "causes", "folder": folder, "learners": 4, "budget_steps": 80},
        sync={"fragments": 4, "period": 4, "overlap": 2, "quorum": 2, **sync},
        syncer={"shards": 2, "port": 0},
        workload={"name": "gpt"},
    )


def write_world(
    folder: Path, *, until: float | None = None, faults: Sequence[Fault] = (), **sync: object
) -> System:
    """Runs the world and writes its tape into the run folder.

    ``A`` and ``B`` take a step a second, ``C`` needs 1.7 s and is killed on the way, ``D`` has a
    link on which a body takes ten seconds, far more than the others wait. An observer looks on.
    """
    folder.mkdir(exist_ok=True)
    system = System(
        config_of(folder, **sync),
        [
            LearnerSpec(A, step_seconds=1.0),
            LearnerSpec(B, step_seconds=1.1, variance=0.05),
            LearnerSpec(C, step_seconds=1.7, tokens_per_step=16),
            LearnerSpec(D, step_seconds=1.0, up_bytes_per_second=50.0),
            LearnerSpec("evaluator", role="observer"),
        ],
        folder,
        seed=7,
        sizes=[250] * 4,
        tapes=folder,
    )
    strike(
        system,
        [
            Fault(KILLED_AT, "crash", C, BACK_AT - KILLED_AT),
            Fault(CUT_AT, "cut", B, HEALED_AT - CUT_AT),
            *faults,
        ],
    )
    system.run(until=until, stop=lambda: system.finished and not any(h.alive for h in system.hosts))
    system.close()
    return system


@contextmanager
def reports_at_once(seconds: float) -> Iterator[None]:
    """Has shards take the step reports of so many seconds together."""
    one_by_one, inboxes = Shard._said, {}

    def said(shard: Shard, learner: str, message: FromLearner) -> None:
        if not isinstance(message, StepReport):
            one_by_one(shard, learner, message)
            return
        if not inboxes.setdefault(shard, []):
            asyncio.get_running_loop().call_later(seconds - now() % seconds, look, shard)
        inboxes[shard].append((learner, message))

    def look(shard: Shard) -> None:
        members, reports = shard.machine.state.members, inboxes.pop(shard)
        there = tuple(each for each in reports if each[0] in members)
        if there:
            shard._handle(Reported(there))

    with patch.object(Shard, "_said", said):
        yield


def lines_of(path: Path) -> list[dict[str, object]]:
    """A tape's records as they were written, past every reader of the package."""
    return [json.loads(line) for line in path.read_text().splitlines()]
