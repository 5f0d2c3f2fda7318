"""A shard whose process and standby act in turns is one shard to whoever reads the tape."""

from __future__ import annotations

from pathlib import Path

import pytest

from decoupled_diloco.observe.acting import is_learner, is_shard
from decoupled_diloco.observe.run_model import RunModel, read_run, run_of
from decoupled_diloco.observe.samples import (
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
    Sample,
    TookOver,
)
from decoupled_diloco.observe.tape import TapeReader, TapeWriter

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
"""The first one is killed, starts again, waits for its turn, and is told to end."""


def write(folder: Path, file: str, who: str, *samples: tuple[float, Sample]) -> None:
    begun = samples[0][0]
    path = folder / "tape" / f"{file}.jsonl"
    tape = TapeWriter(path, who, clock=lambda: begun, wall=lambda: WALL + begun)
    for at, sample in samples:
        tape.sample(at, sample)
    tape.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path, "launcher", "launcher", *LAUNCHER)
    write(tmp_path, f"{FIRST}.claims", f"{FIRST}.claims", (0.5, ProcessStarted("nobody", 1)))
    write(tmp_path, FIRST, FIRST, (1.0, TookOver(FIRST, 1, 1, 0.0)))
    write(tmp_path, STANDBY, FIRST, (15.5, TookOver(STANDBY, 1, 2, 5.5)))
    return tmp_path


def test_only_the_shard_itself_is_one() -> None:
    assert is_shard(FIRST)
    for other in (STANDBY, f"{FIRST}.claims", f"{STANDBY}.claims", f"{FIRST}, standing by"):
        assert not is_shard(other)
        assert not is_learner(other)


def test_the_history_has_one_shard_that_was_away_once(run: Path) -> None:
    history = read_run(run)
    assert list(history.shards) == [FIRST]
    assert not history.trained
    lives = history.shards[FIRST].lives
    assert [life.started_at for life in lives] == [1.0, 15.5]
    [outage] = history.outages
    assert (outage.who, outage.down_at) == (FIRST, 10.0)
    remarks = [remark.text for remark in history.remarks]
    told = "shard-1-standby acts for shard 1 by claim 2: the one before was last renewed 5.5 s ago"
    assert told in remarks
    assert not any("claim 1" in remark for remark in remarks), "there is nothing to tell of it"


def test_the_status_is_that_of_who_acts(run: Path) -> None:
    chronicle = run_of(TapeReader(run))
    assert list(chronicle.shards) == [FIRST]
    assert chronicle.shards[FIRST].phase not in ("down", "finished"), "another one acts"
    write(run, "more", "launcher", (40.0, ProcessEnded(STANDBY, None, 9)))
    assert run_of(TapeReader(run)).shards[FIRST].phase == "down"


def test_the_display_tells_of_the_takeover(run: Path) -> None:
    view = RunModel()
    view.take_all(TapeReader(run))
    lines = [remark.text for remark in view.remarks]
    assert "shard-1-standby acts for shard 1 by claim 2" in "\n".join(lines)
    assert list(view.shards) == [FIRST]
    assert view.shards[FIRST].phase != "down"
