"""One rank of a learner is cut off: its packets are lost without an error.

Rank 1 is at the near end of the link. Rank 0, a plain learner and the syncer are at the far end.
The ranks communicate in one network, learner and syncer in another.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from decoupled_diloco.protocol import rounds
from integration.real_system import System
from network.apart_program import hasty, main, nameless
from network.network_runs import records, step_times
from network.network_spaces import FAR, NETWORKS, enter, link, unavailable
from ranks.rank_learners import (
    ASYNCHRONOUS,
    Ranks,
    ranks,
    several_sync_ranks,
    wait_for_log,
    wait_for_step,
)
from ranks.rank_program import Job
from replay_check import assert_replays

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are available"),
]

RANKS, SYNCER = NETWORKS
SYNCER_ADDRESS = f"{SYNCER}.1"
TOKEN = "a secret"
CUT_SECONDS = 25.0
STEP_SECONDS = 0.2


@contextmanager
def system_in(folder: Path, max_steps: int) -> Iterator[System]:
    """Create a syncer at the far end."""
    run = {"learners": 2, "max_steps": max_steps}
    (folder / "token").write_text(TOKEN)
    syncer = {"host": SYNCER_ADDRESS, "token_file": folder / "token"}
    system = System(folder / "run", token=TOKEN, run=run, sync=ASYNCHRONOUS, syncer=syncer)
    try:
        system.call(lambda: enter(FAR))  # its thread creates the sockets
        system.start()
        yield system
    finally:
        system.close()


def job_of(system: System, name: str, kind: str, **options: Any) -> Job:
    tape = system.folder / "tape" / f"{name}.jsonl"
    folder, address = system.folder.parent, system.addresses[0]
    job = Job(kind, address, name, folder, pause=STEP_SECONDS, token=TOKEN, event_tape=tape)
    return replace(job, **options)


def passed(since: float, seconds: float) -> None:
    """Wait until so much time has passed since an instant of this process's clock."""
    time.sleep(max(0.0, since + seconds - time.monotonic()))


def sent_at(folder: Path) -> dict[tuple[int, str], float]:
    """Return when the multi-rank learner began to send each contribution."""
    return {_key(r.data): r.at for r in records(folder, "one") if r.type == "SendBody"}


def folded_at(folder: Path) -> dict[tuple[int, str], float]:
    """Return when the shard folded each of them."""
    folds = (r for r in records(folder, "shard-0") if r.type == "Fold")
    return {_key(r.data): r.at for r in folds if r.data["learner"] == "one"}


def _key(data: dict[str, Any]) -> tuple[int, str]:
    return data["fragment"], f"{data['ask']['term']}.{data['ask']['number']}"


def until_folded(learner: Ranks, folder: Path, since: float) -> None:
    """Wait until the shard has folded the contributions that the learner began to send since."""
    deadline = time.monotonic() + 300
    while True:
        sent = sent_at(folder)
        if any(sent.get(ask, 0.0) > since for ask in folded_at(folder)):
            return
        assert time.monotonic() < deadline, learner.log(0)[-3000:]
        assert None in learner.wait(0.0), learner.log(0)[-3000:]
        time.sleep(0.5)


def assert_whole(folder: Path) -> None:
    """Check that every folded contribution arrived whole, and is in one version."""
    shard = records(folder, "shard-0")
    own = [r for r in shard if r.data.get("learner") == "one"]
    arrived = Counter(_key(r.data) for r in own if r.type == "BodyArrived")
    folded = Counter(_key(r.data) for r in own if r.type == "Fold")
    assert folded <= arrived
    assert set(folded.values()) == {1}
    assert_replays(folder / "run")


def assert_it_lost_no_step(folder: Path) -> None:
    """Check the other learner."""
    times = step_times(folder, "other")
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 1.5, "half of the protocol's shortest interval"
    assert len(gaps) > 0.8 * (times[-1] - times[0]) / median(gaps)


@pytest.mark.long
def test_a_learner_continues_after_a_rank_was_cut_off_from_rank_0(tmp_path: Path) -> None:
    """A silent connection is tried again after as long a silence: then the budget is half spent."""
    with (
        link(tmp_path, mbit=None) as made,
        system_in(tmp_path, 450) as system,
        ranks(job_of(system, "other", "plain"), 1, main) as other,
        ranks(job_of(system, "one", "fsdp"), 2, main) as learner,
    ):
        wait_for_step(learner, 10)
        made.silence(RANKS)
        cut_at = time.monotonic()
        wait_for_log(learner, "rank 1 of this learner does not respond")
        passed(cut_at, CUT_SECONDS)
        made.hear(RANKS)
        healed_at = time.monotonic()
        wait_for_log(learner, "rank 1 of this learner continues")
        until_folded(learner, tmp_path, healed_at)
        learner.require_success()
        other.require_success()
        system.wait_finished()
    assert_it_lost_no_step(tmp_path)
    assert_whole(tmp_path)


@pytest.mark.long
def test_a_learner_with_a_rank_cut_off_for_good_ends_and_returns(tmp_path: Path) -> None:
    """Both sides end by the timeouts of the program's own collectives."""
    with (
        link(tmp_path, mbit=None) as made,
        system_in(tmp_path, 250) as system,
        ranks(job_of(system, "other", "plain"), 1, main) as other,
    ):
        with ranks(job_of(system, "one", "fsdp"), 2, hasty) as learner:
            wait_for_step(learner, 10)
            made.silence(RANKS)
            wait_for_log(learner, "rank 1 of this learner does not respond")
            assert set(learner.wait(60)) & {0, None} == set(), learner.log(1)[-3000:]
        ended_at = time.monotonic()
        with ranks(job_of(system, "one", "plain"), 1, main) as again:
            until_folded(again, tmp_path, ended_at)
            again.require_success()
        other.require_success()
        system.wait_finished()
    assert_it_lost_no_step(tmp_path)
    assert_whole(tmp_path)


@pytest.mark.long
def test_no_part_of_a_sync_rank_that_is_cut_off_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = several_sync_ranks(monkeypatch)
    with (
        link(tmp_path, mbit=None) as made,
        system_in(tmp_path, 350) as system,
        ranks(job_of(system, "other", "plain", block=options["block"]), 1, main) as other,
        ranks(job_of(system, "one", "fsdp", **options), 2, main) as learner,
    ):
        wait_for_step(learner, 4)
        until_folded(learner, tmp_path, 0.0)
        made.silence(SYNCER)
        cut_at = time.monotonic()
        wait_for_log(learner, "rank 1 of this learner syncs no fragments", 120.0)
        passed(cut_at, CUT_SECONDS)
        healed_at = time.monotonic()
        made.hear(SYNCER)
        wait_for_log(learner, "rank 1 of this learner syncs fragments again")
        until_folded(learner, tmp_path, healed_at)
        learner.require_success()
        other.require_success()
        system.wait_finished()
    under_way = cut_at + 5.0  # contributions that had arrived whole
    assert not [at for at in folded_at(tmp_path).values() if under_way < at < healed_at]
    assert_it_lost_no_step(tmp_path)
    assert_whole(tmp_path)


@pytest.mark.long
def test_sync_ranks_on_machines_with_the_same_name_find_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = several_sync_ranks(monkeypatch)
    with (
        link(tmp_path, mbit=None),
        system_in(tmp_path, 60) as system,
        ranks(job_of(system, "other", "plain", block=options["block"]), 1, main) as other,
        ranks(job_of(system, "one", "fsdp", **options), 2, nameless) as learner,
    ):
        wait_for_step(learner, 4)
        until_folded(learner, tmp_path, 0.0)
        learner.require_success()
        other.require_success()
        system.wait_finished()
    assert_whole(tmp_path)


@pytest.mark.long
def test_a_run_ends_although_a_sync_rank_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closing rounds wait for its learner, but not forever; here each is tried only once."""
    monkeypatch.setattr(rounds, "SWEEP_TRIES_MAX", 1)
    options = several_sync_ranks(monkeypatch)
    with (
        link(tmp_path, mbit=None) as made,
        system_in(tmp_path, 100) as system,
        ranks(job_of(system, "other", "plain", block=options["block"]), 1, main) as other,
        ranks(job_of(system, "one", "fsdp", **options), 2, main) as learner,
    ):
        wait_for_step(learner, 4)
        until_folded(learner, tmp_path, 0.0)
        made.silence(SYNCER)
        learner.wait(240)
        learner.require_success()
        other.require_success()
        system.wait_finished()
    assert_it_lost_no_step(tmp_path)
    assert_whole(tmp_path)
