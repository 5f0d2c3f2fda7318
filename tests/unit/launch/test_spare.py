"""The process in reserve, with imports that take no time."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decoupled_diloco.launch import placement
from decoupled_diloco.launch import supervisor as module
from decoupled_diloco.launch.placement import ThisMachine
from decoupled_diloco.launch.spare import DEATHS_MAX, Spare
from decoupled_diloco.launch.supervisor import Supervisor
from decoupled_diloco.observe.tape import TapeWriter

CHILD = """
import sys, time
from decoupled_diloco.launch import spare
spare.IMPORTS = ()
if sys.argv[1] == "spare":
    spare.wait_for_role()
print(sys.argv[1:], flush=True)
print("bad news", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """A supervisor with a spare, and with one child that sleeps."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(module, "RESTART_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(placement, "COMMAND", (sys.executable, "-c", CHILD))
    with TapeWriter(tmp_path / "tape", "launcher") as tape:
        supervisor = Supervisor(ThisMachine(tmp_path, keep_spare=True), tape)
        supervisor.start("a", ["learner", "--index", "0", "ünicode"])
        yield supervisor
        supervisor.stop()


def poll_until(supervisor: Supervisor, condition: Callable[[], object]) -> None:
    """Polls until something is so."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        supervisor.poll()
        time.sleep(0.005)


def kept_by(supervisor: Supervisor) -> Spare:
    here = supervisor.placement
    assert isinstance(here, ThisMachine)
    assert here.spare is not None
    return here.spare


def spare_of(supervisor: Supervisor) -> int:
    """The spare's process, once it is ready."""
    spare = kept_by(supervisor)
    poll_until(supervisor, lambda: spare.pid)
    assert spare.pid is not None
    return spare.pid


def pid_of(supervisor: Supervisor, name: str) -> int | None:
    process = supervisor.children[name].process
    return None if process is None else process.pid


def lives(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_spare_becomes_what_was_killed_and_is_replaced(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "a.log"
    spare, first = spare_of(supervisor), pid_of(supervisor, "a")
    poll_until(supervisor, lambda: "news" in log.read_text())
    shown = Path(f"/proc/{first}/cmdline").read_bytes()
    supervisor.kill("a", restart=True)
    poll_until(supervisor, lambda: pid_of(supervisor, "a") not in (None, first))
    assert pid_of(supervisor, "a") == spare
    poll_until(supervisor, lambda: log.read_text().count("news") == 2)
    assert log.read_text().count("['learner', '--index', '0', 'ünicode']\n") == 2
    assert Path(f"/proc/{spare}/cmdline").read_bytes().rstrip(b"\0") + b"\0" == shown
    assert os.getpriority(os.PRIO_PROCESS, spare) == os.getpriority(os.PRIO_PROCESS, 0)
    assert spare_of(supervisor) != spare


def test_a_spare_that_dies_is_replaced_but_not_for_ever(supervisor: Supervisor) -> None:
    for _ in range(DEATHS_MAX):
        os.kill(pid := spare_of(supervisor), signal.SIGKILL)
        poll_until(supervisor, lambda pid=pid: not lives(pid))
    supervisor.poll()
    assert kept_by(supervisor).pid is None
    first = pid_of(supervisor, "a")
    supervisor.kill("a", restart=True)
    poll_until(supervisor, lambda: pid_of(supervisor, "a") not in (None, first))


def test_a_spare_that_has_just_died_is_not_taken(supervisor: Supervisor, tmp_path: Path) -> None:
    os.kill(pid := spare_of(supervisor), signal.SIGKILL)
    while lives(pid):
        time.sleep(0.005)
    supervisor.start("b", ["learner", "--index", "1"])
    assert pid_of(supervisor, "b") != pid
    poll_until(supervisor, lambda: "'1'" in (tmp_path / "logs" / "b.log").read_text())


@pytest.mark.parametrize("end", ["stop", "the launcher is gone"])
def test_the_spare_ends_with_its_launcher(supervisor: Supervisor, end: str) -> None:
    pid = spare_of(supervisor)
    if end == "stop":
        supervisor.stop()
        assert not lives(pid)
        supervisor.poll()
        assert kept_by(supervisor).pid is None
    else:
        process = kept_by(supervisor)._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()  # as the system does for who is killed
        assert process.wait(10) == 0


def test_there_is_no_spare_while_others_start_nor_once_the_run_is_over(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUIET_SECONDS", 3600.0)
    supervisor.poll()
    assert kept_by(supervisor)._process is None
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.0)
    supervisor.retire()
    supervisor.poll()
    assert kept_by(supervisor)._process is None
