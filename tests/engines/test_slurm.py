"""A run on a real Slurm: submitted, disturbed in every way that Slurm has, finished."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.config import dump_config
from decoupled_diloco.engines.launch import Launch, launch_folder
from decoupled_diloco.observe.run_data import LearnerLog
from decoupled_diloco.observe.run_model import read_run
from decoupled_diloco.observe.tape import TapeReader
from engines.small_slurm import cancel_all, missing, one_node_slurm
from process import runs
from process import test_own_script as own_script
from process.runs import config_of
from process.test_log import scalars

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"),
    pytest.mark.xdist_group("slurm"),
]

STEPS = 100_000
"""More than there is time for: `end_soon` ends the run when all has happened."""


@pytest.fixture(scope="module", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_node_slurm(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    yield
    cancel_all()


def ddiloco(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "decoupled_diloco.cli", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def settings(folder: Path, *, steps: int, **where: object) -> Path:
    """A run's file: two learners, for so many steps."""
    path = folder / "small.toml"
    slurm = {"partition": "spot", "syncer_partition": "safe", **where}
    config = config_of(
        folder / "runs/small",
        run={
            "budget_steps": steps,
            "evaluator": True,
            "evaluate_every_seconds": 2.0,
            "log": ("tensorboard",),
        },
        sync={"quorum": 1},
        learner={"checkpoint_every_seconds": 1.0},
        workload={"step_seconds": 0.2},
    )
    told = config.model_dump(mode="json") | {"where": {"engine": "slurm", "slurm": slurm}}
    path.write_text(dump_config(type(config)(**told)))
    return path


until = functools.partial(runs.until, seconds=60.0, every=0.5)
"""Looks now and then, so that those who are waited for have the cores."""


def states(run: Path) -> dict[str, str]:
    return {job.name: job.state for job in Launch(launch_folder(run)).states()}


def learner(run: Path, name: str) -> LearnerLog:
    begun = any(run.glob("tape/*.jsonl"))
    return read_run(run).learners.get(name, LearnerLog(name)) if begun else LearnerLog(name)


def restarts(job: str) -> int:
    shown = subprocess.run(["scontrol", "show", "job", job], capture_output=True, text=True)
    return int(re.findall(r"Restarts=(\d+)", shown.stdout)[0])


def end_soon(run: Path, steps: int) -> int:
    """Lets the syncer's next start read a budget of so many more steps; the budget."""
    budget = read_run(run).global_step + steps
    settings = (run / "run.toml").read_text()
    changed, count = re.subn(r"(?m)^budget_steps = \d+$", f"budget_steps = {budget}", settings)
    assert count == 1
    (run / "run.toml").write_text(changed)
    return budget


def hurry(run: Path) -> None:
    """What was queued again may start now: Slurm lets it wait for two minutes."""
    shown = subprocess.run(
        ["squeue", "--all", "--noheader", "--states=PENDING", "--format=%A"],
        capture_output=True,
        text=True,
    )
    for job in shown.stdout.split():
        subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], capture_output=True)


def test_a_run_survives_what_slurm_does_to_it(tmp_path: Path) -> None:
    run = tmp_path / "runs/small"
    shown = ddiloco("launch", settings(tmp_path, steps=STEPS), "--dry-run")
    assert "#SBATCH --array=0-1" in shown
    assert not run.exists()
    submitted = ddiloco("launch", launch_folder(run))
    syncer, learners = (
        re.findall(rf"{n}: job (\d+)", submitted)[0] for n in ("syncer", "learners")
    )
    until(lambda: learner(run, "learner-1").steps > 20, "learner-1 trains")
    assert "is launched already" in ddiloco("launch", tmp_path / "small.toml", code=2)
    assert "learner-1: job" in ddiloco("status", run)

    killed = [r.value() for r in TapeReader(run) if r.type == "ProcessStarted"]
    os.kill([each.pid for each in killed if each.name == "learner-1"][-1], signal.SIGKILL)
    until(lambda: learner(run, "learner-1").epoch == 2, "it is back, in the same job")
    assert restarts(f"{learners}_1") == 0

    others = ["--partition=safe", "--cpus-per-task=5", "--output=/dev/null", "--wrap=sleep 3"]
    subprocess.run(["sbatch", *others], check=True, capture_output=True)
    until(lambda: "PENDING" in states(run).values(), "a learner makes room")
    gone = [name for name, state in states(run).items() if state == "PENDING"]
    for name in gone:  # Slurm may send both away, where one would do.
        assert learner(run, name).left, "it was told in time to hand in, and said goodbye"
    clock, epochs = read_run(run).global_step, {name: learner(run, name).epoch for name in gone}
    for name, epoch in epochs.items():
        until(lambda n=name, e=epoch: [hurry(run), learner(run, n).epoch > e][1], f"{name} is back")
    until(lambda: read_run(run).global_step > clock, "training goes on")

    until(lambda: learner(run, "learner-0").steps > 0, "learner-0 trains")
    subprocess.run(["scancel", f"{learners}_0"], check=True, capture_output=True)
    until(lambda: learner(run, "learner-0").left, "it hands in and says goodbye")

    steps, budget = learner(run, "learner-1").steps, end_soon(run, 100)
    subprocess.run(["scontrol", "requeue", syncer], check=True, capture_output=True)
    until(lambda: restarts(syncer) == 1, "the syncer makes room")
    until(lambda: learner(run, "learner-1").steps > steps + 20, "training goes on without it")
    until(lambda: [hurry(run), (run / "weights.safetensors").exists()][1], "the run ends")
    until(lambda: not states(run), "all jobs end")
    found = read_run(run, "run")
    assert found.finished
    assert found.evaluations
    logged = scalars(run / "tensorboard")
    assert logged["diloco/run_step"][-1][1] >= budget
    assert {"learner-0/loss", "learner-1/loss", "evaluation/loss"} <= logged.keys()


def test_a_run_is_stopped_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "runs/small"
    file = settings(tmp_path, steps=STEPS)
    ddiloco("launch", file)
    until(lambda: learner(run, "learner-0").steps > 20, "it trains")
    assert "jobs are told to end" in ddiloco("stop", run)
    until(lambda: not states(run), "all jobs end")
    assert learner(run, "learner-0").left
    assert "no job of it" in ddiloco("stop", run)
    step = read_run(run).global_step
    ddiloco("train", run, "--resume", "--set", f"run.budget_steps={step + 40}")
    assert (run / "weights.safetensors").exists()


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ({"partition": "nowhere"}, "invalid partition"),
        ({"directives": ["--cpus-per-task=1000"]}, "Requested node configuration"),
        ({"directives": ["--colour=red"]}, "unrecognized option"),
    ],
)
def test_what_can_never_be_had_is_refused(
    tmp_path: Path, where: dict[str, object], problem: str
) -> None:
    told = ddiloco("launch", settings(tmp_path, steps=10, **where), code=2)
    assert problem in told
    assert told.startswith("error: ")
    assert not launch_folder(tmp_path / "runs/small").exists()


def test_a_users_own_program_is_restarted_and_stopped(tmp_path: Path) -> None:
    run, file = tmp_path / "runs/own", tmp_path / "own.toml"
    slurm = ["where.engine='slurm'", "where.slurm.partition='spot'", "sync.quorum=1"]
    config = own_script.config_of("train", run, f"run.budget_steps={STEPS}", *slurm)
    file.write_text(dump_config(config))
    ddiloco("launch", file)
    names = ("learner-0", "learner-1")
    until(lambda: all(learner(run, name).steps > 20 for name in names), "both programs train")
    for program in own_script.programs(run):
        os.kill(int(program.partition(":")[0]), signal.SIGKILL)
    until(lambda: all(learner(run, name).epoch == 2 for name in names), "both are started again")
    assert all(any((run / "learners" / name).iterdir()) for name in names), "their checkpoints"
    steps = learner(run, "learner-0").steps
    until(lambda: learner(run, "learner-0").steps > steps + 20, "it trains")
    ddiloco("stop", run)
    until(lambda: not states(run), "all jobs end")
    assert all(learner(run, name).left for name in names), "they left in order"
    assert not own_script.programs(run)
