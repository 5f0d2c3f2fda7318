"""A two-machine learner on a real Slurm, with separate networks and host names."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.config import dump_config
from decoupled_diloco.launch.launch_folder import launch_folder
from decoupled_diloco.run_model import read_run
from engines.slurm_runs import (
    LARGE,
    STEPS,
    ddiloco,
    end_soon,
    hurry,
    learner,
    merged,
    restarts,
    states,
    until,
)
from engines.small_slurm import MACHINES, cancel_all, missing, two_node_slurm
from process.process_runs import config_of, kill, relays_of

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is installed"),
    pytest.mark.xdist_group("slurm"),
]


@pytest.fixture(scope="module", autouse=True)
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with two_node_slurm(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.fixture(autouse=True)
def cancel_jobs() -> Iterator[None]:
    yield
    cancel_all()


SLURM = {"backend": "slurm", "slurm": {"partition": "spot", "syncer_partition": "safe"}}


def settings(folder: Path, *, steps: int) -> Path:
    """Return a run's file: one two-rank learner, one rank per machine, in which both ranks sync."""
    config = config_of(
        folder / "runs/small",
        run={"max_steps": steps, "learners": 1, "evaluator": False},
        sync={"quorum": 1, "fragments": 2},
        learner={"checkpoint_interval_seconds": 1.0, "ranks": 2, "sync_ranks": 2},
        data={"elastic": False},
    )
    path = folder / "small.toml"
    values = config.model_dump(mode="json")
    values["workload"]["options"] |= LARGE
    values |= {"launch": SLURM | {"learner": {"hosts": 2}}}
    path.write_text(dump_config(type(config)(**values)))
    return path


def ranks_of(run: Path) -> dict[str, int]:
    """Return the process id of the rank on each machine that has one."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes().decode().split("\0")
            words = (path / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "SLURM_STEP_NUM_TASKS=2" in environment and f"{run}.launch/run.toml" in words:
            space = (path / "ns/net").stat().st_ino
            for name in MACHINES:
                if Path("/run/netns", name).stat().st_ino == space:
                    found[name] = int(path.name)
    return found


def log(run: Path) -> str:
    found = launch_folder(run) / "logs/learner-0.log"
    return found.read_text() if found.exists() else ""


@pytest.mark.long
def test_a_two_machine_learner(tmp_path: Path) -> None:
    run = tmp_path / "runs/small"
    submitted = ddiloco("launch", settings(tmp_path, steps=STEPS))
    job = re.findall(r"learners: job (\d+)", submitted)[0] + "_0"
    until(lambda: learner(run, "learner-0").steps > 20, "it trains: \n" + log(run))
    ranks = ranks_of(run)
    assert ranks.keys() == set(MACHINES)

    os.kill(ranks[MACHINES[1]], signal.SIGKILL)
    until(lambda: learner(run, "learner-0").epoch == 2, "both ranks restart")
    assert restarts(job) == 0
    assert set(ranks_of(run).values()).isdisjoint(ranks.values())
    assert learner(run, "learner-0").steps > 0

    until(lambda: learner(run, "learner-0").steps > 40, "it trains again")
    others = ["--partition=safe", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=7"]
    others += ["--output=/dev/null", "--wrap=srun sleep 3"]
    subprocess.run(["sbatch", *others], check=True, capture_output=True)
    until(lambda: states(run).get("learner-0") == "PENDING", "the learner is preempted")
    assert learner(run, "learner-0").left, "both ranks received SIGTERM in time to flush"
    epoch = learner(run, "learner-0").epoch
    until(lambda: [hurry(run), learner(run, "learner-0").epoch > epoch][1], "it is back")
    count = merged(run)
    until(lambda: merged(run) > count + 4, "both ranks sync")
    end_soon(run, 100)
    syncer = re.findall(r"syncer: job (\d+)", submitted)[0]
    subprocess.run(["scontrol", "requeue", syncer], check=True, capture_output=True)
    until(lambda: restarts(syncer) == 1, "the syncer is requeued")
    count = merged(run)
    until(lambda: [hurry(run), merged(run) > count + 4][1], "both ranks find its new address")
    until(lambda: (run / "weights.safetensors").exists(), "the run ends")
    until(lambda: not states(run), "all jobs end")
    assert read_run(run, "run").finished


@pytest.mark.long
def test_a_relay_on_another_machine_than_the_syncer(tmp_path: Path) -> None:
    """One learner dials the syncer's machine when it loses the relay, the other one has none."""
    run, file, near = tmp_path / "runs/small", tmp_path / "small.toml", MACHINES[1]
    config = config_of(run, run={"max_steps": STEPS}, sync={"quorum": 1}, syncer={"shards": 2})
    site = {"name": "site-a", "learners": [0], "directives": [f"--nodelist={near}"]}
    values = config.model_dump(mode="json") | {"launch": SLURM, "sites": [site]}
    file.write_text(dump_config(type(config)(**values)))
    ddiloco("launch", file)
    until(lambda: relays_of(run, "learner-0")[-1:] == ["site-a"], "it trains through the relay")
    assert (run / "host").read_text().strip() == MACHINES[0]
    assert f"http://{near}:" in (run / "places/relay-site-a").read_text()
    kill(run, "relay-site-a")
    until(lambda: relays_of(run, "learner-0")[-1] == "", "it dials the shards")
    until(lambda: relays_of(run, "learner-0")[-1] == "site-a", "it finds the relay's new port")
    assert len((run / "places/relay-site-a").read_text().split()) == 2
    assert set(relays_of(run, "learner-1")) == {""}
    ddiloco("stop", run)
    until(lambda: not states(run), "all jobs end")
    assert learner(run, "learner-0").left
