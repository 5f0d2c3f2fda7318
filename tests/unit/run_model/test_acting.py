"""A shard whose process and standby act in turn is one shard to a reader of the tape."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.run_model import RunModel, read_run, run_of
from decoupled_diloco.run_model.facts import is_learner, is_shard
from decoupled_diloco.tape import TapeReader, TapeWriter
from decoupled_diloco.tape.samples import (
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
    Sample,
    TookOver,
)

WALL = 1_000_000.0
FIRST, STANDBY = "shard-1", "shard-1-standby"

LAUNCHER: tuple[tuple[float, Sample], ...] = (
    (0.0, ProcessStarted(FIRST, 11)),
    (0.1, ProcessStarted(STANDBY, 12)),
    (10.0, ProcessEnded(FIRST, None, 9)),
    (10.0, RestartScheduled(FIRST, 0.5)),
    (10.5, ProcessStarted(FIRST, 13)),
    (30.0, ProcessEnded(FIRST, 130, None)),
)
"""The first process is killed, restarts, stands by, and is asked to stop."""


def write(folder: Path, file: str, process: str, *samples: tuple[float, Sample]) -> None:
    begun = samples[0][0]
    path = folder / "tape" / f"{file}.jsonl"
    tape = TapeWriter(path, process, clock=lambda: begun, wall=lambda: WALL + begun)
    for at, sample in samples:
        tape.sample(at, sample)
    tape.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path, "launcher", "launcher", *LAUNCHER)
    write(tmp_path, f"{FIRST}.claims", f"{FIRST}.claims", (0.5, ProcessStarted("other", 1)))
    write(tmp_path, FIRST, FIRST, (1.0, TookOver(FIRST, 1, 1, 0.0)))
    write(tmp_path, STANDBY, FIRST, (15.5, TookOver(STANDBY, 1, 2, 5.5)))
    return tmp_path


def test_only_a_shards_own_name_is_a_shard() -> None:
    assert is_shard(FIRST)
    for other in (STANDBY, f"{FIRST}.claims", f"{STANDBY}.claims", f"{FIRST}, standing by"):
        assert not is_shard(other)
        assert not is_learner(other)


def test_the_history_has_one_shard_with_one_outage(run: Path) -> None:
    history = read_run(run)
    assert list(history.shards) == [FIRST]
    assert not history.trained
    lives = history.shards[FIRST].lives
    assert [life.started_at for life in lives] == [1.0, 15.5]
    [outage] = history.outages
    assert (outage.process, outage.down_at) == (FIRST, 10.0)
    remarks = [remark.text for remark in history.remarks]
    takeover = (
        "shard-1-standby acts for shard 1 by claim 2: the previous claim was last renewed 5.5 s ago"
    )
    assert takeover in remarks
    assert not any("claim 1" in remark for remark in remarks), "a first claim is not remarked"


def test_the_status_is_that_of_the_acting_process(run: Path) -> None:
    chronicle = run_of(TapeReader(run))
    assert list(chronicle.shards) == [FIRST]
    assert chronicle.shards[FIRST].phase not in ("down", "finished"), "another one acts"
    write(run, "more", "launcher", (40.0, ProcessEnded(STANDBY, None, 9)))
    assert run_of(TapeReader(run)).shards[FIRST].phase == "down"


def test_the_display_shows_the_takeover(run: Path) -> None:
    view = RunModel()
    view.take_all(TapeReader(run))
    lines = [remark.text for remark in view.remarks]
    assert "shard-1-standby acts for shard 1 by claim 2" in "\n".join(lines)
    assert list(view.shards) == [FIRST]
    assert view.shards[FIRST].phase != "down"
