"""Runs on a small Slurm cluster, and queries of their tapes."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

from decoupled_diloco.launch.launch_folder import Launch, launch_folder
from decoupled_diloco.run_model import read_run
from decoupled_diloco.run_model.facts import LearnerLog
from decoupled_diloco.tape import TapeReader
from process import process_runs

STEPS = 100_000
"""More steps than there is time for: `end_soon` ends the run after all events of a test."""


def ddiloco(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "decoupled_diloco.cli", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


until = functools.partial(process_runs.until, seconds=60.0, every=0.5)
"""Poll slowly, so that the awaited processes have the cores."""


def states(run: Path) -> dict[str, str]:
    return {job.name: job.state for job in Launch(launch_folder(run)).states()}


def learner(run: Path, name: str) -> LearnerLog:
    begun = any(run.glob("tape/*.jsonl"))
    return read_run(run).learners.get(name, LearnerLog(name)) if begun else LearnerLog(name)


def restarts(job: str) -> int:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    return int(re.findall(r"Restarts=(\d+)", shown.stdout)[0])


def end_soon(run: Path, steps: int) -> int:
    """Set the budget for the syncer's next start to `steps` more steps; return the budget."""
    budget = read_run(run).global_step + steps
    settings = (run / "run.toml").read_text()
    changed, count = re.subn(r"(?m)^max_steps = \d+$", f"max_steps = {budget}", settings)
    assert count == 1
    (run / "run.toml").write_text(changed)
    return budget


def hurry(run: Path) -> None:
    """Start requeued jobs now; Slurm would wait for two minutes."""
    shown = subprocess.run(
        ["squeue", "--all", "--noheader", "--states=PENDING", "--format=%A"],
        capture_output=True,
        text=True,
    )
    for job in shown.stdout.split():
        subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], capture_output=True)


LARGE = {"layers": 2, "width": 128}
"""Large enough that each of two sync ranks has a part of every fragment."""


def merged(run: Path) -> int:
    """Return the number of rounds in which the learner's values were merged."""
    if not any(run.glob("tape/*.jsonl")):
        return 0
    return sum(record.type == "Fold" for record in TapeReader(run))
