"""Learners and a syncer joined by a link that is too slow, or down for a while."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from network.conftest import Saturated
from network.network_runs import finish, merged, records, start, step_times
from network.network_spaces import WORKER, Link, link, run_ip, spaces, unavailable
from process.process_runs import PATIENCE, STEP_SECONDS_MAX
from replay_check import assert_replays

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are available"),
]

STEP_SECONDS = 0.2


def longest_step(folder: Path) -> float:
    times = [step_times(folder, f"learner-{i}") for i in range(2)]
    return max(b - a for each in times for a, b in pairwise(each))


def wait_for_steps(made: Link, folder: Path, count: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + PATIENCE * seconds
    path = folder / "run" / "tape" / "learner-0.jsonl"
    while not path.exists() or len(step_times(folder, "learner-0")) < count:
        assert time.monotonic() < deadline, made.logs()
        time.sleep(0.3)


def test_namespaces_of_a_killed_test_run_are_replaced() -> None:
    """Otherwise every later run on this machine fails."""
    name = f"ddtest{WORKER}-left"
    run_ip("netns", "add", name)
    refused = pytest.raises(OSError, match=f'netns add {name} ended with 1: .*"/.*/{name}"')
    with spaces(name), refused:
        run_ip("netns", "add", name)
    assert not Path("/run/netns", name).exists()


@pytest.mark.long
def test_on_a_saturated_link_no_learner_is_evicted_or_waits(saturated: Saturated) -> None:
    """The link carries a third of what the fragments need; heartbeats never queue."""
    shard = records(saturated.folder, "shard-0")
    evicted = [r.data for r in shard if r.type == "Evict" and "left" not in r.data["reason"]]
    assert not evicted
    assert len(merged(saturated.folder)) >= 8, "rounds continue, more slowly"
    assert longest_step(saturated.folder) < STEP_SECONDS_MAX, "no learner waited for the link"
    assert_replays(saturated.folder / "run")


@pytest.mark.parametrize(
    ("relay", "seconds"),
    [
        pytest.param(False, 14, id="direct"),  # longer than a lease
        pytest.param(True, 60, id="behind-a-relay", marks=pytest.mark.long),
    ],
)
def test_learners_train_while_the_link_is_cut_and_are_admitted_again(
    relay: bool, seconds: int, tmp_path: Path
) -> None:
    with link(tmp_path, mbit=100) as made:
        small = {"width": 32, "layers": 1, "heads": 2}
        steps = 90 + int(seconds / STEP_SECONDS)
        start(made, tmp_path, steps=steps, step_seconds=STEP_SECONDS, relay=relay, **small)
        wait_for_steps(made, tmp_path, 30)
        cut_at = time.monotonic()
        made.cut()
        time.sleep(seconds)
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
        assert applied, "it applied global weights again"
    folded = [r for r in shard if r.type == "Fold" and r.at > healed_at]
    assert {r.data["learner"] for r in folded} == {"learner-0", "learner-1"}
    if relay:
        assert any(r.type == "SumArrived" and r.at > healed_at for r in shard)
    assert longest_step(tmp_path) < STEP_SECONDS_MAX
    assert_replays(tmp_path / "run")
