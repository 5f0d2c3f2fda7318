"""`ddiloco launch` and `ddiloco stop` where the engine is this machine."""

from __future__ import annotations

import time
from pathlib import Path

from decoupled_diloco.config import dump_config
from process.runs import command, config_of


def ddiloco(*arguments: object) -> tuple[int, str]:
    process = command(*map(str, arguments))
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def test_a_run_is_launched_here_and_stopped(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "small.toml"
    file.write_text(dump_config(config_of(run, run={"budget_steps": 100_000})))
    code, told = ddiloco("launch", file, "--dry-run")
    assert (code, run.exists()) == (0, False)
    assert f"ddiloco train {file}" in told
    launched = command("launch", str(file))
    deadline = time.monotonic() + 60
    while not any(run.glob("tape/learner-0.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    code, told = ddiloco("stop", run)
    assert (code, f"process {launched.pid}" in told) == (0, True)
    launched.communicate(timeout=240)
    assert launched.returncode == 130
    code, told = ddiloco("stop", run)
    assert code == 2
    assert f"{run} does not run: there is nothing to stop" in told


def test_what_was_never_launched_is_told(tmp_path: Path) -> None:
    code, told = ddiloco("stop", tmp_path)
    assert code == 2
    assert "does not say who launched it" in told
