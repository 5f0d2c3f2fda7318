"""A virtual run of four hundred learners, on the tapes of its shards, as if it were in progress."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decoupled_diloco.tape import TapeWriter
from decoupled_diloco_lab.simulate.protocol_run import ProtocolRun
from decoupled_diloco_lab.simulate.scenario import load_scenario

SECONDS = 24.0
"""Progress of the run."""

SCENARIO = """
learners = [{step_seconds = 1.0, variance = 0.1, count = 400}]
parameters = 1000000

[run]
name = "crowd"
learners = 400
max_steps = 300

[sync]
fragments = 12
sync_every = 24
quorum = 240

[syncer]
shards = 2

[[events]]
at_seconds = 9.0
kind = "kill"
target = "learner-17"
for_seconds = 1000.0

[[events]]
at_seconds = 12.0
kind = "kill"
target = "learner-300"
for_seconds = 5.0
"""


def write_crowd(folder: Path) -> None:
    """Write the run into a folder without tapes of learners, as if all were on other machines."""
    folder.mkdir(parents=True)
    (folder / "scenario.toml").write_text(SCENARIO)
    scenario = load_scenario(folder / "scenario.toml")
    run = ProtocolRun(scenario)
    began, tapes = time.time() - SECONDS, dict[str, TapeWriter]()

    def record(process: str, now: float, event: Any, effects: Sequence[Any]) -> None:
        if process.startswith("shard-"):
            tapes[process].effects(now, tapes[process].event(now, event), effects)

    for shard in range(scenario.config.syncer.shards):
        tapes[f"shard-{shard}"] = TapeWriter(
            folder / "tape",
            f"shard-{shard}",
            {"machine": "shard", "shard": shard, "settings": scenario.config.public()},
            clock=lambda: run.system.now,
            wall=lambda: began + run.system.now,
        )
    run.system.recorders.append(record)
    while run.system.now < SECONDS and run.advance():
        for tape in tapes.values():
            tape.flush()
    for tape in tapes.values():
        tape.close()
    run.close()
