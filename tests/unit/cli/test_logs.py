"""`ddiloco logs`: one process, all processes in order of time, last lines and new lines."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decoupled_diloco.cli.main import app
from decoupled_diloco.cli.runs import chosen_run
from decoupled_diloco.errors import ConfigError
from unit.cli.runs_here import running

SHARD = "2026-01-02 03:04:05,000 INFO shard 0 listens\n2026-01-02 03:04:09,000 INFO done\n"
LEARNER = """\
2026-01-02 03:04:06,000 WARNING no learner
Traceback (most recent call last):
  what a library prints
2026-01-02 03:04:08,000 INFO it goes on
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run that has ended, the newest one in runs/."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/mine")
    with running(folder):
        (folder / "logs" / "shard-0.log").write_text(SHARD)
        (folder / "logs" / "learner-1.log").write_text(LEARNER)
    return folder


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["logs", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["logs", *arguments])
    assert result.exit_code in (1, 2)
    return result.stderr + (str(result.exception) if result.exception else "")


def test_one_process(run: Path) -> None:
    assert printed(str(run), "shard-0") == SHARD
    assert printed("shard-0", str(run)) == SHARD
    assert printed("learner-1") == LEARNER
    assert printed("learner-1", "-n", "1") == LEARNER.splitlines(keepends=True)[-1]
    assert printed("learner-1", "--lines", "0") == ""


def test_all_processes_in_order_of_time(run: Path) -> None:
    lines = printed(str(run)).splitlines()
    assert lines == [
        "shard-0   | 2026-01-02 03:04:05,000 INFO shard 0 listens",
        "learner-1 | 2026-01-02 03:04:06,000 WARNING no learner",
        "learner-1 | Traceback (most recent call last):",
        "learner-1 |   what a library prints",
        "learner-1 | 2026-01-02 03:04:08,000 INFO it goes on",
        "shard-0   | 2026-01-02 03:04:09,000 INFO done",
    ]
    assert printed("-n", "1").splitlines() == lines[-2:]


def test_new_lines_are_printed_until_the_run_ends(tmp_path: Path) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(running(tmp_path / "run"))
        log = folder / "logs" / "shard-0.log"
        log.write_text("the first\n")

        def write() -> None:
            for text in (" half", " a line\n", "the last one"):
                time.sleep(0.6)
                with log.open("a") as file:
                    file.write(text)
            (folder / "logs" / "learner-0.log").write_text("from a later process\n")
            stack.close()  # the run has ended

        writer = threading.Thread(target=write)
        writer.start()
        lines = printed(str(folder), "--follow").splitlines()
        writer.join()
    assert lines[:2] == ["shard-0 | the first", "shard-0 |  half a line"]
    assert sorted(lines[2:]) == ["learner-0 | from a later process", "shard-0 | the last one"]


def test_the_logs_of_slurm_are_in_the_launch_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run.launch" / "logs").mkdir(parents=True)
    (tmp_path / "run.launch" / "logs" / "learner-0.log").write_text("from a job\n")
    assert printed(str(tmp_path / "run"), "learner-0") == "from a job\n"


def test_a_missing_log_is_reported(run: Path, tmp_path: Path) -> None:
    assert "'learner-7' has no log in runs/mine: give one of learner-1, shard-0" in refusal(
        "learner-7"
    )
    assert "is not one RUN and one PROCESS" in refusal("learner-1", "shard-0")
    assert "is a URL: ddiloco logs reads a run folder" in refusal("http://127.0.0.1:7070")
    assert "none/such does not exist: give a run folder" in refusal("none/such")
    (tmp_path / "empty").mkdir()
    assert "empty has no logs" in refusal("empty")
    assert isinstance(CliRunner().invoke(app, ["logs", "empty"]).exception, ConfigError)


@pytest.mark.parametrize("name", ["lerner-1", "Learner-1", "learner_1"])
def test_a_misspelt_process_is_refused_with_the_one_that_was_meant(run: Path, name: str) -> None:
    text = refusal(str(run), name)
    assert f"{name!r} has no log in runs/mine: did you mean 'learner-1'?" in text


@pytest.mark.parametrize("name", ["runs/mien", "mine", "runs/Mine"])
def test_a_misspelt_run_is_refused_with_the_one_that_was_meant(run: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        chosen_run(name, "ddiloco logs runs/quickstart")
    assert str(error.value) == f"{name} does not exist: did you mean runs/mine?"
    assert chosen_run(str(run), "") == str(run)
    assert chosen_run("nothing-like-it", "") == "nothing-like-it"
    assert chosen_run(name, "", or_config=True) == name
