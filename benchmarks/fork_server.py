"""With and without a fork server: a run's start, a killed learner's way back, and the memory.

Four learners and a shard on one machine. *Paced* learners leave its cores mostly idle; *hungry*
ones, the quickstart's, together want more cores than there are. Start: seconds until every learner
has finished a step. Then one learner after the other gets SIGKILL: seconds from there to its next
step. Memory: of all processes of the run, what several share counted once (Pss of /proc).

    python benchmarks/fork_server.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evidence import keep, spread

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.files import find_shipped
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.observe.tape import Follower

ESTIMATE = (
    "the pause before a restart is 0.5 s, finding out 0.1 s, joining and the checkpoint 0.3 s; "
    "importing takes 3.5 s of a core. Back, paced: 1.0 s with, 4.5 s without; hungry, five "
    "processes on two cores: 1.5 s with, 10 s without. Start: 5 s with, 10 s without, of either. "
    "Memory: five times 150 MB less, and the server's 100 MB more"
)
STEPS_BETWEEN = 20


class Enough(Exception):
    """All kills are done."""


def config_of(case: str, folder: Path, forked: bool) -> RunConfig:
    run = {"folder": folder, "budget_steps": 10**6, "evaluator": False, "fork_server": forked}
    if case == "paced":
        workload = {"name": "paced", "options": {"step_seconds": 0.25}}
        return RunConfig(run=run, syncer={"port": 0}, workload=workload)
    own = [f"run.{key}={json.dumps(value, default=str)}" for key, value in run.items()]
    own += ["run.evaluate_every_seconds=", "faults="]
    return load_config(find_shipped("recipes", "quickstart"), own)


def run(case: str, forked: bool, kills: int) -> dict[str, Any]:
    load = os.getloadavg()  # what others do on the machine is in it
    found: dict[str, Any] = {"case": case, "forked": forked, "load": load, "kills": []}
    with tempfile.TemporaryDirectory() as name:
        begun = time.time()
        local = LocalRun(config_of(case, Path(name) / "run", forked))
        script = kill_one_by_one(local, found, kills, begun)
        try:
            local.start()
            with contextlib.suppress(Enough):
                local.wait(lambda: next(script))
        finally:
            local.close()
    return found


def kill_one_by_one(
    local: LocalRun, found: dict[str, Any], kills: int, begun: float
) -> Iterator[None]:
    children, steps = local.supervisor.children, Steps(local.path)
    learners = [f"learner-{index}" for index in range(4)]
    while None in (firsts := [steps.first_after(name, begun) for name in learners]):
        yield
    found["start"] = max(first for first in firsts if first is not None) - begun
    for number in range(kills):
        name, clock = learners[number % 4], local.global_step
        while local.global_step < clock + STEPS_BETWEEN:
            yield
        found["bytes"] = sum(map(memory_of, family(os.getpid())))
        process = children[name].process
        assert process is not None
        process.send_signal(signal.SIGKILL)
        killed = time.time()
        while (stepped := steps.first_after(name, killed)) is None:
            yield
        found["kills"].append(stepped - killed)
        print(found, file=sys.stderr, flush=True)
    raise Enough


class Steps:
    """The newest life's first step of each learner, as the tapes grow."""

    def __init__(self, folder: Path) -> None:
        self._tapes = Follower(folder)
        self._first: dict[str, tuple[int, float]] = {}

    def first_after(self, who: str, at: float) -> float | None:
        """When its life after that began to step; ``None``: it has not yet."""
        for record in self._tapes.poll():
            life, _ = self._first.get(record.who, (-1, 0.0))
            if record.type == "StepFinished" and record.life > life:
                self._first[record.who] = (record.life, record.wall)
        _, wall = self._first.get(who, (0, 0.0))
        return wall if wall > at else None


def family(pid: int) -> list[int]:
    """The processes that descend from one."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    children = [int(each) for each in text.split()]
    return children + [each for child in children for each in family(child)]


def memory_of(pid: int) -> int:
    """Bytes that are its own, and its share of those that it has in common with others."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(text.partition("\nPss:")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3)
    arguments = parser.parse_args()
    raw = []
    for number in range(arguments.starts):
        for case in ("paced", "hungry"):
            for forked in (False, True):
                raw.append(run(case, forked, 0 if number else arguments.kills))
    result: dict[str, Any] = {}
    for case in ("paced", "hungry"):
        for forked in (False, True):
            title = f"{case}, {'with' if forked else 'without'} a fork server"
            runs = [each for each in raw if (each["case"], each["forked"]) == (case, forked)]
            result[f"{title}: s from start to steps"] = spread([each["start"] for each in runs])
            result[f"{title}: s from kill to step"] = spread(runs[0]["kills"])
            result[f"{title}: MB of all processes"] = round(runs[0]["bytes"] / 1e6)
    keep(
        "fork_server",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="CUDA, whose initialisation comes on top for either; large checkpoints",
    )


if __name__ == "__main__":
    main()
