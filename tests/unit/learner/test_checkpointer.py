"""`Checkpointer`: checkpoints of a learner, and the memory for their copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.checkpointer import Checkpointer
from decoupled_diloco.learner.learner_checkpoint import CheckpointFolder, LearnerCheckpoint

OUTLINE = LearnerCheckpoint("me", "run", 1, 0, 0, 0, 0, (), {})


def checkpointer_of(tmp_path: Path) -> tuple[Checkpointer, nn.Linear]:
    model = nn.Linear(2, 2, bias=False)
    folder = CheckpointFolder(tmp_path, keep=3)
    return Checkpointer("me", model, {}, folder, every_seconds=60.0), model


def kept(tmp_path: Path) -> list[float]:
    files = sorted(tmp_path.glob("*.safetensors"))
    return [float(LearnerCheckpoint.read(file).model["weight"][0, 0]) for file in files]


def written(checkpointer: Checkpointer) -> None:
    assert checkpointer.writing is not None
    checkpointer.writing.result(20.0)


def test_a_copy_that_waits_for_a_slow_disk_is_not_overwritten(tmp_path: Path) -> None:
    checkpointer, model = checkpointer_of(tmp_path)
    disk = threading.Event()
    checkpointer._writer.submit(disk.wait)
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.weight.fill_(value)
        checkpointer.take(OUTLINE, lambda sample: None)
    disk.set()
    written(checkpointer)
    assert kept(tmp_path) == [1.0, 2.0, 3.0]
    assert len(checkpointer._spare) == 1, "memory for only one copy is kept"
    checkpointer.close()


def test_memory_for_a_copy_is_prepared_and_reused(tmp_path: Path) -> None:
    checkpointer, model = checkpointer_of(tmp_path)
    checkpointer.prepare()
    checkpointer._writer.submit(int).result(20.0)
    (memory,) = checkpointer._spare
    place = memory["0"].data_ptr()
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        checkpointer.take(OUTLINE, lambda sample: None)
        assert not checkpointer._spare, "the writer uses it until the file is written"
        written(checkpointer)
        assert checkpointer._spare == [memory]
    assert memory["0"].data_ptr() == place
    assert kept(tmp_path) == [1.0, 2.0]
    checkpointer.close()


def test_a_checkpoint_is_not_forgotten_while_it_is_restored(tmp_path: Path) -> None:
    first, _ = checkpointer_of(tmp_path)
    for number in (1, 2):
        first.take(replace(OUTLINE, run_checkpoint=number), lambda sample: None)
        written(first)
    first.close()
    again, _ = checkpointer_of(tmp_path)
    assert again.loaded is not None
    assert again.loaded.run_checkpoint == 2
    again.forget_checkpoints((), before=5)
    again._writer.submit(int).result(20.0)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [
        "00000002.checkpoint-2.safetensors"
    ]
    again.forget()
    again.forget_checkpoints((), before=5)
    again._writer.submit(int).result(20.0)
    assert not list(tmp_path.glob("*.safetensors"))
    again.close()


class Opaque(nn.Linear):
    """A module with a state that only pickle could save."""

    def get_extra_state(self) -> object:
        return {1}

    def set_extra_state(self, state: object) -> None:
        raise AssertionError("it is never saved")


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (lambda: Opaque(2, 2), "_extra_state"),
        (lambda: nn.Sequential(nn.Linear(2, 2), Opaque(2, 2)), "1._extra_state"),
        (lambda: sparse(), "table"),
    ],
)
def test_a_model_that_cannot_be_saved_is_rejected_at_once(
    model: Callable[[], nn.Module], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"^checkpoint= cannot save the model: .*'{what}'"):
        Checkpointer("me", model(), {}, CheckpointFolder(tmp_path), every_seconds=0.0)
    Checkpointer("me", model(), {}, None, every_seconds=0.0).close()


def sparse() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("table", torch.eye(3).to_sparse())
    return model
