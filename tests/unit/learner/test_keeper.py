"""What a learner keeps of itself, and the memory that it is copied to."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import nn

from decoupled_diloco.learner.checkpoint import CheckpointFolder, LearnerCheckpoint
from decoupled_diloco.learner.keeper import Keeper

OUTLINE = LearnerCheckpoint("me", "run", 1, 0, 0, 0, 0, (), {})


def keeper_of(tmp_path: Path) -> tuple[Keeper, nn.Linear]:
    model = nn.Linear(2, 2, bias=False)
    folder = CheckpointFolder(tmp_path, keep=3)
    return Keeper("me", model, {}, folder, every_seconds=60.0), model


def kept(tmp_path: Path) -> list[float]:
    files = sorted(tmp_path.glob("*.safetensors"))
    return [float(LearnerCheckpoint.read(file).model["weight"][0, 0]) for file in files]


def written(keeper: Keeper) -> None:
    assert keeper.writing is not None
    keeper.writing.result(20.0)


def test_copies_that_wait_for_a_slow_disk_are_not_written_over(tmp_path: Path) -> None:
    keeper, model = keeper_of(tmp_path)
    disk = threading.Event()
    keeper._writer.submit(disk.wait)
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        keeper.take(OUTLINE, lambda sample: None)
    disk.set()
    written(keeper)
    assert kept(tmp_path) == [1.0, 2.0, 3.0]
    assert len(keeper._spare) == 1, "memory for one copy is kept, and no more"
    keeper.close()


def test_the_memory_of_a_copy_is_ready_before_it_and_used_again(tmp_path: Path) -> None:
    keeper, model = keeper_of(tmp_path)
    keeper.prepare()
    keeper._writer.submit(int).result(20.0)
    (memory,) = keeper._spare
    place = memory["0"].data_ptr()
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        keeper.take(OUTLINE, lambda sample: None)
        assert not keeper._spare, "it is the writer's until the file is there"
        written(keeper)
        assert keeper._spare == [memory]
    assert memory["0"].data_ptr() == place
    assert kept(tmp_path) == [1.0, 2.0]
    keeper.close()
