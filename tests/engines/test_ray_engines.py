"""Runs on a real multi-node Ray cluster whose nodes come and go."""

from __future__ import annotations

import fcntl
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import decoupled_diloco as dd
from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.run import SiteSettings
from decoupled_diloco.run_model import FollowedRun, RunModel
from decoupled_diloco.run_model.facts import LearnerLog
from decoupled_diloco_engines import ray as dd_ray
from engines.ray_nodes import Nodes, ray_nodes
from process import own_script, process_runs
from process.process_runs import config_of, kill, relays_of

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning"),  # raised inside Ray Data
]

SECONDS = 240.0
"""Time limit of any step: Ray starts a process in seconds, a busy machine takes longer."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with ray_nodes(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


def config(nodes: Nodes, folder: Path, name: str = "small", **tables: Any) -> RunConfig:
    """Return a run with its shards on nodes of zone "safe" and its learners on zone "spot"."""
    launch = tables.pop("launch", {})
    run = {"name": name, "max_steps": 100_000, **tables.pop("run", {})}
    sync = {"quorum": 1, **tables.pop("sync", {})}
    learner = {
        "checkpoint_interval_seconds": 1.0,
        "flush_seconds": 3.0,
        **tables.pop("learner", {}),
    }
    made = config_of(folder / "runs" / name, run=run, sync=sync, learner=learner, **tables)
    ray = {
        "address": nodes.address,
        "syncer_nodes": {"zone": "safe"},
        "learner_nodes": {"zone": "spot"},
    }
    values = made.model_dump(mode="json", exclude={"launch"})
    return RunConfig(**values, launch={"backend": "ray", "ray": ray, **launch})


@functools.cache
def _followed(run: Path) -> FollowedRun:
    return FollowedRun(run)


def model_of(run: Path) -> RunModel:
    """Return the run so far; each record of the tape is read once."""
    followed = _followed(run)
    followed.poll()
    return followed.run


def log_of(run: Path, name: str) -> LearnerLog:
    return model_of(run).learners.get(name, LearnerLog(name))


def clock(run: Path) -> int:
    return model_of(run).global_step


wait_for = functools.partial(process_runs.until, seconds=60.0, every=0.3)
"""Poll slowly, so that the awaited processes have the cores."""


def ddiloco(*arguments: object) -> str:
    command = [sys.executable, "-m", "decoupled_diloco.cli", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def is_unused(run: Path) -> bool:
    """Whether no shard 0 is running, which would hold this lock."""
    with (run / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def states(run: dd_ray.RayRun) -> dict[str, str]:
    return {each.name: each.state for each in run.status().actors}


def trains(run: Path, name: str, more: int = 10) -> None:
    """Wait until a learner has taken some more steps."""
    steps = log_of(run, name).steps
    wait_for(lambda: log_of(run, name).steps > steps + more, f"{name} trains")


@pytest.mark.long
def test_a_run_continues_while_nodes_come_and_go(nodes: Nodes, tmp_path: Path) -> None:
    file, folder = tmp_path / "small.toml", tmp_path / "runs" / "small"
    file.write_text(dump_config(config(nodes, tmp_path)))
    safe, spot = nodes.add(1, "safe"), nodes.add(1, "spot")
    ddiloco("launch", file)  # the driver has ended
    run = dd_ray.attach("small", address=nodes.address)
    assert run.run_dir == folder
    first, second = "learner-0", "learner-1"
    wait_for(lambda: any(log_of(folder, n).steps > 10 for n in (first, second)), "one trains")
    if log_of(folder, second).steps:
        first, second = second, first
    expected = {"shard-0": "running", first: "running", second: "waiting for a node"}
    wait_for(lambda: states(run) == expected, "the other waits")

    nodes.add(2, "spot")
    wait_for(lambda: log_of(folder, second).steps > 10, "the other starts on a new node")

    nodes.remove(spot)
    trains(folder, second)
    wait_for(lambda: log_of(folder, first).epoch >= 2, "it is back on another node")
    trains(folder, first)

    nodes.remove(safe)
    trains(folder, first, 40)
    before = clock(folder)
    nodes.add(2, "safe")
    wait_for(lambda: clock(folder) > before + 10, "the shard runs on another node and is found")
    assert run.status().run.shards[0].term >= 2
    assert len((folder / "places/shard-0").read_text().split()) >= 2

    with pytest.raises(dd.ConfigError, match=r"already has a run 'small' .*: ddiloco stop"):
        dd_ray.launch(config(nodes, tmp_path / "other"))
    assert run.stop() == 3
    wait_for(lambda: not states(run), "all actors are gone")
    assert log_of(folder, first).left
    with pytest.raises(dd.DilocoError, match="ended without a result"):
        run.wait(timeout=SECONDS)


@pytest.mark.long
def test_users_programs_behind_a_relay_are_restarted_and_stopped(
    nodes: Nodes, tmp_path: Path
) -> None:
    nodes.have("safe", 1, cpus=2)
    nodes.have("spot", 1, cpus=3)
    folder, launch = tmp_path / "own", config(nodes, tmp_path).launch
    own = own_script.config_of("train", folder, "run.max_steps=100_000", "sync.quorum=1")
    site = SiteSettings(name="site-a", learners=(0, 1), nodes={"zone": "spot"})
    run = dd_ray.launch(own.model_copy(update={"launch": launch, "sites": (site,)}))
    names = ("learner-0", "learner-1")
    for name in names:
        trains(folder, name, 20)
    wait_for(lambda: relays_of(folder, "learner-0")[-1] == "site-a", "it has found the relay")
    kill(folder, "relay-site-a")
    wait_for(lambda: relays_of(folder, "learner-0")[-1] == "", "it dials the shards")
    wait_for(lambda: relays_of(folder, "learner-0")[-1] == "site-a", "the relay is back")
    for program in own_script.programs(folder):
        os.kill(int(program.partition(":")[0]), signal.SIGKILL)
    wait_for(lambda: all(log_of(folder, n).epoch == 2 for n in names), "both were restarted")
    trains(folder, "learner-0")
    run.stop()
    wait_for(lambda: not states(run), "all actors are gone")
    assert all(log_of(folder, name).left for name in names), "they left the run properly"
    assert not own_script.programs(folder)


@pytest.mark.long
def test_a_ray_trainer_is_a_learner(nodes: Nodes, tmp_path: Path) -> None:
    """Two processes with DDP, which Ray restarts together when one of them dies."""
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as TrainConfig
    from ray.train.torch import TorchTrainer

    nodes.have("safe", 1, cpus=2)
    nodes.have("spot", 1, cpus=2)
    run = dd_ray.launch(config(nodes, tmp_path, "own", syncer={"shards": 2}), learners=False)

    def loop(options: dict[str, Any]) -> None:
        import os

        import ray.train
        import torch
        from ray.train.torch import prepare_model

        import decoupled_diloco as dd

        rank = ray.train.get_context().get_world_rank()
        model = prepare_model(torch.nn.Linear(64, 64), move_to_device=False)
        optimizer = torch.optim.AdamW(model.parameters())
        with dd.Learner(
            model,
            **dd_ray.connect_args(options["run"], "pair"),
            optimizer=optimizer,
            checkpoint=dd.Checkpointing(options["checkpoint"], interval_seconds=0.5),
            timeouts=dd.Timeouts(flush=5),
        ) as learner:
            for _ in range(80):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if not learner.step(tokens=8):
                    break
                if rank == 1 and learner.incarnation == 1 and learner.steps == 40:
                    os._exit(1)
                time.sleep(0.05)

    TorchTrainer(
        loop,
        train_loop_config={"run": run.run_dir, "checkpoint": tmp_path / "kept"},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=TrainConfig(
            name="pair",
            storage_path=str(tmp_path / "train"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
    assert log_of(run.run_dir, "pair").epoch >= 2
    assert log_of(run.run_dir, "pair").left
    assert clock(run.run_dir) >= 80
    assert run.stop() == 2


@pytest.mark.long
def test_the_hosts_of_a_learner_restart_together(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have("safe", 1)
    nodes.have("spot", 2)
    run = dd_ray.launch(
        config(
            nodes,
            tmp_path,
            "wide",
            run={"learners": 1},
            data={"elastic": False},
            learner={"ranks": 2, "parallelism": "ddp"},
            launch={"learner": {"hosts": 2, "cpus": 2}},
        )
    )
    trains(run.run_dir, "learner-0")
    expected = dict.fromkeys(("shard-0", "learner-0.0", "learner-0.1"), "running")
    wait_for(lambda: states(run) == expected, "all actors are running")
    nodes.remove(nodes.have("spot", 2)[-1])
    nodes.have("spot", 2)
    wait_for(lambda: log_of(run.run_dir, "learner-0").epoch >= 2, "both hosts restart")
    trains(run.run_dir, "learner-0")
    assert run.stop() == 3
    assert log_of(run.run_dir, "learner-0").left


@pytest.mark.long
def test_training_continues_while_the_head_is_away(nodes: Nodes, tmp_path: Path) -> None:
    """Last test, because the cluster does not recover; the run resumes on another cluster."""
    nodes.have("safe", 1)
    nodes.have("spot", 1)
    run = dd_ray.launch(config(nodes, tmp_path, "headless", run={"learners": 1}))
    trains(run.run_dir, "learner-0")
    nodes.lose_head()
    status = run.status()
    assert status.problem.startswith(f"the head of the Ray cluster at {nodes.address} is gone")
    assert not status.actors
    assert status.run.shards[0].clock > 0
    nodes.leave()  # Ray ends a program that stays connected for a minute
    before = clock(run.run_dir)
    trains(run.run_dir, "learner-0", 60)
    assert clock(run.run_dir) > before + 30, "shards and learners need no head"
    shown = ddiloco("status", run.run_dir)
    assert "the state of its jobs is not known: no Ray cluster at address=" in shown
    assert "learner-0" in shown, "from the tape"
    nodes.close()
    wait_for(lambda: is_unused(run.run_dir), "the shard ends with its node")

    nodes.begin()
    nodes.have("safe", 1)
    nodes.have("spot", 1)
    budget = {"learners": 1, "max_steps": clock(run.run_dir) + 40}
    resumed = dd_ray.launch(config(nodes, tmp_path, "headless", run=budget), resume=True)
    assert resumed.wait(timeout=SECONDS).exists()
    assert model_of(run.run_dir).finished
