"""A user's program as a learner: it is found before the run, and stopped with its children."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.parties import Parties, load_parties
from decoupled_diloco.config.signing_keys import PublicKey
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.termination import INTERRUPTED
from decoupled_diloco.launch.user_program import launched, require_commands


def config(*command: str) -> RunConfig:
    return RunConfig(run={"max_steps": 9}, learner={"command": list(command)})


HEAD = """
import sys
from decoupled_diloco.launch.user_program import run_command
from decoupled_diloco.launch.termination import SignalledTermination
from decoupled_diloco.learner.launched import Launched

sys.exit(
    run_command(
        [sys.executable, "-c", sys.argv[1]],
        Launched(role="learner", name="learner-0", syncer="http://a:1"),
        environment={},
        patience_seconds=float(sys.argv[2]),
        termination=SignalledTermination(),
    )
)
"""
"""Code for a separate process, because it kills all of its descendants."""


def run(code: str, asked_after: Callable[[], bool] | None = None, patience: float = 60.0) -> int:
    """Return the exit code of a program's supervisor, which is asked to stop after an event."""
    with subprocess.Popen([sys.executable, "-c", HEAD, code, str(patience)]) as head:
        if asked_after is not None:
            until(asked_after)
            head.send_signal(signal.SIGTERM)
        return head.wait(timeout=120)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("program", ["no-such-program", "./nowhere/train", "/nowhere/python"])
def test_a_missing_program_is_named(program: str) -> None:
    with pytest.raises(ConfigError, match=f"command=.*the program '{program}' is not found"):
        require_commands(config(program, "train.py"))


def test_a_missing_script_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'trian\.py' does not exist"):
        require_commands(config("python", "-u", "trian.py", "--config=x.py"))


def test_programs_in_the_folder_of_this_python_are_found() -> None:
    require_commands(config("torchrun", "--nproc-per-node=2", "-m", "mine", "x.py"))


@pytest.mark.parametrize(("code", "ended"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_the_exit_code_is_the_programs(code: str, ended: int) -> None:
    assert run(code) == ended


def test_a_signal_is_a_failure() -> None:
    assert run("import os; os.kill(os.getpid(), 9)") == 128 + 9


def test_the_program_receives_sigterm_and_has_time_to_end(tmp_path: Path) -> None:
    note = tmp_path / "note"
    code = f"""
import signal, pathlib, time, sys
def stop(*_):
    pathlib.Path({str(note)!r}).write_text("flushed")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path({str(note)!r}).write_text("ready")
while True: time.sleep(0.01)
"""
    assert run(code, lambda: note.exists() and note.read_text() == "ready") == INTERRUPTED
    assert note.read_text() == "flushed"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the descendants")
@pytest.mark.parametrize("ends", [True, False])
def test_processes_in_other_sessions_end_with_the_program(tmp_path: Path, ends: bool) -> None:
    note = tmp_path / "pid"
    rest = "" if ends else "signal.signal(15, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    code = f"""
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
with open({str(note)!r} + ".new", "w") as file:
    file.write(str(child.pid))
os.rename({str(note)!r} + ".new", {str(note)!r})
{rest}
"""
    code_of_head = run(code) if ends else run(code, note.exists, patience=0.2)
    assert code_of_head == (0 if ends else INTERRUPTED)
    until(lambda: not lives(int(note.read_text())))


def lives(pid: int) -> bool:
    """Whether a process exists and is not a zombie, which no parent here may reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_receives_all_that_the_parties_have_agreed_on(tmp_path: Path) -> None:
    keys = [str(PublicKey(bytes([number]) * 32)) for number in range(3)]
    members = [{"name": n, "learners": [f"{n}-*"], "key": keys[i]} for i, n in enumerate("ab")]
    agreed = Parties(parties=members, syncer_key=keys[2], least_parties=2)
    secure = {"secure_sums": True, "least_parties": 2, "syncer_key": keys[2]}
    found = launched(
        RunConfig(
            run={"max_steps": 9, "learners": 2},
            learner={"command": ["true"]},
            privacy={"members": members, **secure},
        ),
        0,
        syncer=("http://a:1",),
        folder=tmp_path,
        token_file=None,
        shared=None,
        tls=None,
    )
    assert load_parties(found.parties).digest == agreed.digest
