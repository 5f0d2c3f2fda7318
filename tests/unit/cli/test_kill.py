"""`ddiloco kill` signals one process of a run on this machine, and rejects everything else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch import run_processes
from decoupled_diloco.tape.samples import ProcessEnded, ProcessStarted
from unit.cli.runs_here import running


@pytest.fixture
def learner() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that leads a session, like every process of a launcher."""
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    ) as process:
        yield process
        process.kill()


def refusal(*arguments: str) -> str:
    error = CliRunner().invoke(app, ["kill", *arguments]).exception
    assert isinstance(error, ConfigError), error
    return str(error)


@pytest.mark.parametrize("name", ["", "KILL", "SIGTERM", "term"])
def test_the_process_receives_the_signal(
    tmp_path: Path, learner: subprocess.Popen[bytes], name: str
) -> None:
    with running(tmp_path / "run", ProcessStarted("learner-1", learner.pid)) as run:
        options = ["--signal", name] if name else []
        result = CliRunner().invoke(app, ["kill", "learner-1", str(run), *options])
    assert result.exit_code == 0, result.output
    number = signal.SIGTERM if "term" in name.lower() else signal.SIGKILL
    assert result.stdout == (
        f"sent {number.name} to learner-1 (process {learner.pid}) of {tmp_path}/run\n"
    )
    assert learner.wait(20) == -number


def test_the_newest_run_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner: subprocess.Popen[bytes]
) -> None:
    monkeypatch.chdir(tmp_path)
    with running(Path("runs/mine"), ProcessStarted("shard-0", learner.pid)) as run:
        (run / "tape" / "shard-0.jsonl").touch()
        result = CliRunner().invoke(app, ["kill", "shard-0"])
    assert result.exit_code == 0, result.output
    assert result.stderr == "run: runs/mine, the newest in runs/\n"
    assert learner.wait(20) == -signal.SIGKILL


def test_a_process_that_cannot_receive_a_signal_is_rejected(
    tmp_path: Path, learner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = (
        ProcessStarted("learner-0", learner.pid),
        ProcessStarted("learner-1", 4),
        ProcessEnded("learner-1", None, 9),
    )
    with running(tmp_path / "run", *samples) as run:
        assert refusal("learner-7", str(run)) == (
            f"'learner-7' is not a process of {run}: give one of learner-0, learner-1"
        )
        assert refusal("learner-1", str(run)) == "learner-1 is not running: killed (SIGKILL)"
        assert refusal("learner-0", str(run), "--signal", "FOO").startswith(
            "--signal 'FOO' is not a valid signal"
        )
        hour = time.time() + 3600  # as if the process id belonged to a later process
        monkeypatch.setattr(run_processes, "process_start", lambda pid: hour)
        assert refusal("learner-0", str(run)) == (
            f"learner-0 is not running: process {learner.pid} has ended, or its id belongs to "
            "another program now"
        )
        (run / "launcher").write_text(f"{os.getpid()} elsewhere\n")
        assert refusal("learner-0", str(run)) == (
            f"{run} was launched on elsewhere: run ddiloco kill there"
        )
    assert learner.poll() is None


def test_the_run_may_come_before_the_process(tmp_path: Path) -> None:
    with running(tmp_path / "run", ProcessStarted("learner-0", 4)) as run:
        assert refusal(str(run), "learner-7") == (
            f"'learner-7' is not a process of {run}: give one of learner-0"
        )
        assert refusal(str(run)) == (
            f"{run} is a run folder: name a process as well, as in ddiloco kill learner-1 {run}"
        )


def test_a_run_that_has_ended_or_was_never_launched_is_rejected(tmp_path: Path) -> None:
    with running(tmp_path / "run", ProcessStarted("learner-0", os.getpid())) as run:
        pass
    assert refusal("learner-0", str(run)) == f"{run} is not running"
    assert "does not name the process that launched it" in refusal("learner-0", str(tmp_path))


def test_a_run_on_a_cluster_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "run.launch").mkdir()
    (tmp_path / "run.launch" / "jobs.json").write_text("[]")
    assert refusal("learner-0", str(tmp_path / "run")).startswith(
        f"{tmp_path}/run runs on a cluster: ddiloco kill works for runs on this machine only"
    )
