"""Commands that operate a run of this machine: list, status --pids, logs, kill and stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from process.process_runs import command, config_file, orphans, stopped_at_exit, until


@pytest.mark.smoke
def test_a_run_is_listed_followed_killed_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All commands use the newest run in runs/."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/small")
    run.parent.mkdir()
    file = config_file(run, run={"max_steps": 1_000_000})
    with stopped_at_exit(command("train", str(file))) as launcher:
        log = run / "logs" / "learner-1.log"
        until(lambda: log.exists() and "learner-1 joined" in log.read_text(), "it joins", 60)
        until(lambda: listed()["step"] > 0, "the run has made a step")
        assert (listed()["run"], listed()["state"]) == ("runs/small", "running")
        first = pids()
        assert first.keys() == {"shard-0", "learner-0", "learner-1"}
        with stopped_at_exit(command("logs", "learner-1", "--follow")) as follower:
            assert f"sent SIGKILL to learner-1 (process {first['learner-1']})" in output_of(
                "kill", "learner-1"
            )
            until(lambda: log.read_text().count("learner-1 joined") > 1, "it joins again", 60)
            assert {name for name, pid in pids().items() if pid != first[name]} == {"learner-1"}
            assert "asked process" in output_of("stop")
            launcher.wait(120)
            output, _ = follower.communicate(timeout=60)
        assert follower.returncode == 0
        assert output.count("learner-1 joined") == 2
    assert not orphans(run)
    assert listed()["state"] == "ended"
    assert listed()["phase"] == "interrupted"
    refused = CliRunner().invoke(app, ["kill", "learner-1"])
    assert str(refused.exception) == "runs/small is not running"


def output_of(*arguments: str) -> str:
    """Return the output of a command; in this process, because imports take longer than the
    command.
    """
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def listed() -> dict[str, Any]:
    """Return the only run, as `ddiloco list` shows it."""
    [found] = json.loads(output_of("list", "--json"))
    return dict(found)


def pids() -> dict[str, str]:
    """Return the process IDs of all running processes, by name."""
    table = output_of("status", "--pids").rpartition("process")[2].splitlines()[1:]
    rows = [line.split() for line in table]
    assert all(row[2] == "running" for row in rows), rows
    return {row[0]: row[1] for row in rows}
