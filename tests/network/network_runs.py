"""Runs over a link: a shard at the far end, two learners at the near one, and their tapes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.records import Record
from network.network_spaces import FAR, FAR_ADDRESS, NEAR, Link
from process.process_runs import PATIENCE

LEARNERS = 2


def start(
    made: Link,
    folder: Path,
    *,
    steps: int,
    step_seconds: float,
    relay: bool = False,
    **workload: Any,
) -> RunConfig:
    """Start the run's processes, and return its configuration.

    With ``relay``, the learners are behind a relay at their end of the link.
    """
    (folder / "token").write_text("a secret")
    config = RunConfig(
        run={
            "folder": folder / "run",
            "learners": LEARNERS,
            "max_steps": steps,
            "evaluator": False,
        },
        sync={"fragments": 8, "sync_every": 8, "overlap_steps": 2},
        syncer={"host": FAR_ADDRESS, "port": 7070, "token_file": folder / "token"},
        sites=({"name": "site-a", "learners": tuple(range(LEARNERS))},) if relay else (),
        workload={
            "name": "paced",
            "options": {
                "step_seconds": step_seconds,
                "corpus_bytes_max": 200_000,
                "warmup_steps": 0,
                "batch_size": 1,
                **workload,
            },
        },
    )
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    made.start(FAR, "syncer", str(path), "--shard", "0")
    syncer = f"http://{FAR_ADDRESS}:7070"
    if relay:
        here = ("--set", "syncer.host=127.0.0.1", "--upstream", syncer)
        made.start(NEAR, "relay", str(path), "--name", "site-a", *here)
        syncer = f"http://127.0.0.1:7080,{syncer}"
    for index in range(LEARNERS):
        made.start(NEAR, "learner", str(path), "--index", str(index), "--syncer", syncer)
    return config


def finish(made: Link, seconds: float) -> None:
    """Wait until all processes have ended successfully."""
    deadline = time.monotonic() + PATIENCE * seconds
    while any(process.poll() is None for process in made.started):
        assert time.monotonic() < deadline, made.logs()
        time.sleep(0.2)
    assert not any(process.returncode for process in made.started), made.logs()


def records(folder: Path, process: str) -> list[Record]:
    """Return a process's tape."""
    return list(TapeReader(folder / "run" / "tape" / f"{process}.jsonl"))


def step_times(folder: Path, learner: str) -> list[float]:
    """Return the instants at which a learner's steps ended."""
    return [r.at for r in records(folder, learner) if r.type == "StepFinished"]


def merged(folder: Path) -> list[float]:
    """Return the instants at which the shard's rounds ended with a merge."""
    return [
        r.at
        for r in records(folder, "shard-0")
        if r.type == "RoundFinished" and r.data["verdict"] == "merged"
    ]
