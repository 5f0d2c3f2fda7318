"""Failures of multi-rank learners, and the messages about them."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from cases import long_after
from ranks.rank_learners import (
    ASYNCHRONOUS,
    NOWHERE,
    ranks,
    several_sync_ranks,
    system_in,
    wait_for_log,
    wait_for_step,
)
from ranks.rank_program import WRAPPED, Job


@pytest.mark.parametrize(
    ("kind", "trouble", "message"),
    long_after(
        3,
        [
            (
                "fsdp",
                "another model",
                "ranks 0 (ours) and 1 (theirs) have different models: tensor 9",
            ),
            (
                "ddp",
                "another name",
                "rank 1 of this learner has name='another', rank 0 has 'one'",
            ),
            ("ddp", "too many sync ranks", "sync_ranks=3 is out of range: pass 1 to 2, because"),
            (
                "ddp",
                "on the meta device",
                "rank 1: parameter 'blocks.1.up.weight' is on the meta device: give it memory",
            ),
            (
                "tp",
                "partial",
                "rank 1: parameter 'head.weight' is placed as (Partial(sum),): a Partial parameter "
                "has no values on any rank; redistribute it to Shard or Replicate",
            ),
            ("fsdp", "not finite", "rank 1: the model's 'embedding.weight' has NaN"),
        ],
    ),
)
def test_ranks_that_do_not_fit_end_with_the_reason_on_every_rank(
    kind: str, trouble: str, message: str, tmp_path: Path
) -> None:
    sync_ranks = 3 if trouble == "too many sync ranks" else 1
    job = Job(kind, NOWHERE, "one", tmp_path, trouble=trouble, sync_ranks=sync_ranks)
    with ranks(job, 2) as learner:
        codes = learner.wait()
        assert 0 not in codes
        assert None not in codes
        for rank in range(2):
            assert message in learner.log(rank), learner.log(rank)[-3000:]


def test_an_address_for_the_checkpoints_of_ranks_is_refused(tmp_path: Path) -> None:
    with ranks(Job("ddp", NOWHERE, "one", tmp_path, checkpoint="s3://bucket/x"), 2) as learner:
        assert 0 not in learner.wait()
        for rank in range(2):
            assert (
                "checkpoint='s3://bucket/x' cannot be combined with several ranks: pass a folder "
                "that all ranks share; [run] store mirrors the run folder"
            ) in learner.log(rank)


def test_a_rank_without_a_learner_is_named(tmp_path: Path) -> None:
    with ranks(Job("fsdp", NOWHERE, "one", tmp_path, trouble="no learner"), 2) as learner:
        deadline = time.monotonic() + 240
        while "no Learner has been created yet on rank 1 of 2" not in learner.log(0):
            assert time.monotonic() < deadline, learner.log(0)
            time.sleep(0.2)


@pytest.mark.long
def test_ranks_that_wait_for_the_run_are_not_reported_as_diverged(tmp_path: Path) -> None:
    with ranks(Job("ddp", NOWHERE, "one", tmp_path), 2) as learner:
        wait_for_log(learner, "is not in the run yet")
        time.sleep(8.0)  # twice `STALLED_SECONDS` of these ranks
        assert "must make the same calls" not in learner.log(0) + learner.log(1)


@pytest.mark.long
def test_a_rank_that_takes_one_step_less_is_named(tmp_path: Path) -> None:
    with system_in(tmp_path, run={"max_steps": 10_000}, sync=ASYNCHRONOUS) as system:
        job = Job("ddp", system.addresses[0], "one", tmp_path, steps=6, trouble="a step fewer")
        with ranks(job, 2) as learner:
            codes = learner.wait()
            assert 0 not in codes
            assert None not in codes
            assert "rank 1 of this learner is at 'close' and rank 0 at 'step 5'" in learner.log(0)


@pytest.mark.long
@pytest.mark.parametrize("many", [True, False])
def test_a_stopped_rank_is_named_and_its_learner_continues_with_it(
    many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = several_sync_ranks(monkeypatch) if many else {}
    alone = options | {"sync_ranks": 1}
    with system_in(tmp_path, run={"max_steps": 100}, sync=ASYNCHRONOUS) as system:
        address = system.addresses[0]
        with (
            ranks(Job("plain", address, "other", tmp_path, pause=0.1, **alone), 1) as other,
            ranks(Job("tp", address, "one", tmp_path, pause=0.1, **options), 2) as learner,
        ):
            wait_for_step(learner, 4)
            learner.send(1, signal.SIGSTOP)
            made = other.log(0).count("step")
            wait_for_log(learner, "rank 1 of this learner does not respond")
            assert other.log(0).count("step") > made + 20, "the other learner waited"
            learner.send(1, signal.SIGCONT)
            wait_for_log(learner, "rank 1 of this learner continues")
            learner.require_success()
            other.require_success()
        system.wait_finished()


@pytest.mark.long
@pytest.mark.parametrize(("rank", "many"), [(1, True), (0, False), (1, False)])
def test_a_killed_rank_ends_the_others_and_the_learner_restarts_with_another_size(
    rank: int, many: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = several_sync_ranks(monkeypatch) if many else {}
    alone = options | {"sync_ranks": 1}
    with system_in(tmp_path, run={"max_steps": 60}, sync=ASYNCHRONOUS) as system:
        address = system.addresses[0]
        with ranks(Job("plain", address, "other", tmp_path, pause=0.1, **alone), 1) as other:
            with ranks(Job("fsdp", address, "one", tmp_path, pause=0.1, **options), 2) as learner:
                wait_for_step(learner, 4)
                learner.send(rank, signal.SIGKILL)
                codes = learner.wait(30)
                assert codes[rank] == -signal.SIGKILL
                assert codes[1 - rank] not in (0, None), learner.log(1 - rank)[-2000:]
            with ranks(Job("ddp", address, "one", tmp_path, pause=0.1, **options), 3) as again:
                again.require_success()
            other.require_success()
        system.wait_finished()


@pytest.mark.long
def test_learners_of_different_parallelism_train_in_one_run(tmp_path: Path) -> None:
    tables = {"run": {"learners": 3, "max_steps": 24}, "sync": {"quorum": 3}}
    with system_in(tmp_path, **tables) as system:
        address = system.addresses[0]
        with (
            ranks(Job("plain", address, "a", tmp_path, seed=1), 1) as plain,
            ranks(Job("fsdp", address, "b", tmp_path, seed=2, manner=WRAPPED), 2) as fsdp,
            ranks(Job("tp", address, "c", tmp_path, seed=3), 2) as tensor,
        ):
            for learner in (plain, fsdp, tensor):
                learner.require_success()
        system.wait_finished()
