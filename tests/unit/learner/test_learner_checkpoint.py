"""A learner's checkpoints: integrity, which ones are kept, and parts of the run's checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoupled_diloco.errors import StorageError
from decoupled_diloco.learner.learner_checkpoint import (
    CheckpointFolder,
    LearnerCheckpoint,
    run_checkpoint_of,
)
from unit.learner.checkpoints import checkpoint


def assert_same(one: LearnerCheckpoint | None, other: LearnerCheckpoint) -> None:
    assert one is not None
    numbers = {"fragments": (), "model": {}, "state": {}}
    assert replace(one, **numbers) == replace(other, **numbers)
    for mine, theirs in zip(one.fragments, other.fragments, strict=True):
        assert replace(mine, published=theirs.published) == theirs
        assert torch.equal(mine.published, theirs.published)
    assert one.model.keys() == other.model.keys()
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)
    assert str(one.state) == str(other.state)


def test_a_saved_checkpoint_is_loaded_unchanged(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new" / "a")
    assert folder.newest() is None
    folder.save(checkpoint())
    assert_same(folder.newest(), checkpoint())
    assert folder.problems == []


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=2)
    (tmp_path / ".00000009.safetensors.17.part").touch()
    for steps in range(1, 6):
        folder.save(checkpoint(steps))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "00000004.safetensors",
        "00000005.safetensors",
    ]
    assert_same(folder.newest(), checkpoint(5))


def test_other_files_in_the_folder_are_not_touched(tmp_path: Path) -> None:
    theirs = {"1.safetensors", "00000009.model.safetensors", ".download.part", "notes.txt"}
    for name in theirs:
        (tmp_path / name).touch()
    folder = CheckpointFolder(tmp_path, keep=1)
    for steps in (1, 2):
        folder.save(checkpoint(steps))
    assert {p.name for p in tmp_path.iterdir()} == {*theirs, "00000002.safetensors"}
    assert folder.problems == []


@pytest.mark.parametrize("harm", ["torn", "changed", "empty", "other"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    tmp_path: Path, harm: str
) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.save(checkpoint(1))
    path = folder.save(checkpoint(2))
    whole = path.read_bytes()
    harmed = {
        "torn": whole[:-4],
        "changed": whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:],
        "empty": b"",
        "other": b"not a checkpoint",
    }[harm]
    path.write_bytes(harmed)
    assert_same(folder.newest(), checkpoint(1))
    (problem,) = folder.problems
    assert str(path) in problem
    assert "the one before it is used" in problem
    folder.save(checkpoint(3))
    assert_same(CheckpointFolder(tmp_path).newest(), checkpoint(3))


def of_the_run(folder: CheckpointFolder) -> dict[int, Path]:
    """Return the files that belong to checkpoints of the run, by number."""
    numbers = {run_checkpoint_of(path): path for path in folder.path.iterdir()}
    return {number: path for number, path in sorted(numbers.items(), key=str) if number}


def test_parts_of_the_runs_checkpoints_are_kept_until_they_are_forgotten(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    folder.save(checkpoint(1, run_checkpoint=1))
    folder.save(checkpoint(2))
    folder.save(checkpoint(3, run_checkpoint=2))
    folder.save(checkpoint(4))
    folder.save(checkpoint(5))
    assert list(of_the_run(folder)) == [1, 2]
    assert_same(LearnerCheckpoint.read(of_the_run(folder)[1]), checkpoint(1, run_checkpoint=1))
    assert_same(folder.newest(), checkpoint(5))
    folder.save(checkpoint(6, run_checkpoint=3))
    assert_same(folder.newest(), checkpoint(6, run_checkpoint=3))
    folder.forget_checkpoints(lambda number: number < 3)
    assert list(of_the_run(folder)) == [3]
    assert folder.problems == []


def test_a_checkpoint_of_another_format_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decoupled_diloco.learner import learner_checkpoint as module

    monkeypatch.setattr(module, "FORMAT", 99)
    path = CheckpointFolder(tmp_path).save(checkpoint())
    monkeypatch.undo()
    with pytest.raises(StorageError, match="format 99, but this version reads 7 and 8 only"):
        LearnerCheckpoint.read(path)


def test_a_failed_write_raises_and_keeps_existing_files(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "file" / "a")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError):
        folder.save(checkpoint())
