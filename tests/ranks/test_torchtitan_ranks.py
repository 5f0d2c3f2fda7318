"""Several ranks of torchtitan's Trainer are one learner; the CPU replaces its accelerator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoupled_diloco.config.method import plan_of
from decoupled_diloco.storage.weight_files import load_weights
from decoupled_diloco.syncer.result import RESULT, assemble, read_layout
from ranks.rank_learners import ranks, recorded, system_in
from ranks.rank_program import Job

pytest.importorskip("torchtitan")
pytest.importorskip("triton")

from ranks import titan_program

ROUNDS = 3
TOLERANCE = 2e-4
"""Relative to the fragment's norm, which these rounds change by 4 %.

Sums over ranks are rounded in another order. AdamW amplifies this where a gradient's element is as
small as its epsilon (1e-8; the median is 3e-5). After three rounds the difference is 3e-5 of the
norm.
"""


def trained(
    folder: Path, kind: str, world: int, patch: pytest.MonkeyPatch
) -> dict[int, list[Tensor]]:
    """Run one learner; return the versions of each fragment."""
    merged = recorded(patch)
    with system_in(folder, run={"max_steps": 4 * (ROUNDS + 1)}) as system:
        job = Job(kind, system.addresses[0], "one", folder)
        with ranks(job, world, titan_program.main) as learner:
            learner.require_success()
        system.wait_finished()
        assemble(system.folder, plan_of(read_layout(system.folder), system.config), 1)
    return {p: versions[:ROUNDS] for p, versions in merged.items()}


def found(folder: Path, world: int = 2) -> list[dict[str, Any]]:
    return [torch.load(folder / f"one-found-{rank}.pt") for rank in range(world)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Tensor]]:
    """The versions of the same model in a single-process loop."""
    with pytest.MonkeyPatch.context() as patch:
        return trained(tmp_path_factory.mktemp("plain"), "plain", 1, patch)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["pipeline", "fsdp", "tp", "interleaved"])
def test_versions_equal_those_of_a_plain_loop(
    kind: str, plain: dict[int, list[Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = trained(tmp_path, kind, 2, monkeypatch)
    assert plain.keys() == cut.keys()
    for fragment, versions in plain.items():
        assert len(versions) == len(cut[fragment]) == ROUNDS
        assert not torch.equal(versions[0], versions[-1])
        for number, (ours, theirs) in enumerate(zip(versions, cut[fragment], strict=True)):
            difference = float((ours - theirs).norm() / ours.norm())
            assert difference <= TOLERANCE, f"fragment {fragment}, round {number}: {difference}"
    end, held = load_weights(tmp_path / "run" / RESULT), set[str]()
    for state in found(tmp_path):
        assert state["over"]
        held |= state["weights"].keys()
        for name, weights in state["weights"].items():
            assert torch.equal(weights, end[name]), f"{name} differs from the run's result"
            assert weights.isfinite().all()
        assert state["tokens"] == state["steps"] * titan_program.ROWS * titan_program.LENGTH
        assert state["rounds"] >= ROUNDS
        last = state["logged"][-1]
        assert last["diloco/run_step"] > 0
        assert last["diloco/rounds"] >= ROUNDS
        assert last["diloco/discarded_tokens"] >= 0
    assert held == end.keys()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["fsdp", "pipeline", "interleaved"])
def test_a_learner_resumes_from_torchtitans_checkpoint(kind: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with system_in(tmp_path, run={"max_steps": 10_000}, sync={"wait": "never"}) as system:
        for steps in (8, 12):
            job = Job(kind, system.addresses[0], "one", tmp_path, steps=steps, checkpoint=kept)
            with ranks(job, 2, titan_program.main) as learner:
                learner.require_success()
            for state in found(tmp_path):
                assert state["steps"] == steps
                assert state["tokens"] == steps * titan_program.ROWS * titan_program.LENGTH
                assert state["epoch"] == 1 + (steps == 12)
                assert state["optimizer_steps"] == steps, "the optimizer continues"
    assert len(found(tmp_path)[0]["logged"]) == 4, "only the second incarnation's steps"
