"""A run with a missing file is not resumed: it would restart with the weights of a learner."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import StorageError
from decoupled_diloco.launch.resume_run import go_back, require_whole
from decoupled_diloco.storage.coordinator_states import STATES
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.system import System

Change = Callable[[Path], object]


def settings(folder: Path, *, cuts: float = 0.0) -> RunConfig:
    return RunConfig(
        run={
            "name": "r",
            "folder": folder,
            "learners": 1,
            "max_steps": 1000,
            "evaluator": False,
            "checkpoint_interval_seconds": cuts,
        },
        sync={"fragments": 2, "sync_every": 4, "overlap_steps": 1, "quorum": 1},
        syncer={"shards": 2},
        data={"elastic": False},
        workload={},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was stopped midway; each shard has two checkpoints."""
    folder = tmp_path_factory.mktemp("run") / "r"
    folder.mkdir()
    system = System(
        settings(folder), [LearnerSpec("learner-0", step_seconds=1.0)], folder, seed=1, tapes=folder
    )
    system.run(until=200.0)
    for host in system.hosts:
        host.kill()
    system.close()
    (folder / "token").write_text("secret\n")
    assert len(list((folder / DURABLE / "shard-0").glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "r")
    return tmp_path / "r"


def newest(folder: Path, suffix: str, place: int = -1) -> Path:
    return sorted((folder / DURABLE / "shard-1").glob(f"*{suffix}"))[place]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_all(folder: Path) -> None:
    for path in (folder / DURABLE / "shard-1").glob("*.safetensors"):
        cut(path)


MISSING: dict[str, tuple[Change, str]] = {
    "the coordinator's state": (
        lambda folder: shutil.rmtree(folder / STATES),
        r"coordinator has no state, but .*/durable/shard-0/",
    ),
    "the coordinator's state and all shards'": (
        lambda folder: [
            shutil.rmtree(folder / STATES),
            shutil.rmtree(folder / DURABLE),
        ],
        r"coordinator has no state, but .*/learners/learner-0/",
    ),
    "the folder of every shard": (
        lambda folder: shutil.rmtree(folder / DURABLE),
        "durable/shard-0 has no checkpoint",
    ),
    "the folder of one shard": (
        lambda folder: shutil.rmtree(folder / DURABLE / "shard-1"),
        "durable/shard-1 has no checkpoint",
    ),
    "all files of one shard": (
        lambda folder: [path.unlink() for path in (folder / DURABLE / "shard-1").iterdir()],
        "durable/shard-1 has no checkpoint",
    ),
    "all checkpoints of one shard": (
        lambda folder: [path.unlink() for path in (folder / DURABLE).glob("shard-1/*.safetensors")],
        "durable/shard-1 has no checkpoint",
    ),
    "the newest journal": (
        lambda folder: newest(folder, ".journal").unlink(),
        r"durable/shard-1/\d+\.journal does not exist",
    ),
    "the newest checkpoint and journal": (
        lambda folder: [newest(folder, suffix).unlink() for suffix in (".journal", ".safetensors")],
        r"durable/shard-1/\d+\.journal ends with version 1\.\d+ of fragment 1, though 1\.\d+ was",
    ),
    "half of the newest journal": (
        lambda folder: cut(newest(folder, ".journal")),
        r"durable/shard-1/\d+\.journal ends with version",
    ),
    "half of every checkpoint": (cut_all, r"durable/shard-1/\d+\.safetensors"),
    "half of the coordinator's state": (
        lambda folder: cut(max((folder / STATES).iterdir())),
        r"coordinator/\d+\.json cannot be read",
    ),
    "the secret": (lambda folder: (folder / "token").unlink(), "r/token does not exist"),
}


@pytest.mark.parametrize("what", MISSING)
def test_a_run_with_a_missing_file_is_not_resumed(copy: Path, what: str) -> None:
    change, words = MISSING[what]
    change(copy)
    with pytest.raises(StorageError, match=words):
        require_whole(copy, settings(copy))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        lambda folder: shutil.rmtree(folder / "tape"),
        lambda folder: newest(folder, ".safetensors").unlink(),
        lambda folder: cut(newest(folder, ".safetensors")),
    ],
    ids=["nothing", "the event logs", "the newest checkpoint", "half of it"],
)
def test_a_run_with_all_required_files_is_resumed(copy: Path, change: Change) -> None:
    """An older checkpoint and the journals after it lead to the same state."""
    change(copy)
    require_whole(copy, settings(copy))


def test_a_run_that_never_started_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "learners").mkdir()
    (tmp_path / "tape").mkdir()
    require_whole(tmp_path, settings(tmp_path))


def test_a_run_that_went_back_is_resumed(tmp_path: Path) -> None:
    """Its tapes contain newer versions than the checkpoint to which it is reset."""
    folder = tmp_path / "r"
    folder.mkdir()
    config = settings(folder, cuts=20.0)
    learners = [LearnerSpec("learner-0", step_seconds=1.0)]
    for _ in range(2):
        system = System(config, learners, folder, seed=1, tapes=folder)
        system.run(until=100.0)
        for host in system.hosts:
            host.kill()
        system.close()
        (folder / "token").write_text("secret\n")
        require_whole(folder, config)
        go_back(folder, config, "last")
        require_whole(folder, config)
