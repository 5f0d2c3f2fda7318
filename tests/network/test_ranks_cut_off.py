"""One rank of a learner is cut off: its packets are lost, and nobody is told.

Rank 1 is at the near end of the link, all else at the far one: rank 0, a plain learner, the syncer.
The ranks talk in one network, learner and syncer in another.
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
from ranks.rank_learners import ASYNCHRONOUS, Ranks, ranks, several_carriers, steps_told, until_told
from ranks.rank_program import Job
from replay_check import assert_replays

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "namespaces are here"),
]

RANKS, SYNCER = NETWORKS
SYNCER_ADDRESS = f"{SYNCER}.1"
TOKEN = "a secret"
CUT_SECONDS = 25.0
STEP_SECONDS = 0.2


@contextmanager
def system_in(folder: Path, max_steps: int) -> Iterator[System]:
    """A syncer at the far end."""
    run = {"learners": 2, "max_steps": max_steps}
    (folder / "token").write_text(TOKEN)
    syncer = {"host": SYNCER_ADDRESS, "token_file": folder / "token"}
    system = System(folder / "run", token=TOKEN, run=run, sync=ASYNCHRONOUS, syncer=syncer)
    try:
        system.call(lambda: enter(FAR))  # its thread makes the sockets
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
    """The cut lasts so long."""
    time.sleep(max(0.0, since + seconds - time.monotonic()))


def sent_at(folder: Path) -> dict[tuple[int, str], float]:
    """When the learner of several ranks began to send each contribution."""
    return {_key(r.data): r.at for r in records(folder, "one") if r.type == "SendBody"}


def folded_at(folder: Path) -> dict[tuple[int, str], float]:
    """When the shard took each of them."""
    folds = (r for r in records(folder, "shard-0") if r.type == "Fold")
    return {_key(r.data): r.at for r in folds if r.data["learner"] == "one"}


def _key(data: dict[str, Any]) -> tuple[int, str]:
    return data["fragment"], f"{data['ask']['term']}.{data['ask']['number']}"


def until_folded(learner: Ranks, folder: Path, since: float) -> None:
    """Waits until the shard has taken what the learner has begun to send since."""
    deadline = time.monotonic() + 300
    while True:
        sent = sent_at(folder)
        if any(sent.get(ask, 0.0) > since for ask in folded_at(folder)):
            return
        assert time.monotonic() < deadline, learner.log(0)[-3000:]
        assert None in learner.wait(0.0), learner.log(0)[-3000:]
        time.sleep(0.5)


def assert_whole(folder: Path) -> None:
    """What is folded has arrived whole, and is in one version."""
    shard = records(folder, "shard-0")
    own = [r for r in shard if r.data.get("learner") == "one"]
    arrived = Counter(_key(r.data) for r in own if r.type == "BodyArrived")
    folded = Counter(_key(r.data) for r in own if r.type == "Fold")
    assert folded <= arrived
    assert set(folded.values()) == {1}
    assert_replays(folder / "run")


def assert_it_lost_no_step(folder: Path) -> None:
    """The other learner."""
    times = step_times(folder, "other")
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < 1.5, "half of the shortest interval of the protocol"
    assert len(gaps) > 0.8 * (times[-1] - times[0]) / median(gaps)


@pytest.mark.long
def test_cut_off_from_rank_0_for_a_while_the_learner_goes_on(tmp_path: Path) -> None:
    """What was silent for so long is tried again after as long: then the budget is half spent."""
    with (
        link(tmp_path, mbit=None) as made,
        system_in(tmp_path, 450) as system,
        ranks(job_of(system, "other", "plain"), 1, main) as other,
        ranks(job_of(system, "one", "fsdp"), 2, main) as learner,
    ):
        steps_told(learner, 10)
        made.silence(RANKS)
        cut_at = time.monotonic()
        until_told(learner, "rank 1 of this learner says nothing")
        passed(cut_at, CUT_SECONDS)
        made.hear(RANKS)
        healed_at = time.monotonic()
        until_told(learner, "rank 1 of this learner goes on")
        until_folded(learner, tmp_path, healed_at)
        learner.ends_well()
        other.ends_well()
        system.wait_finished()
    assert_it_lost_no_step(tmp_path)
    assert_whole(tmp_path)


@pytest.mark.long
def test_cut_off_for_good_its_ranks_end_and_it_comes_back(tmp_path: Path) -> None:
    """They end by the timeouts of the program's own collectives, on both sides."""
    with (
        link(tmp_path, mbit=None) as made,
        system_in(tmp_path, 250) as system,
        ranks(job_of(system, "other", "plain"), 1, main) as other,
    ):
        with ranks(job_of(system, "one", "fsdp"), 2, hasty) as learner:
            steps_told(learner, 10)
            made.silence(RANKS)
            until_told(learner, "rank 1 of this learner says nothing")
            assert set(learner.wait(60)) & {0, None} == set(), learner.log(1)[-3000:]
        ended_at = time.monotonic()
        with ranks(job_of(system, "one", "plain"), 1, main) as again:
            until_folded(again, tmp_path, ended_at)
            again.ends_well()
        other.ends_well()
        system.wait_finished()
    assert_it_lost_no_step(tmp_path)
    assert_whole(tmp_path)


@pytest.mark.long
def test_a_carrier_that_is_cut_off_from_the_syncer_has_nothing_merged_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = several_carriers(monkeypatch)
    with (
        link(tmp_path, mbit=None) as made,
        system_in(tmp_path, 350) as system,
        ranks(job_of(system, "other", "plain", block=options["block"]), 1, main) as other,
        ranks(job_of(system, "one", "fsdp", **options), 2, main) as learner,
    ):
        steps_told(learner, 4)
        until_folded(learner, tmp_path, 0.0)
        made.silence(SYNCER)
        cut_at = time.monotonic()
        until_told(learner, "rank 1 of this learner carries no fragments", 120.0)
        passed(cut_at, CUT_SECONDS)
        healed_at = time.monotonic()
        made.hear(SYNCER)
        until_told(learner, "rank 1 of this learner carries fragments again")
        until_folded(learner, tmp_path, healed_at)
        learner.ends_well()
        other.ends_well()
        system.wait_finished()
    under_way = cut_at + 5.0  # what had arrived whole
    assert not [at for at in folded_at(tmp_path).values() if under_way < at < healed_at]
    assert_it_lost_no_step(tmp_path)
    assert_whole(tmp_path)


@pytest.mark.long
def test_carriers_of_machines_of_one_name_find_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = several_carriers(monkeypatch)
    with (
        link(tmp_path, mbit=None),
        system_in(tmp_path, 60) as system,
        ranks(job_of(system, "other", "plain", block=options["block"]), 1, main) as other,
        ranks(job_of(system, "one", "fsdp", **options), 2, nameless) as learner,
    ):
        steps_told(learner, 4)
        until_folded(learner, tmp_path, 0.0)
        learner.ends_well()
        other.ends_well()
        system.wait_finished()
    assert_whole(tmp_path)


@pytest.mark.long
def test_a_run_ends_though_a_carrier_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The closing rounds wait for its learner, but not for ever; here each is tried but once."""
    monkeypatch.setattr(rounds, "SWEEP_TRIES_MAX", 1)
    options = several_carriers(monkeypatch)
    with (
        link(tmp_path, mbit=None) as made,
        system_in(tmp_path, 100) as system,
        ranks(job_of(system, "other", "plain", block=options["block"]), 1, main) as other,
        ranks(job_of(system, "one", "fsdp", **options), 2, main) as learner,
    ):
        steps_told(learner, 4)
        until_folded(learner, tmp_path, 0.0)
        made.silence(SYNCER)
        learner.wait(240)
        learner.ends_well()
        other.ends_well()
        system.wait_finished()
    assert_it_lost_no_step(tmp_path)
    assert_whole(tmp_path)
