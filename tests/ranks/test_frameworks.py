"""Several ranks of a training framework are one learner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cases import long_after
from integration.lines import Lines
from ranks import lightning_program, trainer_program
from ranks.rank_learners import Main, ranks, system_in
from ranks.rank_program import Job


def found(folder: Path, kind: str, main: Main) -> dict[str, Any]:
    """Return the state after eight steps, which must be the same on both ranks."""
    with system_in(folder, run={"max_steps": 10_000}, sync={"wait": "never"}) as system:
        job = Job(kind, system.addresses[0], "one", folder, steps=8)
        with ranks(job, 2, main) as learner:
            learner.require_success()
    first, second = (torch.load(folder / f"found-{rank}.pt") for rank in range(2))
    for name, ours in first.pop("weights").items():
        assert torch.equal(ours, second["weights"][name])
    assert first == {name: second[name] for name in first}
    return dict(first)


def test_the_ranks_of_a_hugging_face_trainer_are_one_learner(tmp_path: Path) -> None:
    state = found(tmp_path, "ddp", trainer_program.main)
    assert state["steps"] == 8
    assert state["tokens"] == 2 * sum(Lines().lengths), "of both ranks, two epochs of 64 lines"


@pytest.mark.parametrize("kind", long_after(1, ["fsdp", "ddp"]))
def test_the_ranks_of_a_lightning_trainer_are_one_learner(kind: str, tmp_path: Path) -> None:
    state = found(tmp_path, kind, lightning_program.main)
    assert state["steps"] == 8
    assert state["tokens"] == 8 * 2 * 2 * 4, "steps, ranks, batches, rows"
