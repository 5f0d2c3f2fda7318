"""Hugging Face's Trainer with DDP: one learner of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from integration.test_transformers import Lines
from ranks.learners import ranks
from ranks.program import Job
from ranks.test_kinds import system_in
from ranks.trainer_program import main

pytest.importorskip("accelerate")

pytestmark = pytest.mark.timeout(180)


def test_its_ranks_are_one_learner(tmp_path: Path) -> None:
    with system_in(tmp_path, run={"budget_steps": 10_000}, sync={"wait": "never"}) as system:
        job = Job("ddp", system.addresses[0], "one", tmp_path, steps=8)
        with ranks(job, 2, main) as learner:
            learner.ends_well()
    first, second = (torch.load(tmp_path / f"found-{rank}.pt") for rank in range(2))
    assert first["steps"] == second["steps"] == 8
    assert first["tokens"] == 2 * sum(Lines().lengths), "of both ranks, two epochs of 64 lines"
    for name, ours in first["weights"].items():
        assert torch.equal(ours, second["weights"][name])
