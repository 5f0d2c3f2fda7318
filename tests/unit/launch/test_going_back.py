"""A reset of a run to a checkpoint is complete and durable when it returns."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.resume_run import LEARNERS, go_back, half_way
from decoupled_diloco.learner.learner_checkpoint import run_checkpoint_of
from decoupled_diloco.runtime import Runtime, within
from decoupled_diloco.storage.coordinator_states import CoordinatorStates
from decoupled_diloco.syncer.durable import DURABLE, EXACT
from decoupled_diloco.syncer.run_checkpoints import checkpoint_folders, read_manifest
from decoupled_diloco_lab.simulate.choices import Choices
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System
from decoupled_diloco_lab.simulate.virtual_disk import (
    CrashError,
    Loss,
    SimulatedDisk,
    remains,
    write_folder,
)


def settings(folder: Path) -> RunConfig:
    return RunConfig(
        run={
            "name": "r",
            "folder": folder,
            "learners": 2,
            "max_steps": 30,
            "evaluator": False,
            "checkpoint_interval_seconds": 6.0,
        },
        sync={"fragments": 2, "sync_every": 4, "overlap_steps": 1, "quorum": 1},
        syncer={"shards": 2},
        learner={"checkpoint_interval_seconds": 5.0},
        data={"elastic": False},
        workload={},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run with consistent checkpoints."""
    folder = tmp_path_factory.mktemp("run") / "r"
    folder.mkdir()
    learners = [LearnerSpec(f"learner-{n}", step_seconds=1.0) for n in range(2)]
    system = System(settings(folder), learners, folder, seed=1)
    system.run(until=500.0, stop=lambda: system.finished)
    system.close()
    assert len(checkpoint_folders(folder)) > 1
    return folder


def assert_is_back(folder: Path) -> None:
    """Assert that all files are those of the last whole checkpoint."""
    last = next(path for path in checkpoint_folders(folder) if (path / "manifest.json").exists())
    manifest = read_manifest(last)
    for part in manifest.shards:
        durable = folder / DURABLE / part.process
        assert sorted(path.name for path in durable.iterdir()) == ["00000001.safetensors", EXACT]
        own = (durable / "00000001.safetensors").read_bytes()
        assert own == manifest.part(part.process).read_bytes()
    for file in (folder / LEARNERS).rglob("*.safetensors"):
        assert run_checkpoint_of(file) == manifest.number
    assert CoordinatorStates(folder).read() is not None


def test_a_private_run_does_not_go_back(tmp_path: Path) -> None:
    merge = {"rule": "mean", "weighting": "uniform", "norm_gate": 0, "buffers": "local"}
    dp = {"clip": 1.0, "noise_multiplier": 20.0, "epsilon_max": 4.0, "delta": 1e-3}
    private = RunConfig(run={"max_steps": 9}, sync={"merge": merge}, privacy={"dp": dp})
    with pytest.raises(ConfigError, match="the account of what was published since would be lost"):
        go_back(tmp_path, private, "last")


def test_a_completed_reset_survives_a_power_loss(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "r")
    disk = SimulatedDisk(tmp_path)
    with within(Runtime(disk)):
        go_back(tmp_path / "r", settings(run), "last")
    disk.close()
    for seed in range(5):
        loss = Loss(Choices(seed), names=1.0, writes=1.0, zeros=0.5)
        write_folder(tmp_path / f"after-{seed}", remains(disk.before, disk.log, loss))
        after = tmp_path / f"after-{seed}" / "r"
        assert not half_way(after)
        assert_is_back(after)


def test_a_second_reset_completes_one_that_a_power_loss_interrupted(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, tmp_path / "whole" / "r")
    whole = SimulatedDisk(tmp_path / "whole")
    with within(Runtime(whole)):
        go_back(tmp_path / "whole" / "r", settings(run), "last")
    whole.close()
    begun = 0
    for crash_at in range(1, whole.tried, 7):
        top = tmp_path / f"crash-{crash_at}"
        shutil.copytree(run, top / "r")
        disk = SimulatedDisk(top, crash_at=crash_at)
        with within(Runtime(disk)), pytest.raises(CrashError):
            go_back(top / "r", settings(run), "last")
        disk.close()
        loss = Loss(Choices(crash_at), names=0.5, writes=0.5, torn=0.5)
        write_folder(tmp_path / f"after-{crash_at}", remains(disk.before, disk.log, loss))
        after = tmp_path / f"after-{crash_at}" / "r"
        if number := half_way(after):
            begun += 1
            go_back(after, settings(run), number)
            assert_is_back(after)
    assert begun
