"""Runs on a real Ray of several nodes, which come and go."""

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
from decoupled_diloco.observe.following import FollowedRun
from decoupled_diloco.observe.run_data import LearnerLog
from decoupled_diloco.observe.run_model import RunModel
from engines.ray_nodes import Nodes, ray_nodes
from process import runs
from process import test_own_script as own_script
from process.runs import config_of

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore:`use_:DeprecationWarning"),  # Ray Data's own use of it
]

SECONDS = 240.0
"""How long anything may take: Ray starts a process in seconds, a busy machine in more."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with ray_nodes(tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


def config(nodes: Nodes, folder: Path, name: str = "small", **tables: Any) -> RunConfig:
    """A run whose shards stay on nodes of the zone "safe", and its learners on those of "spot"."""
    where = tables.pop("where", {})
    run = {"name": name, "budget_steps": 100_000, **tables.pop("run", {})}
    sync = {"quorum": 1, **tables.pop("sync", {})}
    learner = {"checkpoint_every_seconds": 1.0, "hand_in_seconds": 3.0, **tables.pop("learner", {})}
    made = config_of(folder / "runs" / name, run=run, sync=sync, learner=learner, **tables)
    ray = {
        "address": nodes.address,
        "syncer_nodes": {"zone": "safe"},
        "learner_nodes": {"zone": "spot"},
    }
    told = made.model_dump(mode="json", exclude={"where"})
    return RunConfig(**told, where={"engine": "ray", "ray": ray, **where})


@functools.cache
def _followed(run: Path) -> FollowedRun:
    return FollowedRun(run)


def model_of(run: Path) -> RunModel:
    """What has happened by now; each record of the tape is read once."""
    followed = _followed(run)
    followed.poll()
    return followed.run


def log_of(run: Path, name: str) -> LearnerLog:
    return model_of(run).learners.get(name, LearnerLog(name))


def clock(run: Path) -> int:
    return model_of(run).global_step


wait_for = functools.partial(runs.until, seconds=60.0, every=0.3)
"""Looks a few times a second, so that those who are waited for have the cores."""


def ddiloco(*arguments: object) -> str:
    command = [sys.executable, "-m", "decoupled_diloco.cli", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def is_unused(run: Path) -> bool:
    """Whether no shard 0 lives, which would hold this lock."""
    with (run / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def states(run: dd.ray.RayRun) -> dict[str, str]:
    return {each.name: each.state for each in run.status().actors}


def trains(run: Path, name: str, more: int = 10) -> None:
    """Returns once a learner has made some more steps."""
    steps = log_of(run, name).steps
    wait_for(lambda: log_of(run, name).steps > steps + more, f"{name} trains")


def test_a_run_goes_on_while_nodes_come_and_go(nodes: Nodes, tmp_path: Path) -> None:
    file, folder = tmp_path / "small.toml", tmp_path / "runs" / "small"
    file.write_text(dump_config(config(nodes, tmp_path)))
    safe, spot = nodes.add(1, "safe"), nodes.add(1, "spot")
    ddiloco("launch", file)  # and the driver is gone
    run = dd.ray.attach("small", address=nodes.address)
    assert run.folder == folder
    first, second = "learner-0", "learner-1"
    wait_for(lambda: any(log_of(folder, n).steps > 10 for n in (first, second)), "one trains")
    if log_of(folder, second).steps:
        first, second = second, first
    expected = {"shard-0": "running", first: "running", second: "waits for a node"}
    wait_for(lambda: states(run) == expected, "the other waits")

    nodes.add(2, "spot")
    wait_for(lambda: log_of(folder, second).steps > 10, "the other starts on a node that has come")

    nodes.remove(spot)
    trains(folder, second)
    wait_for(lambda: log_of(folder, first).epoch >= 2, "it is back, on another node")
    trains(folder, first)

    nodes.remove(safe)
    trains(folder, first, 40)
    before = clock(folder)
    nodes.add(2, "safe")
    wait_for(lambda: clock(folder) > before + 10, "the shard goes on elsewhere, and is found")
    assert run.status().run.shards[0].term >= 2
    assert len((folder / "places/shard-0").read_text().split()) >= 2

    with pytest.raises(dd.ConfigError, match=r"has a run 'small' already .*: ddiloco stop"):
        dd.ray.run(config(nodes, tmp_path / "other"))
    assert run.stop() == 3
    wait_for(lambda: not states(run), "all actors are gone")
    assert log_of(folder, first).left
    with pytest.raises(dd.Error, match="has ended without a result"):
        run.wait(timeout=SECONDS)


def test_a_users_own_program_is_restarted_and_stopped(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have("safe", 1, cpus=2)
    nodes.have("spot", 1, cpus=2)
    folder, where = tmp_path / "own", config(nodes, tmp_path).where
    own = own_script.config_of("train", folder, "run.budget_steps=100_000", "sync.quorum=1")
    run = dd.ray.run(own.model_copy(update={"where": where}))
    names = ("learner-0", "learner-1")
    for name in names:
        trains(folder, name, 20)
    for program in own_script.programs(folder):
        os.kill(int(program.partition(":")[0]), signal.SIGKILL)
    wait_for(lambda: all(log_of(folder, n).epoch == 2 for n in names), "both are started again")
    trains(folder, "learner-0")
    run.stop()
    wait_for(lambda: not states(run), "all actors are gone")
    assert all(log_of(folder, name).left for name in names), "they left in order"
    assert not own_script.programs(folder)


def test_a_trainer_of_ray_is_a_learner(nodes: Nodes, tmp_path: Path) -> None:
    """Two processes with DDP, which Ray starts again together when one of them dies."""
    from ray.train import FailureConfig, ScalingConfig
    from ray.train import RunConfig as TrainConfig
    from ray.train.torch import TorchTrainer

    nodes.have("safe", 1, cpus=2)
    nodes.have("spot", 1, cpus=2)
    run = dd.ray.run(config(nodes, tmp_path, "own", syncer={"shards": 2}), learners=False)

    def loop(told: dict[str, Any]) -> None:
        import os

        import ray.train
        import torch
        from ray.train.torch import prepare_model

        import decoupled_diloco as dd

        rank = ray.train.get_context().get_world_rank()
        model = prepare_model(torch.nn.Linear(64, 64), move_to_device=False)
        optimizer = torch.optim.AdamW(model.parameters())
        way = dd.ray.way_to(told["run"], "pair")
        kept = {"checkpoint": told["kept"], "checkpoint_every_seconds": 0.5}
        with dd.Learner(model, **way, optimizer=optimizer, hand_in_seconds=5, **kept) as learner:
            for _ in range(80):
                model(torch.randn(8, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if not learner.step(tokens=8):
                    break
                if rank == 1 and learner.epoch == 1 and learner.steps == 40:
                    os._exit(1)
                time.sleep(0.05)

    TorchTrainer(
        loop,
        train_loop_config={"run": run.folder, "kept": tmp_path / "kept"},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=TrainConfig(
            name="pair",
            storage_path=str(tmp_path / "train"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()
    assert log_of(run.folder, "pair").epoch >= 2
    assert log_of(run.folder, "pair").left
    assert clock(run.folder) >= 80
    assert run.stop() == 2


@pytest.mark.long
def test_the_hosts_of_a_learner_begin_again_together(nodes: Nodes, tmp_path: Path) -> None:
    nodes.have("safe", 1)
    nodes.have("spot", 2)
    run = dd.ray.run(
        config(
            nodes,
            tmp_path,
            "wide",
            run={"learners": 1},
            data={"leases": False},
            learner={"ranks": 2, "parallelism": "ddp"},
            where={"learner": {"hosts": 2, "cpus": 2}},
        )
    )
    trains(run.folder, "learner-0")
    expected = dict.fromkeys(("shard-0", "learner-0.0", "learner-0.1"), "running")
    wait_for(lambda: states(run) == expected, "all say that they run")
    nodes.remove(nodes.have("spot", 2)[-1])
    nodes.have("spot", 2)
    wait_for(lambda: log_of(run.folder, "learner-0").epoch >= 2, "both hosts begin again")
    trains(run.folder, "learner-0")
    assert run.stop() == 3
    assert log_of(run.folder, "learner-0").left


def test_training_goes_on_while_the_head_is_away(nodes: Nodes, tmp_path: Path) -> None:
    """Last, since the cluster does not come back from this; on another one the run goes on."""
    nodes.have("safe", 1)
    nodes.have("spot", 1)
    run = dd.ray.run(config(nodes, tmp_path, "headless", run={"learners": 1}))
    trains(run.folder, "learner-0")
    nodes.lose_head()
    told = run.status()
    assert told.problem.startswith(f"the head of the Ray cluster at {nodes.address} is gone")
    assert not told.actors
    assert told.run.shards[0].clock > 0
    nodes.leave()  # Ray ends a program that stays connected for a minute
    before = clock(run.folder)
    trains(run.folder, "learner-0", 60)
    assert clock(run.folder) > before + 30, "shards and learners need no head"
    shown = ddiloco("status", run.folder)
    assert "its jobs are not known: there is no Ray cluster at address=" in shown
    assert "learner-0" in shown, "the tape tells"
    nodes.close()
    wait_for(lambda: is_unused(run.folder), "the shard ends with its node")

    nodes.begin()
    nodes.have("safe", 1)
    nodes.have("spot", 1)
    budget = {"learners": 1, "budget_steps": clock(run.folder) + 40}
    resumed = dd.ray.run(config(nodes, tmp_path, "headless", run=budget), resume=True)
    assert resumed.wait(timeout=SECONDS).exists()
    assert model_of(run.folder).finished
