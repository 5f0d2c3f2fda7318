"""Settings that Ray cannot place are rejected before a cluster is contacted, in one sentence."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, dump_config, load_config
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.engine import SETTINGS
from decoupled_diloco.launch.launch_folder import launch_folder, write_launch
from decoupled_diloco.launch.processes import LOGGER
from decoupled_diloco_engines import ray as dd_ray
from decoupled_diloco_engines import ray_cluster
from decoupled_diloco_engines.ray_plan import PLAN, RayPlan, plan_of, read_plan


def config(folder: Path = Path("runs/big"), **tables: Any) -> RunConfig:
    launch = {"backend": "ray", **tables.pop("launch", {})}
    run: dict[str, Any] = {"name": "big", "folder": folder, "learners": 2, "max_steps": 100}
    run.update(tables.pop("run", {}))
    return RunConfig(run=run, launch=launch, **tables)


def plan(**tables: Any) -> RayPlan:
    return plan_of(config(**tables), Path("/shared/big.launch"))


def test_a_plan_has_an_actor_per_host_with_its_resources() -> None:
    made = plan(
        run={"learners": 1, "evaluator": True},
        syncer={"shards": 2},
        data={"elastic": False},
        learner={"ranks": 4},
        launch={
            "syncer": {"cpus": 4, "memory": "2GiB"},
            "learner": {"cpus": 6, "gpus": 4, "hosts": 2},
            "ray": {"learner_nodes": {"ray.io/market-type": "spot"}},
        },
    )
    assert [part.name for part in made.actors] == ["shard-0", "shard-1", "evaluator"]
    assert made.actors[0].bundles == ({"CPU": 4, "memory": 2 * 2**30},)
    (learner,) = made.placement_groups
    assert learner.actors == ("learner-0.0", "learner-0.1")
    assert learner.bundles == ({"CPU": 3, "GPU": 2},) * 2
    assert learner.labels == {"ray.io/market-type": "spot"}
    assert "--nproc-per-node=2" in learner.commands["learner-0"].arguments
    assert RayPlan(**json.loads(made.to_json())) == made


def test_a_site_gets_a_relay_on_the_nodes_of_its_learners() -> None:
    made = plan(
        run={"learners": 2, "evaluator": False},
        launch={"ray": {"learner_nodes": {"market": "spot"}}},
        sites=[{"name": "site-a", "learners": [1], "nodes": {"zone": "a"}}],
    )
    assert [part.name for part in made.actors] == ["shard-0", "relay-site-a"]
    labels = {part.name: part.labels for part in made.parts}
    assert labels["relay-site-a"] == labels["learner-1"] == {"market": "spot", "zone": "a"}
    assert labels["learner-0"] == {"market": "spot"}
    words = " ".join(made.actors[1].commands["relay-site-a"].arguments)
    assert "--name site-a --port 0 --host {host} --upstream" in words


def test_one_process_logs_the_run() -> None:
    made = plan(run={"learners": 1, "trackers": ("tensorboard",)}, syncer={"shards": 2})
    loggers = [part.name for part in made.actors if LOGGER in part.commands]
    assert loggers == ["shard-0"]
    for shard in made.actors[:2]:
        arguments = shard.commands[shard.name].arguments
        assert arguments[-2:] == ("--set", "run.trackers=[]"), (
            "otherwise shard 0 starts another logger"
        )


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"syncer": {"standby": True}}, r"standby=true in \[syncer\] .*: leave standby out"),
        (
            {"syncer": {"addresses": ("http://a:7070",)}},
            r"addresses=.* would be ignored, because .*: leave addresses out",
        ),
        (
            {"learner": {"max_preemptions": 3}},
            r"max_preemptions=3 in \[learner\] would be ignored, .*: leave max_preemptions out",
        ),
        ({"launch": {"setup": ("module load cuda",)}}, r"setup=.* would be ignored, .*: leave"),
        (
            {
                "data": {"elastic": False},
                "learner": {"ranks": 2},
                "launch": {"learner": {"gpus": 3, "hosts": 2}},
            },
            r"gpus=3 in \[launch.learner\] .* hosts=2: change one of them",
        ),
    ],
)
def test_settings_that_cannot_be_combined_with_ray(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**tables)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"is not valid JSON \(.*\): correct it, or write it again"),
        ("\xff", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "is not a JSON object: write it again"),
        ('{"run": "big"}', "namespace"),
        ('{"runs": "big"}', "runs"),
    ],
)
def test_a_plan_that_was_edited_wrongly(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / PLAN).write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=words):
        read_plan(tmp_path)


def test_a_launch_folder_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"ray\.json cannot be read: No such file"):
        read_plan(tmp_path)


def test_without_ray_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"Ray: run pip install -e 'packages/engines\[ray\]'"):
        dd_ray.launch(config())


def test_a_too_old_ray_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.__version__", "2.9.3")
    with pytest.raises(ConfigError, match=r"Ray 2\.9\.3 is older than 2\.50: pip install"):
        dd_ray.launch(config())


def test_the_oldest_ray_matches_the_extra() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    oldest = ".".join(map(str, ray_cluster.OLDEST))
    assert set(re.findall(r'"ray\[train\]>=([0-9.]+)"', text)) == {oldest}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return "{}:{}".format(*probe.getsockname())


def test_a_cluster_that_does_not_exist() -> None:
    address = free_address()
    with pytest.raises(ConfigError, match=rf"no Ray cluster at address='{address}' .*refused"):
        dd_ray.launch(config(launch={"ray": {"address": address}}))
    with pytest.raises(ConfigError, match=r"no Ray cluster at address='127.0.0.1:99999' "):
        dd_ray.launch(config(launch={"ray": {"address": "127.0.0.1:99999"}}))
    with pytest.raises(ConfigError, match=r"is a Ray Client address, .*: run the command"):
        dd_ray.attach("big", address="ray://10.0.0.1:10001")


def test_a_local_cluster_whose_head_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start` has written the address, and Ray would retry for minutes."""
    address = free_address()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(address)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=rf"no Ray cluster at address='{address}' "):
        dd_ray.launch(config())
    other = free_address()
    monkeypatch.setenv("RAY_ADDRESS", other)
    with pytest.raises(ConfigError, match=rf"no Ray cluster at address='{other}' "):
        dd_ray.launch(config())


def test_runs_that_are_not_on_ray(tmp_path: Path) -> None:
    local = config(launch={"backend": "local"})
    with pytest.raises(ConfigError, match=r"backend='local' in \[launch\] is not Ray: set backend"):
        dd_ray.launch(local)
    with pytest.raises(ConfigError, match=r"overrides=.* apply .*TOML file.*: change"):
        dd_ray.launch(config(), {"run.learners": 3})
    with pytest.raises(ConfigError, match=r"was not launched .*: give the run folder"):
        dd_ray.attach(tmp_path)
    with pytest.raises(ConfigError, match="is not a launch folder"):
        dd_ray.connect_args(tmp_path, "mine")


def test_slurm_cannot_resume_a_run(tmp_path: Path) -> None:
    made = config(tmp_path / "big", launch={"backend": "slurm"})
    with pytest.raises(ConfigError, match="resume"):
        write_launch(made).submit(resume=True)


def test_a_launch_removes_files_of_another_engine(tmp_path: Path) -> None:
    run = tmp_path / "big"
    folder = write_launch(config(run, launch={"backend": "slurm"})).folder
    assert list(folder.glob("*.sbatch"))
    write_launch(config(run))
    assert {path.name for path in folder.iterdir()} == {PLAN, SETTINGS, "token"}
    assert load_config(folder / SETTINGS).launch.backend == "ray"
    assert folder == launch_folder(run)
    assert 'backend = "ray"' in dump_config(config(run))
