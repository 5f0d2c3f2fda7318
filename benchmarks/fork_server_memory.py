"""Start and restart times and memory of a run, with and without a fork server.

Four learners and a shard on one machine. *Paced* learners leave its cores mostly idle. *Hungry*
ones, the quickstart's, together need more cores than there are. Start: seconds until every learner
has finished a step. Restart: one learner after the other receives SIGKILL; seconds until its next
step. Memory: all processes of the run, with shared pages counted once (Pss of /proc).

    python benchmarks/fork_server_memory.py
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from bench_runs import carry_out
from evidence import keep, options, spread

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.toml_files import RECIPES
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.tape import Follower

STEPS_BETWEEN = 20


def config_of(case: str, folder: Path, forked: bool) -> RunConfig:
    run = {"folder": folder, "max_steps": 10**6, "evaluator": False, "fork_server": forked}
    if case == "paced":
        workload = {"name": "paced", "options": {"step_seconds": 0.25}}
        return RunConfig(run=run, syncer={"port": 0}, workload=workload)
    own = [f"run.{key}={json.dumps(value, default=str)}" for key, value in run.items()]
    own += ["run.evaluate_interval_seconds=", "faults="]
    return load_config(RECIPES.find("quickstart"), own)


def run(case: str, forked: bool, kills: int) -> dict[str, Any]:
    load = os.getloadavg()  # includes other work on the machine
    found: dict[str, Any] = {"case": case, "forked": forked, "load": load, "kills": []}
    begun = time.time()

    def kill_one_by_one(run: LocalRun) -> Iterator[None]:
        children, steps = run.supervisor.children, Steps(run.path)
        learners = [f"learner-{index}" for index in range(4)]
        while None in (firsts := [steps.first_after(name, begun) for name in learners]):
            yield
        found["start"] = max(first for first in firsts if first is not None) - begun
        for number in range(kills):
            name, clock = learners[number % 4], run.global_step
            while run.global_step < clock + STEPS_BETWEEN:
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

    with tempfile.TemporaryDirectory() as name:
        carry_out(config_of(case, Path(name) / "run", forked), kill_one_by_one)
    return found


class Steps:
    """First step of each learner's newest incarnation, read from the growing tapes."""

    def __init__(self, folder: Path) -> None:
        self._tapes = Follower(folder)
        self._first: dict[str, tuple[int, float]] = {}

    def first_after(self, process: str, at: float) -> float | None:
        """Return when its incarnation after that time first stepped; ``None`` if it has not."""
        for record in self._tapes.poll():
            life, _ = self._first.get(record.process, (-1, 0.0))
            if record.type == "StepFinished" and record.life > life:
                self._first[record.process] = (record.life, record.wall)
        _, wall = self._first.get(process, (0, 0.0))
        return wall if wall > at else None


def family(pid: int) -> list[int]:
    """Return the descendants of a process."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    children = [int(each) for each in text.split()]
    return children + [each for child in children for each in family(child)]


def memory_of(pid: int) -> int:
    """Return the private bytes of a process, and its share of shared pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(text.partition("\nPss:")[2].split()[0])


def main() -> None:
    arguments = options(kills=5, starts=3)
    cases = list(product(("paced", "CPU-bound"), (False, True)))
    raw = [
        run(*case, 0 if number else arguments.kills)
        for number in range(arguments.starts)
        for case in cases
    ]
    result: dict[str, Any] = {}
    for case, forked in cases:
        title = f"{case}, {'with' if forked else 'without'} a fork server"
        runs = [each for each in raw if (each["case"], each["forked"]) == (case, forked)]
        result[f"{title}: seconds from start to first steps"] = spread(
            each["start"] for each in runs
        )
        result[f"{title}: seconds from kill to next step"] = spread(runs[0]["kills"])
        result[f"{title}: MB used by all processes"] = round(runs[0]["bytes"] / 1e6)
    keep("fork_server", config=vars(arguments), raw=raw, result=result)


if __name__ == "__main__":
    main()
