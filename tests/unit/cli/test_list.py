"""`ddiloco list`: the runs of a folder, each with its actual state."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.run_model import RunModel
from decoupled_diloco.show.status import status_of
from decoupled_diloco.tape.reader import Follower
from unit.cli.runs_here import running
from unit.show.show_worlds import write_world


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listed(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["list", "--json", *arguments])
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def made(run: Path, at: float) -> None:
    """Create a run folder whose processes run on another machine, with this start time."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.toml").touch()
    os.utime(run / "run.toml", (at, at))


def write_real_world(run: Path) -> None:
    """Write a tape of real processes: one of a virtual world, without its mark."""
    write_world(run, until=20.0)
    for path in (run / "tape").glob("*.jsonl"):
        path.write_bytes(path.read_bytes().replace(b'"virtual":true', b'"virtual":false'))


def test_an_empty_list_prints_one_sentence() -> None:
    result = CliRunner().invoke(app, ["list"])
    assert result.exit_code == 0
    assert (result.stdout, result.stderr) == ("", "runs contains no runs\n")
    assert listed() == []
    wrong = CliRunner().invoke(app, ["list", "none"])
    assert wrong.exit_code == 2
    assert "none is not a folder" in wrong.stderr


def test_the_newest_is_first_and_another_folder_can_be_named() -> None:
    for number, name in enumerate(("a", "c", "b")):
        made(Path("mine") / name, 1000.0 + number)
    assert [each["run"] for each in listed("mine")] == ["mine/b", "mine/c", "mine/a"]
    assert {each["state"] for each in listed("mine")} == {"unknown"}


def test_states(here: Path) -> None:
    write_real_world(Path("runs/silent"))
    made(Path("runs/silent"), 1.0)
    write_world(Path("runs/virtual"), until=20.0)
    made(Path("runs/virtual"), 1.0)
    with running(Path("runs/failed")) as failed:
        write_real_world(failed)
    with running(Path("runs/new")), running(Path("runs/slow")) as slow:
        write_real_world(slow)
        made(Path("runs/sent.launch"), 2.0)
        (here / "runs/sent.launch/jobs.json").write_text("[]")
        made(Path("runs/dry.launch"), 3.0)
        found = {each["run"].removeprefix("runs/"): each for each in listed()}
        table = CliRunner().invoke(app, ["list"], env={"COLUMNS": "100"}).stdout.splitlines()
    assert {name: each["state"] for name, each in found.items()} == {
        "silent": "unknown",  # no process writes its tape, and its machine is unknown
        "virtual": "failed",  # its simulation did not finish
        "failed": "failed",  # it has not ended, and none of its processes exists
        "new": "running",
        "slow": "running",  # its tape is old, but its processes exist
        "sent": "unknown",
    }
    assert found["new"]["phase"] == "starting"
    assert found["sent"]["phase"] == "submitted"
    assert found["slow"]["step"] > 0
    assert table[0].split() == ["run", "state", "phase", "step", "started", "age"]
    assert len(table) == 1 + len(found)


def test_an_unreadable_tape_does_not_hide_other_runs() -> None:
    for name in ("broken", "whole"):
        write_world(Path("runs") / name, until=20.0)
        made(Path("runs") / name, 1.0)
    tape = Path("runs/broken/tape/shard-0.jsonl")
    for each in tape.parent.iterdir():
        each.unlink()
    tape.write_bytes(b'{"v": 999}\n')
    found = {each["run"]: each for each in listed()}
    assert found["runs/broken"]["phase"] in ("unreadable", "empty")
    assert found["runs/broken"]["state"] == "unknown"
    assert found["runs/whole"]["step"] > 0


@pytest.mark.parametrize("until", [0.5, 20.0, 60.0, None])
def test_the_few_lines_that_are_read_give_the_same_phase_and_step(until: float | None) -> None:
    write_world(Path("run"), until=until)
    whole, few = RunModel(), RunModel()
    whole.take_all(Follower("run").stream(skim=False))
    few.take_all(Follower("run").stream_progress())
    now = whole.latest + 1.0
    found, expected = status_of(few, now), status_of(whole, now)
    for name in ("name", "phase", "step", "max_steps", "virtual"):
        assert getattr(found, name) == getattr(expected, name), name
    assert few.records < whole.records / 5
