"""Shards with standbys: killed, stopped, or cut off from the shared folder; their runs continue."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decoupled_diloco.config.addresses import alternatives
from decoupled_diloco.errors import LeaseError
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.tape.records import Record
from process.process_runs import (
    STEP_SECONDS_MAX,
    config_of,
    health,
    local_run,
    longest_step,
    records,
    send,
    wait,
    when,
)
from replay_check import assert_replays

LEASE_SECONDS = 2.0
STANDBYS = {"shards": 2, "standby": True, "lease_seconds": LEASE_SECONDS}


def phase(run: LocalRun, shard: int) -> str:
    """Return the phase of the shard's process that answers."""
    answers = [health(each) for each in alternatives(run.addresses[shard])]
    return next((str(answer["phase"]) for answer in answers if answer), "")


def acting(folder: Path, shard: int) -> list[tuple[str, int]]:
    """Return the processes that acted for a shard, in order: process and claim."""
    files = [f"shard-{shard}", f"shard-{shard}-standby"]
    taken = [
        r for f in files if (folder / "tape" / f"{f}.jsonl").exists() for r in records(folder, f)
    ]
    taken = sorted((r for r in taken if r.type == "TookOver"), key=lambda r: r.wall)
    return [(r.data["process"], r.data["claim"]) for r in taken]


def both(folder: Path, shard: int) -> list[Record]:
    """Return the records of both processes of a shard, in order."""
    files = [f"shard-{shard}", f"shard-{shard}-standby"]
    found = [r for f in files for r in records(folder, f)]
    return sorted(found, key=lambda r: (r.wall, r.seq))


def version_of(plain: dict[str, int]) -> tuple[int, int]:
    return (plain["term"], plain["counter"])


def assert_versions_only_go_up(own: list[Record]) -> None:
    for fragment in {r.data["fragment"] for r in own if r.type == "Merge"}:
        mine = [
            version_of(r.data["version"])
            for r in own
            if r.type in ("Merge", "Install") and r.data["fragment"] == fragment
        ]
        assert mine == sorted(mine), "versions only increase"
        assert len({term for term, _ in mine}) >= 2, "a new claim has a new term"


def assert_nothing_is_lost(own: list[Record]) -> None:
    """Check that the standby has read every version that was announced before the takeover."""
    recovered = next(r for r in own if r.type == "DiskRead")
    told: dict[int, tuple[tuple[int, int], str]] = {}
    for record in own[: own.index(recovered)]:
        message = record.data.get("message", {})
        if record.type == "Broadcast" and message["type"] == "Published":
            told[message["fragment"]] = (version_of(message["version"]), message["digest"])
    copies = {c["fragment"]: c for c in recovered.data["copies"]}
    assert told.keys() <= copies.keys()
    for fragment, (version, digest) in told.items():
        copy = copies[fragment]
        assert version_of(copy["version"]) >= version
        assert copy["digest"] == digest or version_of(copy["version"]) > version


@pytest.mark.parametrize("shard", [1, pytest.param(0, marks=pytest.mark.smoke)])
def test_a_standby_takes_over_from_a_shard_that_is_killed(tmp_path: Path, shard: int) -> None:
    """Shard 0 takes the coordinator with it: the learner that is killed afterwards joins again."""
    folder = tmp_path / "run"
    config = config_of(folder, run={"learners": 2, "max_steps": 450}, syncer=STANDBYS)

    def script() -> Iterator[None]:
        yield from when(lambda: run.used_budget() > 0.05)
        send(run, f"shard-{shard}", signal.SIGKILL)
        yield from when(lambda: len(acting(folder, shard)) == 2)
        yield from when(lambda: phase(run, shard) == "running")
        if shard == 0:
            run.supervisor.kill("learner-1", restart=True)

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script(), seconds=150.0)
    assert outcome.finished, outcome.reason
    assert acting(folder, shard) == [(f"shard-{shard}", 1), (f"shard-{shard}-standby", 2)]
    assert acting(folder, 1 - shard) == [(f"shard-{1 - shard}", 1)]
    assert longest_step(folder, "learner-0") < STEP_SECONDS_MAX
    own = both(folder, shard)
    assert_versions_only_go_up(own)
    assert_nothing_is_lost(own)
    if shard == 0:
        again = records(folder, "coordinator-standby")
        assert any(r.type == "Admit" and r.data["learner"] == "learner-1" for r in again)
    assert assert_replays(folder) > 500


@pytest.mark.parametrize("shard", [1, 0])
def test_a_stopped_shard_commits_nothing_after_it_continues(tmp_path: Path, shard: int) -> None:
    folder = tmp_path / "run"
    config = config_of(folder, run={"learners": 2, "max_steps": 450}, syncer=STANDBYS)
    stopped = f"shard-{shard}"

    def script() -> Iterator[None]:
        yield from when(lambda: run.used_budget() > 0.05)
        send(run, stopped, signal.SIGSTOP)
        yield from when(lambda: len(acting(folder, shard)) == 2)
        yield from when(lambda: phase_at(run, shard, 1) == "running")
        send(run, stopped, signal.SIGCONT)
        yield from when(lambda: not run.supervisor.children[stopped].running)
        assert run.supervisor.children[stopped].code == LeaseError.exit_code

    with local_run(config) as run:
        run.start()
        outcome = wait(run, script(), seconds=150.0)
    assert outcome.finished, outcome.reason
    assert acting(folder, shard) == [(stopped, 1), (f"{stopped}-standby", 2)]
    assert longest_step(folder, "learner-0") < STEP_SECONDS_MAX
    takeover = next(r.wall for r in both(folder, shard) if r.data.get("claim") == 2)
    late = [r for r in records(folder, stopped) if r.wall > takeover and r.kind != "sample"]
    assert not late, "its machine received nothing more"
    own = both(folder, shard)
    assert_versions_only_go_up(own)
    assert_nothing_is_lost(own)
    # The reason is its expired lease, or the newer claim that a commit found.
    steps_down = [r for r in records(folder, f"{stopped}.claims") if r.type == "StepDown"]
    assert len(steps_down) <= 1
    assert assert_replays(folder) > 500


def test_a_shard_that_cannot_reach_the_shared_folder_stops_committing(tmp_path: Path) -> None:
    """It sees the claims through a separate link, which is removed; its standby does not use it."""
    folder = tmp_path / "run"
    config = config_of(folder, run={"learners": 2, "max_steps": 450}, syncer=STANDBYS)
    mounted = tmp_path / "mounted"

    def script() -> Iterator[None]:
        yield from when(lambda: run.used_budget() > 0.05)
        (mounted / "run" / "claims").unlink()
        yield from when(lambda: not run.supervisor.children["shard-1"].running)
        yield from when(lambda: len(acting(folder, 1)) == 2)
        yield from when(lambda: phase_at(run, 1, 1) == "running")

    with local_run(config) as run:
        (run.path / "durable").mkdir()
        see_through_a_separate_link(run, mounted)
        run.start()
        outcome = wait(run, script(), seconds=150.0)
    assert outcome.finished, outcome.reason
    assert acting(folder, 1)[:2] == [("shard-1", 1), ("shard-1-standby", 2)]
    # Its lease expired, or a commit found earlier that its claim cannot be confirmed.
    ends = ("StepDown", "HolderLeaves")
    lost = next(r for r in records(folder, "shard-1.claims") if r.type in ends)
    assert lost.type == "HolderLeaves" or "could not be renewed" in lost.data["why"]
    taken = next(r for r in both(folder, 1) if r.data.get("claim") == 2)
    assert not [r for r in records(folder, "shard-1") if r.type == "Merge" and r.wall > lost.wall]
    assert lost.wall < taken.wall, "one process stops before the other one begins"
    assert_nothing_is_lost(both(folder, 1))
    assert assert_replays(folder) > 500


def see_through_a_separate_link(run: LocalRun, mounted: Path) -> None:
    """Make shard 1's first process reach each entry of the run folder through a symbolic link."""
    inside = mounted / "run"
    inside.mkdir(parents=True)
    for name in ("claims", "durable", "tape", "run.toml"):
        (inside / name).symlink_to(run.path / name)
    start = run.supervisor.start

    def start_through_the_link(name: str, arguments: list[str], **options: Any) -> None:
        through = ["--set", f"run.folder={json.dumps(str(inside))}"] if name == "shard-1" else []
        start(name, [*arguments, *through], **options)

    run.supervisor.start = start_through_the_link  # type: ignore[method-assign]


def phase_at(run: LocalRun, shard: int, turn: int) -> str:
    """Return the phase of one of the two processes of a shard."""
    return str(health(alternatives(run.addresses[shard])[turn]).get("phase"))


def test_a_shard_that_is_asked_to_stop_releases_its_claim_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_of(
        folder,
        run={"learners": 2, "max_steps": 2000},  # the process ends long before
        syncer={**STANDBYS, "lease_seconds": 60.0},
    )

    def script() -> Iterator[None]:
        yield from when(lambda: run.used_budget() > 0.05)
        send(run, "shard-1", signal.SIGTERM)
        yield from when(lambda: len(acting(folder, 1)) == 2)
        yield from when(lambda: phase_at(run, 1, 1) == "running")
        raise Enough

    with local_run(config) as run:
        run.start()
        with pytest.raises(Enough):
            wait(run, script(), seconds=100.0)
    assert acting(folder, 1) == [("shard-1", 1), ("shard-1-standby", 2)]
    assert_nothing_is_lost(both(folder, 1))
    assert_replays(folder)


def test_a_finished_run_continues_with_its_standbys(tmp_path: Path) -> None:
    """Its processes must not stop because the claims show that the run is over."""
    folder = tmp_path / "run"
    for claim, max_steps in ((1, 40), (2, 80)):
        config = config_of(
            folder,
            run={"learners": 1, "max_steps": max_steps},
            syncer={**STANDBYS, "shards": 1},
        )
        with local_run(config, resume=claim == 2) as run:
            run.start()
            outcome = wait(run)
        assert outcome.finished, outcome.reason
        assert {name: child.code for name, child in run.supervisor.children.items()} == {
            "shard-0": 0,
            "shard-0-standby": 0,
            "learner-0": 0,
        }
        assert len(acting(folder, 0)) == claim, "one process has acted all the time"
    assert_replays(folder)


class Enough(Exception):
    """The test has its result; the run need not end."""
