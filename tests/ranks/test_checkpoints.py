"""A multi-rank learner continues from its checkpoint, also with another number of ranks."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.rank_learners import (
    ASYNCHRONOUS,
    NOWHERE,
    TOLERANCE,
    ranks,
    several_sync_ranks,
    system_in,
    wait_for_log,
    wait_for_step,
)
from ranks.rank_program import INTERLEAVED, Job

STEPS = 12
ALONE = {"fragments": 3, "sync_every": 3000, "overlap_steps": 1, "quorum": 1}
"""Settings without due fragments, so that the learner's weights are its own."""


def trained(folder: Path, *lives: tuple[str, int], **options: Any) -> dict[str, Any]:
    """Train `STEPS` steps in several incarnations; return the learner's final state.

    Args:
        lives: The kind and the number of ranks of each incarnation.
    """
    with system_in(folder, run={"max_steps": 10_000}, sync=ALONE) as system:
        for number, (kind, world) in enumerate(lives, 1):
            steps = STEPS * number // len(lives)
            own = options if kind != "plain" else options | {"sync_ranks": 1}
            job = Job(kind, system.addresses[0], "one", folder, steps, optimizer="adamw", **own)
            with ranks(replace(job, checkpoint=folder / "kept"), world) as learner:
                learner.require_success()
                assert f"begins at step {STEPS * (number - 1) // len(lives)}\n" in learner.log(0)
    found: dict[str, Any] = torch.load(folder / "one.pt")
    return found


@pytest.fixture(scope="module")
def without_a_stop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return trained(tmp_path_factory.mktemp("without"), ("plain", 1))


@pytest.mark.parametrize(
    "lives",
    [
        pytest.param((("ddp", 2), ("ddp", 2)), marks=pytest.mark.long),
        (("fsdp", 2), ("fsdp", 3), ("tp", 2)),
        pytest.param((("tp", 2), ("fsdp_tp", 4)), marks=pytest.mark.long),
        (("pipeline", 3), ("hsdp", 4)),
        pytest.param((("hsdp", 4), ("pipeline", 3)), marks=pytest.mark.long),
        pytest.param((("fsdp", 2), (INTERLEAVED, 2), ("ddp", 2)), marks=pytest.mark.long),
        pytest.param((("fsdp", 2), ("plain", 1), ("tp", 2)), marks=pytest.mark.long),
        pytest.param((("plain", 1), ("fsdp_tp", 4)), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_restarted_learner_trains_the_same_as_without_a_stop(
    lives: tuple[tuple[str, int], ...], without_a_stop: dict[str, Any], tmp_path: Path
) -> None:
    found = trained(tmp_path, *lives)
    assert found["steps"] == STEPS
    assert found["tokens"] == without_a_stop["tokens"]
    for name, ours in without_a_stop["weights"].items():
        if name in found["weights"]:  # rank 0 of a pipeline has only its stage
            difference = float((ours - found["weights"][name]).norm() / ours.norm())
            assert difference <= 10 * TOLERANCE, f"{name}: {difference}"


@pytest.mark.parametrize(
    "lives",
    [(("fsdp", 2), ("ddp", 3)), pytest.param((("tp", 2), ("plain", 1)), marks=pytest.mark.long)],
    ids=str,
)
def test_several_sync_ranks_keep_and_read_the_published_copies(
    lives: tuple[tuple[str, int], ...],
    without_a_stop: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = trained(tmp_path, *lives, **several_sync_ranks(monkeypatch))
    for name, ours in without_a_stop["weights"].items():
        difference = float((ours - found["weights"][name]).norm() / ours.norm())
        assert difference <= 10 * TOLERANCE, f"{name}: {difference}"
    files = sorted(path.name for path in (tmp_path / "kept/one").glob("00000001.ranks/pub*"))
    assert files == ["published-0.safetensors", "published-1.safetensors"]
    assert "its progress continues in 3 of 3" in (tmp_path / "one-0.log").read_text()


@pytest.mark.long
def test_lost_published_copies_are_reported_and_nothing_hangs(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with system_in(tmp_path, run={"max_steps": 10_000}, sync=ALONE) as system:
        job = Job("fsdp", system.addresses[0], "one", tmp_path, 4, optimizer="adamw")
        with ranks(replace(job, checkpoint=kept), 2) as learner:
            learner.require_success()
        (kept / "one/00000001.ranks/published-0.safetensors").unlink()
        with ranks(replace(job, checkpoint=kept), 2) as learner:
            codes = learner.wait()
            assert set(codes) & {0, None} == set(), codes
            assert "elements of vector 0" in learner.log(0)


@pytest.mark.long
def test_a_pipeline_does_not_use_a_single_process_checkpoint(tmp_path: Path) -> None:
    """Rank 0 has only its stage, so it cannot match the optimizer's state to parameters."""
    with system_in(tmp_path, run={"max_steps": 10_000}, sync=ALONE) as system:
        job = Job("plain", system.addresses[0], "one", tmp_path, 4, optimizer="adamw")
        job = replace(job, checkpoint=tmp_path / "kept")
        with ranks(job, 1) as learner:
            learner.require_success()
        with ranks(replace(job, kind="pipeline"), 3) as learner:
            learner.require_success()
            log = learner.log(0)
        assert "its checkpoint is of a single-process learner: it belongs to another model" in log


def test_each_rank_restores_its_own_objects(tmp_path: Path) -> None:
    trained(tmp_path, ("ddp", 2), ("ddp", 2), ("fsdp", 3))
    logs = [(tmp_path / f"one-{rank}.log").read_text() for rank in range(3)]
    for rank in range(2):
        assert f"the position of rank {rank} is back" in logs[rank]
    assert "was written by 2 ranks and is read by 3" in logs[0]
    assert "the position of rank 0 is back" in logs[2]


@pytest.mark.long
def test_a_learner_killed_between_steps_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with system_in(tmp_path, run={"max_steps": 150}, sync=ASYNCHRONOUS) as system:
        job = Job("fsdp", system.addresses[0], "one", tmp_path, pause=0.05, optimizer="adamw")
        job = replace(job, checkpoint=kept, interval_seconds=0.5)
        with ranks(job, 2) as learner:
            wait_for_step(learner, 60)
            learner.send(1, signal.SIGKILL)
            assert set(learner.wait()) & {0, None} == set()
        files = sorted(path.name for path in (kept / "one").iterdir())
        assert len([name for name in files if name.endswith(".safetensors")]) == 2, files
        with ranks(replace(job, pause=0.0), 3) as learner:
            wait_for_log(learner, "its progress continues")
            learner.require_success()
            log = learner.log(0)
        begun = int(log.rsplit("begins at step ", 1)[1].split()[0])
        assert begun >= 20


def test_a_disk_that_is_not_shared_is_rejected_on_every_rank(tmp_path: Path) -> None:
    job = Job("ddp", NOWHERE, "one", tmp_path, trouble="another disk", checkpoint=tmp_path / "kept")
    with ranks(job, 2) as learner:
        assert set(learner.wait()) & {0, None} == set()
        for rank in range(2):
            assert "rank 1 does not see what rank 0 wrote into" in learner.log(rank)


def test_a_failed_checkpoint_is_reported_and_training_continues(tmp_path: Path) -> None:
    with system_in(tmp_path, run={"max_steps": 60}, sync=ASYNCHRONOUS) as system:
        job = Job("fsdp", system.addresses[0], "one", tmp_path, pause=0.02, trouble="full disk")
        job = replace(job, checkpoint=tmp_path / "kept", interval_seconds=0.3)
        with ranks(job, 2) as learner:
            learner.require_success()
            log = learner.log(0)
    assert "rank 1: OSError(28, 'No space left on device')" in log
    assert "one lost a checkpoint and continues training" in log
    assert not list((tmp_path / "kept/one").glob("0*"))


def test_a_learner_writes_its_part_of_a_run_checkpoint(tmp_path: Path) -> None:
    with system_in(tmp_path, run={"max_steps": 10_000}, sync=ASYNCHRONOUS) as system:
        job = Job("fsdp", system.addresses[0], "one", tmp_path, pause=0.02, optimizer="adamw")
        with ranks(replace(job, checkpoint=tmp_path / "kept"), 2) as learner:
            wait_for_step(learner, 10)
            coordinator = system.shards[0]._host
            assert coordinator is not None
            number = system.call(coordinator.want_checkpoint).number
            deadline = time.monotonic() + 120
            while (found := system.call(lambda: coordinator.checkpoint_answer(number))).words:
                assert time.monotonic() < deadline, found
                time.sleep(0.1)
        assert (found.state, found.missing) == ("complete", ())
        parts = [tmp_path / f"kept/one/00000001.checkpoint-{number}.safetensors"]
        parts += (tmp_path / "kept/one/00000001.ranks").iterdir()
        parts += (system.folder / f"checkpoints/{number:06d}").glob("*.safetensors")
        assert found.nbytes == sum(part.stat().st_size for part in parts)
