"""A learner is killed, with and without a spare process: seconds from the kill to its next step.

Four learners and a shard on one machine. *Paced* learners leave its cores mostly idle; *hungry*
ones, the quickstart's, together want more cores than there are. One learner after
the other gets SIGKILL, once the spare (if there is one) is ready. What the spare takes of memory is
read from /proc: in all, and its own without what it shares with the others.

    python benchmarks/spare.py
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
    "importing takes 2.5 s of a core. Paced: 1.0 s with the spare, 3.5 s without. Hungry, six "
    "processes on two cores: 2.5 s with, 10 s without. Memory: 250 MB in all, 150 MB its own"
)
STEPS_BETWEEN = 20


class Enough(Exception):
    """All kills are done."""


def config_of(case: str, folder: Path, spare: bool) -> RunConfig:
    run = {"folder": folder, "budget_steps": 10**6, "evaluator": False, "spare": spare}
    if case == "paced":
        workload = {"name": "paced", "options": {"step_seconds": 0.25}}
        return RunConfig(run=run, syncer={"port": 0}, workload=workload)
    own = [f"run.{key}={json.dumps(value, default=str)}" for key, value in run.items()]
    own += ["run.evaluate_every_seconds=", "faults="]
    return load_config(find_shipped("recipes", "quickstart"), own)


def run(case: str, spare: bool, kills: int) -> dict[str, Any]:
    load = os.getloadavg()  # what others do on the machine is in it
    found: dict[str, Any] = {"case": case, "spare": spare, "load": load, "kills": []}
    with tempfile.TemporaryDirectory() as name:
        local = LocalRun(config_of(case, Path(name) / "run", spare))
        script = kill_one_by_one(local, found, kills)
        try:
            local.start()
            with contextlib.suppress(Enough):
                local.wait(lambda: next(script))
        finally:
            local.close()
    return found


def kill_one_by_one(local: LocalRun, found: dict[str, Any], kills: int) -> Iterator[None]:
    children, spare = local.supervisor.children, local.supervisor.spare
    steps = Steps(local.path)
    while local.global_step < STEPS_BETWEEN:
        yield
    for number in range(kills):
        name = f"learner-{number % 4}"
        waited = time.time()
        while spare is not None and spare.pid is None:
            yield
        ready, clock = time.time(), local.global_step
        if spare is not None:
            found["memory"] = memory_of(spare.pid)
        while local.global_step < clock + STEPS_BETWEEN:
            yield
        process = children[name].process
        assert process is not None
        process.send_signal(signal.SIGKILL)
        killed = time.time()
        while (stepped := steps.first_after(name, killed)) is None:
            yield
        row = {"who": name, "seconds": stepped - killed, "spare_ready_after": ready - waited}
        print(found["case"], "spare" if spare else "none", row, file=sys.stderr, flush=True)
        found["kills"].append(row)
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


def memory_of(pid: int | None) -> dict[str, int]:
    """Bytes: resident, and its own alone."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    sizes = {key: 1024 * int(rest.split()[0]) for key, _, rest in (x.partition(":") for x in lines)}
    return {"resident": sizes["Rss"], "own": sizes["Private_Clean"] + sizes["Private_Dirty"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    cases = [(case, spare) for case in ("paced", "hungry") for spare in (False, True)]
    raw = [run(case, spare, arguments.kills) for case, spare in cases]
    result: dict[str, Any] = {}
    for each in raw:
        case = f"{each['case']}, {'with' if each['spare'] else 'without'} a spare"
        kills = each["kills"]
        result[f"{case}: s from kill to step"] = spread([row["seconds"] for row in kills])
        if each["spare"]:
            ready = [row["spare_ready_after"] for row in kills[1:]]
            result[f"{case}: s until the next one is ready"] = spread(ready)
            for kind, nbytes in each["memory"].items():
                result[f"{case}: MB, {kind}"] = round(nbytes / 1e6)
    keep(
        "spare",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="CUDA, whose initialisation comes on top for either; large checkpoints",
    )


if __name__ == "__main__":
    main()
