"""`ddiloco launch` and `ddiloco stop` with the local engine."""

from __future__ import annotations

import time
from pathlib import Path

from decoupled_diloco.config import dump_config
from process.process_runs import command, config_of


def ddiloco(*arguments: object) -> tuple[int, str]:
    process = command(*map(str, arguments))
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def test_a_local_run_is_launched_and_stopped(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "small.toml"
    file.write_text(dump_config(config_of(run, run={"max_steps": 100_000})))
    code, output = ddiloco("launch", file, "--dry-run")
    assert (code, run.exists()) == (0, False)
    assert f"ddiloco train {file}" in output
    launched = command("launch", str(file))
    deadline = time.monotonic() + 60
    while not any(run.glob("tape/learner-0.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    code, output = ddiloco("stop", run)
    assert (code, f"process {launched.pid}" in output) == (0, True)
    launched.communicate(timeout=240)
    assert launched.returncode == 130
    code, output = ddiloco("stop", run)
    assert code == 2
    assert f"{run} is not running" in output


def test_a_folder_without_a_launch_is_reported(tmp_path: Path) -> None:
    code, output = ddiloco("stop", tmp_path)
    assert code == 2
    assert "does not name the process that launched it" in output
