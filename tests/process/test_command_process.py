"""The command line: how a run is interrupted, rejected and cleaned up."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.run_folder import RunFolder
from decoupled_diloco.tape import TapeReader
from free_ports import free_ports
from process.process_runs import (
    PATIENCE,
    command,
    config_file,
    health,
    orphans,
    until,
)
from replay_check import assert_replays


def ended(process: subprocess.Popen[str], seconds: float) -> tuple[int, str]:
    """Return the exit code and output of a process that must end within this time."""
    started = time.monotonic()
    output, _ = process.communicate(timeout=240)
    assert time.monotonic() - started < PATIENCE * seconds, output
    return process.returncode, output


def phases(folder: Path) -> str:
    """Return the phases that shard 0 reports."""
    log = folder / "logs" / "shard-0.log"
    text = log.read_text() if log.exists() else ""
    address = text.partition("listens on ")[2].partition("\n")[0]
    return str(health(address).get("phase", "")) if address else ""


def free(folder: Path) -> bool:
    """Whether a new run could use the folder; its contents are moved aside."""
    try:
        RunFolder(folder).release()
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(
    "moment",
    ["before the shards", "seeding", pytest.param("running", marks=pytest.mark.smoke), "sweeping"],
)
def test_ctrl_c_ends_everything(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "run"
    slow = {"step_seconds": 2.0} if moment == "sweeping" else {}
    budget = 2 if moment == "sweeping" else 5000
    file = config_file(folder, run={"max_steps": budget}, workload=slow)
    process = command("train", str(file))
    if moment == "before the shards":
        until((folder / "tape" / "shard-0.jsonl").parent.exists, "the launcher has begun")
    elif moment == "seeding":
        until(lambda: phases(folder) in ("empty", "seeding", "running"), "the shard is up")
    elif moment == "running":
        until(lambda: phases(folder) == "running", "the run is under way")
        until(lambda: '"RoundFinished"' in (folder / "tape/shard-0.jsonl").read_text(), "rounds")
    else:
        until(lambda: phases(folder) == "sweeping", "the closing sweep")
    os.killpg(process.pid, signal.SIGINT)
    until(lambda: not orphans(folder), "all processes of the run are gone", seconds=10.0)
    code, output = ended(process, 20.0)
    assert code == 130, output
    assert "Traceback" not in output
    if moment == "running":
        assert (folder / "report.html").stat().st_size > 1000
        assert_replays(folder)


@pytest.mark.parametrize("late", ["fork-server", pytest.param("learner", marks=pytest.mark.smoke)])
def test_a_killed_launcher_leaves_no_orphan(tmp_path: Path, late: str) -> None:
    folder = tmp_path / "run"
    process = command("train", str(config_file(folder, run={"max_steps": 5000})))
    until(lambda: phases(folder) == "running", "the run is under way")
    children = orphans(folder)
    assert len(children) == 4
    stopped = int(next(each for each in children if f" {late} " in each).partition(":")[0])
    os.kill(stopped, signal.SIGSTOP)
    process.kill()
    process.communicate()
    until(lambda: len(orphans(folder)) == 1, "all that can have ended", seconds=10.0)
    with pytest.raises(ConfigError, match="is in use by another process"):
        RunFolder(folder)
    os.kill(stopped, signal.SIGCONT)
    until(lambda: free(folder), "the last has ended, and the folder is free", seconds=10.0)


@pytest.mark.smoke
def test_a_port_in_use_is_reported_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = config_file(tmp_path / "run", syncer={"port": port})
        code, output = ended(command("train", str(file)), 30.0)
    assert code == 4
    assert f"error: cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert "--set syncer.port=" in output
    assert not (tmp_path / "run").exists(), "a run that has not begun leaves nothing"


def test_a_shard_whose_port_is_in_use_leaves_no_folder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file = config_file(tmp_path / "run", syncer={"port": port})
        code, output = ended(command("syncer", str(file), "--shard", "0"), 30.0)
    assert code == 4
    assert f"error: cannot listen on 127.0.0.1:{port}: Address already in use" in output
    assert "Choose another one with --port" in output
    assert not (tmp_path / "run").exists(), "a run that has not begun leaves nothing"


@pytest.mark.smoke
def test_a_folder_in_use_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with RunFolder(folder):
        code, output = ended(command("train", str(config_file(folder))), 30.0)
    assert code == 2
    assert "is in use by another process: wait for it, or choose another" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["train"], marks=pytest.mark.smoke),
        ["train", "--resume"],
        ["syncer"],
        ["syncer", "--shard", "0", "--port", "1"],
        ["learner", "--index", "0", "--syncer", "http://127.0.0.1:1"],
        ["evaluator", "--syncer", "http://127.0.0.1:1"],
        ["simulate"],
        ["chaos", "--virtual"],
    ],
    ids=" ".join,
)
def test_a_folder_of_other_files_is_rejected_and_unchanged(
    tmp_path: Path, arguments: list[str]
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    file = config_file(folder)
    shutil.copyfile(file, folder / "run.toml")  # a project's own settings may have this name
    (folder / "model.py").write_text("the work of years")
    name, *options = arguments
    here = ["--set", f"run.folder={folder}"]
    told = {"simulate": ["region-drops-out", *here], "chaos": ["region-drops-out", *here]}
    given = [str(folder)] if "--resume" in options else told.get(name, [str(file)])
    code, output = ended(command(name, *given, *options), 30.0)
    assert code == 2, output
    assert f"the run folder {folder} is not empty and not a run of ddiloco" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["project", "project.toml"]
    assert sorted(path.name for path in folder.iterdir()) == ["model.py", "run.toml"]


def test_missing_initial_weights_end_the_run(tmp_path: Path) -> None:
    file = config_file(tmp_path / "run", sync={"initial_weights": tmp_path / "none.safetensors"})
    code, output = ended(command("train", str(file)), 60.0)
    assert code == 2
    assert "none.safetensors" in output
    assert "does not exist" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.smoke
def test_a_second_run_moves_the_first_aside(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "tape").mkdir(parents=True)
    (folder / "tape" / "shard-0.jsonl").write_text("what an earlier run left\n")
    file = config_file(folder, run={"max_steps": 60, "learners": 1, "evaluator": True})
    shutil.copyfile(file, folder / "run.toml")
    code, output = ended(command("train", str(file)), 60.0)
    assert code == 0, output
    assert (tmp_path / "run.1" / "tape" / "shard-0.jsonl").read_text().startswith("what an")
    assert (folder / "weights.safetensors").exists()
    headers = {r.process: r.data["header"] for r in TapeReader(folder) if r.kind == "start"}
    for process in ("shard-0", "learner-0"):
        assert headers[process]["versions"]["python"] == platform.python_version()
    assert sum(r.type == "Evaluated" for r in TapeReader(folder)) >= 1
    assert_replays(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_shard_that_is_asked_to_stop_has_not_finished(
    tmp_path: Path, number: signal.Signals
) -> None:
    port = str(free_ports(1)[0])
    file = str(config_file(tmp_path / "run"))
    process = command("syncer", file, "--shard", "0", "--port", port)
    until(lambda: health(f"http://127.0.0.1:{port}"), "it listens")
    process.send_signal(number)
    code, output = ended(process, 5.0)
    assert code == 130, "otherwise a supervisor would not restart it"
    assert "Traceback" not in output


def test_a_reader_that_exits_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = command("train", str(config_file(folder)))
    assert process.stdout is not None
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(240) == 0
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "weights.safetensors").exists()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("recipes",), marks=pytest.mark.smoke),
        ("intervals", "quickstart"),
        ("train", "--help"),
    ],
)
@pytest.mark.parametrize(
    "locale",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    ],
)
def test_a_terminal_that_lacks_characters_causes_no_error(
    words: tuple[str, ...], locale: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "decoupled_diloco", *words],
        env={**os.environ, **locale},
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
