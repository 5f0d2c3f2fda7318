"""Learners and a syncer joined by a link that is too slow, or gone for a while."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.tape import TapeReader
from network.spaces import FAR, FAR_ADDRESS, NEAR, Link, link, unavailable
from replay import assert_replays

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are here"),
]

STEP_SECONDS = 0.2


def run_over(made: Link, folder: Path, steps: int, **workload: Any) -> None:
    """A shard at the far end, two learners at the near one."""
    (folder / "token").write_text("a secret")
    config = RunConfig(
        run={
            "folder": folder / "run",
            "learners": 2,
            "budget_steps": steps,
            "evaluator": False,
        },
        sync={"fragments": 8, "period": 8, "overlap": 2},
        syncer={"host": FAR_ADDRESS, "port": 7070, "token_file": folder / "token"},
        workload={
            "name": "paced",
            "options": {
                "step_seconds": STEP_SECONDS,
                "corpus_bytes_max": 200_000,
                "warmup_steps": 0,
                "batch_size": 1,
                **workload,
            },
        },
    )
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    made.start(FAR, "syncer", str(path), "--shard", "0")
    for index in range(2):
        made.start(NEAR, "learner", str(path), "--index", str(index))


def finish(made: Link, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in made.started):
        assert time.monotonic() < deadline, made.logs()
        time.sleep(0.2)
    assert [process.returncode for process in made.started] == [0, 0, 0], made.logs()


def records(folder: Path, who: str) -> list[Record]:
    return list(TapeReader(folder / "run" / "tape" / f"{who}.jsonl"))


def step_times(folder: Path, learner: str) -> list[float]:
    return [r.at for r in records(folder, learner) if r.type == "StepFinished"]


def longest_step(folder: Path) -> float:
    times = [step_times(folder, f"learner-{i}") for i in range(2)]
    return max(b - a for each in times for a, b in pairwise(each))


def wait_for_steps(made: Link, folder: Path, count: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    path = folder / "run" / "tape" / "learner-0.jsonl"
    while not path.exists() or len(step_times(folder, "learner-0")) < count:
        assert time.monotonic() < deadline, made.logs()
        time.sleep(0.3)


def test_on_a_saturated_link_nobody_is_evicted_and_nobody_waits(tmp_path: Path) -> None:
    """400 kbit/s carry about a tenth of what the fragments need; heartbeats never queue behind."""
    with link(tmp_path, mbit=0.4) as made:
        run_over(made, tmp_path, steps=90, width=64, layers=2)
        finish(made, seconds=120)
    shard = records(tmp_path, "shard-0")
    evicted = [r.data for r in shard if r.type == "Evict" and "left" not in r.data["reason"]]
    assert not evicted
    merged = [r for r in shard if r.type == "RoundFinished" and r.data["verdict"] == "merged"]
    assert len(merged) >= 8, "rounds go on, more slowly"
    assert longest_step(tmp_path) < 1.5, "no learner waited for the link"
    assert_replays(tmp_path / "run")


def test_learners_train_on_while_the_link_is_cut_and_are_taken_in_again(tmp_path: Path) -> None:
    with link(tmp_path, mbit=100) as made:
        run_over(made, tmp_path, steps=160, width=32, layers=1, heads=2)
        wait_for_steps(made, tmp_path, 30)
        cut_at = time.monotonic()
        made.cut()
        time.sleep(14)  # longer than a lease
        made.heal()
        healed_at = time.monotonic()
        finish(made, seconds=120)
    shard = records(tmp_path, "shard-0")
    evicted = [r for r in shard if r.type == "Evict" and cut_at < r.at < healed_at]
    assert {r.data["learner"] for r in evicted} == {"learner-0", "learner-1"}
    for name in ("learner-0", "learner-1"):
        times = step_times(tmp_path, name)
        during = [at for at in times if cut_at < at < healed_at]
        assert len(during) >= 0.8 * (healed_at - cut_at) / median(b - a for a, b in pairwise(times))
        applied = [r for r in records(tmp_path, name) if r.type == "Apply" and r.at > healed_at]
        assert applied, "it took global weights again"
    folded = [r for r in shard if r.type == "Fold" and r.at > healed_at]
    assert {r.data["learner"] for r in folded} == {"learner-0", "learner-1"}
    assert longest_step(tmp_path) < 1.5
    assert_replays(tmp_path / "run")
