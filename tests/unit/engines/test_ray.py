"""What cannot be placed on Ray is refused before any cluster is asked, in one sentence."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import decoupled_diloco as dd
from decoupled_diloco.config import RunConfig, dump_config, load_config
from decoupled_diloco.engines import ray_cluster
from decoupled_diloco.engines.base import JOBS, SETTINGS
from decoupled_diloco.engines.launch import FORMER, launch_folder, write_launch
from decoupled_diloco.engines.ray_plan import PLAN, RayPlan, plan_of, read_plan
from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.launch.processes import LOGGER


def config(folder: Path = Path("runs/big"), **tables: Any) -> RunConfig:
    where = {"engine": "ray", **tables.pop("where", {})}
    run: dict[str, Any] = {"name": "big", "folder": folder, "learners": 2, "budget_steps": 100}
    run.update(tables.pop("run", {}))
    return RunConfig(run=run, where=where, **tables)


def plan(**tables: Any) -> RayPlan:
    return plan_of(config(**tables), Path("/shared/big.launch"))


def test_a_plan_has_an_actor_for_each_host_and_what_it_asks_for() -> None:
    made = plan(
        run={"learners": 1, "evaluator": True},
        syncer={"shards": 2},
        data={"leases": False},
        learner={"ranks": 4},
        where={
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


def test_one_process_logs_the_run() -> None:
    made = plan(run={"learners": 1, "log": ("tensorboard",)}, syncer={"shards": 2})
    loggers = [part.name for part in made.actors if LOGGER in part.commands]
    assert loggers == ["shard-0"]
    for shard in made.actors[:2]:
        arguments = shard.commands[shard.name].arguments
        assert arguments[-2:] == ("--set", "run.log=[]"), "else shard 0 starts another one"


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"syncer": {"standbys": 1}}, r"standbys=1 in \[syncer\] .*: leave standbys out"),
        (
            {"syncer": {"addresses": ("http://a:7070",)}},
            r"addresses=.* would be ignored: .*: leave addresses out",
        ),
        ({"where": {"setup": ("module load cuda",)}}, r"setup=.* would be ignored: .*: leave"),
        (
            {
                "data": {"leases": False},
                "learner": {"ranks": 2},
                "where": {"learner": {"gpus": 3, "hosts": 2}},
            },
            r"gpus=3 in \[where.learner\] .* hosts=2: choose a multiple",
        ),
    ],
)
def test_settings_that_do_not_go_with_ray(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(**tables)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"is no JSON \(.*\): correct it, or have it written again"),
        ("\xff", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "is no object in braces: have it written again"),
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


def test_without_ray_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"needs Ray: pip install 'decoupled-diloco\[ray\]'"):
        dd.ray.run(config())


def test_a_ray_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.__version__", "2.9.3")
    with pytest.raises(ConfigError, match=r"Ray 2\.9\.3 is older than 2\.50: pip install"):
        dd.ray.run(config())


def test_the_oldest_ray_is_that_of_the_extra() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    oldest = ".".join(map(str, ray_cluster.OLDEST))
    assert set(re.findall(r'"ray\[train\]>=([0-9.]+)"', text)) == {oldest}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return "{}:{}".format(*probe.getsockname())


def test_a_cluster_that_is_not_there() -> None:
    address = free_address()
    with pytest.raises(ConfigError, match=rf"no Ray cluster at address='{address}' .*refused"):
        dd.ray.run(config(where={"ray": {"address": address}}))
    with pytest.raises(ConfigError, match=r"no Ray cluster at address='127.0.0.1:99999' "):
        dd.ray.run(config(where={"ray": {"address": "127.0.0.1:99999"}}))
    with pytest.raises(ConfigError, match=r"is of Ray's client, .*: run the command on a node"):
        dd.ray.attach("big", address="ray://10.0.0.1:10001")


def test_a_cluster_of_this_machine_whose_head_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start` has written where it is, and Ray would try for minutes."""
    address = free_address()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(address)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match=rf"no Ray cluster at address='{address}' "):
        dd.ray.run(config())
    other = free_address()
    monkeypatch.setenv("RAY_ADDRESS", other)
    with pytest.raises(ConfigError, match=rf"no Ray cluster at address='{other}' "):
        dd.ray.run(config())


def test_runs_that_are_not_rays(tmp_path: Path) -> None:
    local = config(where={"engine": "local"})
    with pytest.raises(ConfigError, match=r"engine='local' in \[where\] is not Ray: write engine"):
        dd.ray.run(local)
    with pytest.raises(ConfigError, match=r"settings=\['run.learners=3'\] change a TOML file"):
        dd.ray.run(config(), ["run.learners=3"])
    with pytest.raises(ConfigError, match=r"was not launched .*: give the run folder of a run"):
        dd.ray.attach(tmp_path)
    with pytest.raises(ConfigError, match="is no launch folder"):
        dd.ray.way_to(tmp_path, "mine")


def test_only_a_run_of_ray_can_be_resumed_by_launch(tmp_path: Path) -> None:
    made = config(tmp_path / "big", where={"engine": "slurm"})
    with pytest.raises(ConfigError, match="resume"):
        write_launch(made).submit(resume=True)


def test_a_launch_leaves_no_files_of_another_engine(tmp_path: Path) -> None:
    run = tmp_path / "big"
    folder = write_launch(config(run, where={"engine": "slurm"})).folder
    assert list(folder.glob("*.sbatch"))
    write_launch(config(run))
    assert {path.name for path in folder.iterdir()} == {PLAN, SETTINGS, "token"}
    assert JOBS in FORMER
    assert load_config(folder / SETTINGS).where.engine == "ray"
    assert folder == launch_folder(run)
    assert 'engine = "ray"' in dump_config(config(run))
