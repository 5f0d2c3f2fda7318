"""A run on a real Slurm: submitted, disturbed in every way that Slurm has, finished."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import dump_config
from decoupled_diloco.launch.launch_folder import launch_folder
from decoupled_diloco.run_model import read_run
from engines.slurm_runs import (
    STEPS,
    ddiloco,
    end_soon,
    hurry,
    learner,
    restarts,
    states,
    until,
)
from engines.small_slurm import cancel_all, missing, one_node_slurm
from process import own_script
from process.process_runs import config_of, kill, relays_of, scalars

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is installed"),
    pytest.mark.xdist_group("slurm"),
]


@pytest.fixture(scope="module", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with one_node_slurm(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.fixture(autouse=True)
def cancel_jobs() -> Iterator[None]:
    yield
    cancel_all()


def settings(folder: Path, *, steps: int, sites: Sequence[Any] = (), **where: object) -> Path:
    """Return a run's file: two learners, this number of steps."""
    path = folder / "small.toml"
    slurm = {"partition": "spot", "syncer_partition": "safe", **where}
    config = config_of(
        folder / "runs/small",
        run={
            "max_steps": steps,
            "evaluator": True,
            "evaluate_interval_seconds": 2.0,
            "trackers": ("tensorboard",),
        },
        sync={"quorum": 1},
        learner={"checkpoint_interval_seconds": 1.0},
        workload={"step_seconds": 0.2},
    )
    values = config.model_dump(mode="json") | {"launch": {"backend": "slurm", "slurm": slurm}}
    values["sites"] = sites
    path.write_text(dump_config(type(config)(**values)))
    return path


@pytest.mark.long
def test_a_run_survives_kills_preemptions_and_requeues(tmp_path: Path) -> None:
    run = tmp_path / "runs/small"
    shown = ddiloco("launch", settings(tmp_path, steps=STEPS), "--dry-run")
    assert "#SBATCH --array=0-1" in shown
    assert not run.exists()
    submitted = ddiloco("launch", launch_folder(run))
    syncer, learners = (
        re.findall(rf"{n}: job (\d+)", submitted)[0] for n in ("syncer", "learners")
    )
    until(lambda: learner(run, "learner-1").steps > 20, "learner-1 trains")
    assert "is already launched" in ddiloco("launch", tmp_path / "small.toml", code=2)
    assert "learner-1: job" in ddiloco("status", run)

    kill(run, "learner-1")
    until(lambda: learner(run, "learner-1").epoch == 2, "it is back, in the same job")
    assert restarts(f"{learners}_1") == 0

    others = ["--partition=safe", "--cpus-per-task=5", "--output=/dev/null", "--wrap=sleep 3"]
    subprocess.run(["sbatch", *others], check=True, capture_output=True)
    until(lambda: "PENDING" in states(run).values(), "a learner is preempted")
    gone = [name for name, state in states(run).items() if state == "PENDING"]
    for name in gone:  # Slurm may preempt both learners, although one would be enough
        assert learner(run, name).left, "it received SIGTERM in time to flush and leave"
    clock, epochs = read_run(run).global_step, {name: learner(run, name).epoch for name in gone}
    for name, epoch in epochs.items():
        until(lambda n=name, e=epoch: [hurry(run), learner(run, n).epoch > e][1], f"{name} is back")
    until(lambda: read_run(run).global_step > clock, "training continues")

    until(lambda: learner(run, "learner-0").steps > 0, "learner-0 trains")
    subprocess.run(["scancel", f"{learners}_0"], check=True, capture_output=True)
    until(lambda: learner(run, "learner-0").left, "it flushes and leaves")

    steps, budget = learner(run, "learner-1").steps, end_soon(run, 100)
    subprocess.run(["scontrol", "requeue", syncer], check=True, capture_output=True)
    until(lambda: restarts(syncer) == 1, "the syncer is requeued")
    until(lambda: learner(run, "learner-1").steps > steps + 20, "training continues without it")
    until(lambda: [hurry(run), (run / "weights.safetensors").exists()][1], "the run ends")
    until(lambda: not states(run), "all jobs end")
    found = read_run(run, "run")
    assert found.finished
    assert found.evaluations
    logged = scalars(run / "tensorboard")
    assert logged["diloco/run_step"][-1][1] >= budget
    assert {"learner-0/loss", "learner-1/loss", "evaluation/loss"} <= logged.keys()


def test_a_run_with_a_relay_is_stopped_and_resumed(tmp_path: Path) -> None:
    run = tmp_path / "runs/small"
    site = {"name": "site-a", "learners": [0, 1], "directives": ["--comment=near"]}
    file = settings(tmp_path, steps=STEPS, sites=[site])
    ddiloco("launch", file)
    until(lambda: learner(run, "learner-0").steps > 20, "it trains")
    until(lambda: relays_of(run, "learner-0")[-1] == "site-a", "through the relay")
    kill(run, "relay-site-a")
    until(lambda: relays_of(run, "learner-0")[-1] == "", "it dials the shards")
    until(lambda: relays_of(run, "learner-0")[-1] == "site-a", "the relay is back, in its job")
    assert "jobs to stop" in ddiloco("stop", run)
    until(lambda: not states(run), "all jobs end")
    assert learner(run, "learner-0").left
    assert "has no job any more" in ddiloco("stop", run)
    step = read_run(run).global_step
    ddiloco("train", run, "--resume", "--set", f"run.max_steps={step + 40}")
    assert (run / "weights.safetensors").exists()


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ({"partition": "nowhere"}, "invalid partition"),
        ({"directives": ["--cpus-per-task=1000"]}, "Requested node configuration"),
        ({"directives": ["--colour=red"]}, "unrecognized option"),
    ],
)
def test_jobs_that_slurm_rejects_are_reported(
    tmp_path: Path, where: dict[str, object], problem: str
) -> None:
    output = ddiloco("launch", settings(tmp_path, steps=10, **where), code=2)
    assert problem in output
    assert output.startswith("error: ")
    assert not launch_folder(tmp_path / "runs/small").exists()


@pytest.mark.long
def test_a_users_program_is_restarted_and_stopped(tmp_path: Path) -> None:
    run, file = tmp_path / "runs/own", tmp_path / "own.toml"
    slurm = ["launch.backend='slurm'", "launch.slurm.partition='spot'", "sync.quorum=1"]
    config = own_script.config_of("train", run, f"run.max_steps={STEPS}", *slurm)
    file.write_text(dump_config(config))
    ddiloco("launch", file)
    names = ("learner-0", "learner-1")
    until(lambda: all(learner(run, name).steps > 20 for name in names), "both programs train")
    for program in own_script.programs(run):
        os.kill(int(program.partition(":")[0]), signal.SIGKILL)
    until(lambda: all(learner(run, name).epoch == 2 for name in names), "both were restarted")
    assert all(any((run / "learners" / name).iterdir()) for name in names), "their checkpoints"
    steps = learner(run, "learner-0").steps
    until(lambda: learner(run, "learner-0").steps > steps + 20, "it trains")
    ddiloco("stop", run)
    until(lambda: not states(run), "all jobs end")
    assert all(learner(run, name).left for name in names), "they left the run properly"
    assert not own_script.programs(run)
