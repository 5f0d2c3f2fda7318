"""The scripts that are submitted to Slurm, without a Slurm cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.launch_folder import Launch, launch_folder, placed_config, write_launch
from decoupled_diloco_engines.slurm import Slurm


def config_of(folder: Path, ranks: dict[str, object] | None = None, **launch: object) -> RunConfig:
    return RunConfig(
        run={"name": "big", "folder": folder / "runs/big", "learners": 3, "max_steps": 10},
        learner=ranks or {},
        data={"elastic": not ranks},
        launch={"backend": "slurm", **launch},
    )


def files(config: RunConfig, folder: Path) -> dict[str, str]:
    launched = launch_folder(config.run.folder)
    return dict(Slurm().files(placed_config(config, launched), launched))


def directives(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line}


def test_each_role_gets_its_resources(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        syncer={"cpus": 4, "memory": "32GiB"},
        learner={"gpus": 8, "cpus": 64, "memory": "1TiB"},
        slurm={"partition": "gpu", "syncer_partition": "cpu", "time": "1-0", "account": "lab"},
    )
    scripts = files(config, tmp_path)
    assert set(scripts) == {"syncer.sbatch", "learners.sbatch", "evaluator.sbatch"}
    learners = directives(scripts["learners.sbatch"])
    syncer = directives(scripts["syncer.sbatch"])
    assert {
        "--array=0-2",
        "--gpus-per-node=8",
        "--cpus-per-task=64",
        "--mem=1048576M",
        "--partition=gpu",
    } <= learners
    assert {"--cpus-per-task=4", "--mem=32768M", "--partition=cpu"} <= syncer
    assert {"--time=1-0", "--account=lab", "--requeue", "--signal=TERM@60"} <= learners & syncer


def test_shards_share_one_job_with_enough_resources_for_each(tmp_path: Path) -> None:
    config = config_of(tmp_path, syncer={"cpus": 2, "memory": "1GiB"})
    several = config.syncer.model_copy(update={"shards": 3, "standby": True})
    scripts = files(config.model_copy(update={"syncer": several}), tmp_path)
    assert {"--cpus-per-task=12", "--mem=6144M"} <= directives(scripts["syncer.sbatch"])


def test_learners_with_different_ranks_are_separate_arrays(tmp_path: Path) -> None:
    scripts = files(config_of(tmp_path, {"ranks": [2, 2, 4], "parallelism": "ddp"}), tmp_path)
    assert "--array=0-1" in directives(scripts["learners-0.sbatch"])
    assert "--array=2-2" in directives(scripts["learners-2.sbatch"])


def test_a_site_gets_a_relay_on_the_nodes_of_its_learners(tmp_path: Path) -> None:
    tables = config_of(tmp_path, slurm={"partition": "gpu", "syncer_partition": "cpu"}).model_dump()
    tables["run"]["learners"] = 4
    tables["sites"] = [
        {"name": "site-a", "learners": [2, 0], "directives": ["--constraint=rack1"], "port": 7080},
        {"name": "site-b", "learners": [1], "upstream": "site-a"},
    ]
    scripts = files(RunConfig(**tables), tmp_path)
    assert set(scripts) == {
        *("syncer.sbatch", "relay-site-a.sbatch", "relay-site-b.sbatch", "evaluator.sbatch"),
        *("learners-0.sbatch", "learners-1.sbatch", "learners-3.sbatch"),
    }
    relay = scripts["relay-site-a.sbatch"]
    assert {"--array=0,2", "--constraint=rack1"} <= directives(scripts["learners-0.sbatch"])
    assert {"--partition=gpu", "--constraint=rack1", "--requeue"} <= directives(relay)
    assert "--constraint=rack1" not in directives(scripts["relay-site-b.sbatch"])
    assert "--name site-a --port 7080 --upstream" in relay
    assert "--supervised\ncode=$?" in relay


def test_ranks_on_several_hosts_are_tasks_of_one_step(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"ranks": 16}, learner={"hosts": 2, "gpus": 16, "cpus": 32})
    script = files(config, tmp_path)["learners.sbatch"]
    options = {"--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--cpus-per-task=2"}
    assert options <= directives(script)
    assert "srun --kill-on-bad-exit=1 --distribution=block" in script
    assert "--supervised" not in script  # the script restarts the ranks on both hosts


ENDS = {
    "the run is over": (["0 0"], 0),
    "the settings are wrong, and the other ranks are stopped": (["2 130"], 2),
    "SIGTERM": (["130 130"], 130),
    "killed, then an error, then success": (["137 143", "1 130", "0 0"], 0),
    "an error forever": (["4 1"] * 6, 4),
}


@pytest.mark.parametrize("ends", ENDS)
def test_the_script_restarts_ranks_where_that_helps(ends: str, tmp_path: Path) -> None:
    """Run the script in bash, with an srun that runs its tasks one after the other."""
    starts, code = ENDS[ends]
    config = config_of(tmp_path, {"ranks": 2}, setup=["true"], learner={"hosts": 2})
    bin, calls = tmp_path / "bin", tmp_path / "calls"
    (tmp_path / "runs/big.launch/logs").mkdir(parents=True)
    (tmp_path / "starts").write_text("".join(f"{codes}\n" for codes in [*starts, "99 99"]))
    commands = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\n'
        f"echo $MASTER_ADDR $MASTER_PORT >> {calls}; highest=0\n"
        'for code in $(sed -n "$(wc -l < calls)p" starts); do\n'
        '    CODE=$code "$@"; [ $code -gt $highest ] && highest=$code\n'
        "done\nexit $highest",
        "ddiloco": "exit $CODE",
        "scontrol": 'if [ "$1" = requeue ]; then touch requeued; else echo n1; echo n2; fi',
    }
    bin.mkdir()
    for name, text in commands.items():
        (bin / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
        (bin / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_CPUS_PER_TASK": "1"}
    ended = subprocess.run(
        ["bash", "-c", files(config, tmp_path)["learners.sbatch"]],
        env={"PATH": f"{bin}:/bin:/usr/bin", **job},
        timeout=30,
    )
    assert ended.returncode == code
    assert len(calls.read_text().splitlines()) == len(starts)
    assert all(line.startswith("n1 295") for line in calls.read_text().splitlines())
    assert (tmp_path / "requeued").exists() == (code not in (0, 2))


@pytest.mark.parametrize(
    ("code", "restarts", "limits", "again"),
    [
        (130, 200, {}, True),
        (130, 2, {"max_preemptions": 3}, True),
        (130, 3, {"max_preemptions": 3}, False),
        (130, 0, {"max_preemptions": 0}, False),
        (1, 49, {"max_preemptions": 0}, True),
        (1, 50, {}, False),
        (2, 0, {}, False),
    ],
)
def test_a_job_is_requeued_within_its_limits(
    code: int, restarts: int, limits: dict[str, object], again: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path, {"ranks": 1, **limits}, setup=["true"])
    bin = tmp_path / "bin"
    bin.mkdir()
    for name, text in {"srun": f"exit {code}", "scontrol": f"touch {tmp_path}/requeued"}.items():
        (bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin / name).chmod(0o755)
    ended = subprocess.run(
        ["bash", "-c", files(config, tmp_path)["learners.sbatch"]],
        env={
            "PATH": f"{bin}:/bin:/usr/bin",
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_JOB_ID": "7",
            "SLURM_ARRAY_TASK_ID": "0",
        },
        timeout=30,
    )
    assert ended.returncode == code
    assert (tmp_path / "requeued").exists() == again


@pytest.mark.parametrize("setup", [[], ["module load cuda", "source 'my env/bin/activate'"]])
def test_bash_can_parse_every_script(tmp_path: Path, setup: list[str]) -> None:
    folder = tmp_path / "it's here"
    config = config_of(folder, {"ranks": 4}, setup=setup, learner={"hosts": 2})
    for script in files(config, tmp_path).values():
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert ("ddiloco " in script) == bool(setup) or "-m decoupled_diloco.cli" in script
        assert all(line in script for line in setup)


def test_the_launch_folder_is_complete_and_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    launched = write_launch(config_of(Path()))
    assert launched.folder == tmp_path / "runs/big.launch"
    token = launched.folder / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    config = load_config(launched.folder / "run.toml")
    assert config.run.folder == tmp_path / "runs/big"
    assert config.syncer.token_file == token
    assert (config.syncer.host, config.syncer.port) == ("0.0.0.0", 0)
    assert token.read_text().strip() not in "".join(
        path.read_text() for path in launched.folder.iterdir() if path != token
    )
    assert Launch(launched.folder).config == config
    assert not config.run.folder.exists()


def test_a_given_secret_is_kept(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    own = config.syncer.model_copy(update={"token_file": tmp_path / "mine"})
    launched = write_launch(config.model_copy(update={"syncer": own}))
    assert not (launched.folder / "token").exists()
    assert f"--auth-token-file {tmp_path}/mine" in (launched.folder / "learners.sbatch").read_text()


def test_a_folder_without_a_launch_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a launch folder: pass the run's TOML file"):
        Launch(tmp_path)


def test_a_machine_without_slurm_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"sbatch is not installed: run this on a login node"):
        Slurm().require(config_of(tmp_path))


@pytest.mark.parametrize(
    ("launch", "problem"),
    [
        (
            {"learner": {"memory": "64"}},
            r"memory='64' in \[launch.learner\] is not a valid amount of memory",
        ),
        ({"backend": "slrum"}, r"backend='slrum' in \[launch\] is not known: did you mean 'slurm'"),
        ({"learner": {"hosts": 2}}, r"hosts=2 in \[launch.learner\] does not divide the ranks=1"),
    ],
)
def test_invalid_settings_are_rejected(
    tmp_path: Path, launch: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        config_of(tmp_path, **launch)
