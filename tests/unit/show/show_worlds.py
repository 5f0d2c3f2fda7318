"""A virtual run in which learners miss rounds for every cause, and its tape."""

from __future__ import annotations

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from decoupled_diloco.config import RunConfig
from decoupled_diloco.protocol.messages import FromLearner, Reported, StepReport
from decoupled_diloco.runtime import now
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from worlds.faults import Fault, strike

A, B, C, D = (f"learner-{number}" for number in range(4))
"""The learners of the world."""

KILLED_AT, BACK_AT = 20.0, 32.0
"""Times at which ``C`` is killed and restarted."""

CUT_AT, HEALED_AT = 40.0, 46.0
"""Times at which the connections of ``B`` are cut and restored."""

SHARD_KILLED_AT, SHARD_BACK_AT = 25.0, 27.0
SHARD_CRASH = Fault(SHARD_KILLED_AT, "crash", "shard-1", SHARD_BACK_AT - SHARD_KILLED_AT)
"""Additional fault of a world: the second shard loses all its state."""


def config_of(folder: Path, **sync: object) -> RunConfig:
    """The run's settings."""
    return RunConfig(
        run={"name": "causes", "folder": folder, "learners": 4, "max_steps": 80},
        sync={"fragments": 4, "sync_every": 4, "overlap_steps": 2, "quorum": 2, **sync},
        syncer={"shards": 2, "port": 0},
        workload={"name": "gpt"},
    )


def write_world(
    folder: Path, *, until: float | None = None, faults: Sequence[Fault] = (), **sync: object
) -> System:
    """Run the world and write its tape into the run folder.

    ``A`` and ``B`` make one step per second. ``C`` needs 1.7 s per step and is killed on the way.
    ``D`` has a link on which a payload takes ten seconds, far longer than the others wait. An
    observer is connected. The tests of a process create each world once.
    """
    system, made = _world(until, tuple(faults), json.dumps(sync), Shard._received)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return system


@functools.cache
def _world(
    until: float | None,
    faults: Sequence[Fault],
    sync: str,
    said: Callable[..., None],
) -> tuple[System, Path]:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    system = System(
        config_of(folder, **json.loads(sync)),
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
    until = 1000.0 if until is None else until
    system.run(until=until, stop=lambda: system.finished and not any(h.alive for h in system.hosts))
    assert not [text for host in system.hosts for loop in host.graves for text in loop.problems]
    system.close()
    return system, folder


@contextmanager
def reports_at_once(seconds: float) -> Iterator[None]:
    """Make shards receive the step reports of this many seconds together."""
    one_by_one, inboxes = Shard._received, {}

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
            shard.driver.deliver(Reported(there))

    with patch.object(Shard, "_received", said):
        yield


def lines_of(path: Path) -> list[dict[str, object]]:
    """Return a tape's records as they were written, without the package's readers."""
    return [json.loads(line) for line in path.read_text().splitlines()]
