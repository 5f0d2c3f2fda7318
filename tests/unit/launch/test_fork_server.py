"""The fork server, with imports that take no time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decoupled_diloco.config.run import RunSettings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch import fork_server as module
from decoupled_diloco.launch import placement
from decoupled_diloco.launch import supervisor as supervisors
from decoupled_diloco.launch.fork_server import ForkedProcess, ForkServer
from decoupled_diloco.launch.placement import ThisMachine
from decoupled_diloco.launch.supervisor import Supervisor
from decoupled_diloco.tape import TapeWriter

pytestmark = pytest.mark.skipif(not module.AVAILABLE, reason="Linux alone has a fork server")

CHILD = """
import os, pathlib, random, sys, time
import numpy
from decoupled_diloco.launch import fork_server
fork_server.IMPORTS = ()
if sys.argv[1] == "fork-server":
    fork, limit = os.fork, pathlib.Path(*sys.argv[2:3]).parent / "limit"
    def limited():
        if limit.exists():
            limit.unlink()
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()
    os.fork = limited
    fork_server.serve()
print(sys.argv[1:], flush=True)
print("drawn", random.random(), numpy.random.rand(), flush=True)
print("bad news", file=sys.stderr, flush=True)
if "7" in sys.argv:
    sys.exit(7)
sys.stdin.read()
"""


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Yield a supervisor with forked children, one of which waits."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(supervisors, "RESTART_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(placement, "COMMAND", (sys.executable, "-c", CHILD))
    with TapeWriter(tmp_path / "tape", "launcher") as tape:
        supervisor = Supervisor(ThisMachine(tmp_path, forks=True), tape)
        supervisor.start("a", ["learner", "--index", "0", "ünicode"])
        yield supervisor
        supervisor.stop()


def poll_until(supervisor: Supervisor, condition: Callable[[], object]) -> None:
    """Poll until a condition holds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        supervisor.poll()
        time.sleep(0.005)


def server_of(supervisor: Supervisor) -> ForkServer:
    here = supervisor.placement
    assert isinstance(here, ThisMachine)
    assert here.server is not None
    return here.server


def pid_of(supervisor: Supervisor, name: str) -> int | None:
    process = supervisor.children[name].process
    return None if process is None else process.pid


def test_a_failed_fork_ends_no_other_process_and_is_retried(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    before = pid_of(supervisor, "a")
    (tmp_path / "limit").touch()
    supervisor.start("b", ["learner", "--index", "1"])
    child = supervisor.children["b"]
    assert (child.running, child.failures) == (False, 1)
    assert "unavailable" in supervisor.last_words("b")
    poll_until(supervisor, lambda: child.running)
    assert isinstance(child.process, ForkedProcess)
    assert pid_of(supervisor, "a") == before


def test_a_forked_child_equals_a_new_process(supervisor: Supervisor, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    poll_until(supervisor, lambda: log.exists() and "news" in log.read_text())
    assert log.read_text().startswith("['learner', '--index', '0', 'ünicode']\n")
    pid, server = pid_of(supervisor, "a"), server_of(supervisor).pid
    assert pid is not None
    assert os.getsid(pid) == pid
    shown = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    called = [sys.executable, "-c", CHILD, "learner", "--index", "0", "ünicode"]
    assert shown[: len(called)] == [each.encode() for each in called]
    assert not any(shown[len(called) :])
    environment = [Path(f"/proc/{each}/environ").read_bytes() for each in (pid, server)]
    assert environment[0] == environment[1]
    opened = {path.name: str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()}
    assert opened["1"] == opened["2"] == str(log)
    assert [name for name, to in opened.items() if "pipe" in to] == ["0"]


def test_each_child_draws_different_random_numbers(supervisor: Supervisor, tmp_path: Path) -> None:
    supervisor.start("b", ["learner"])
    logs = [tmp_path / "logs" / f"{name}.log" for name in "ab"]
    poll_until(supervisor, lambda: all("news" in log.read_text() for log in logs))
    drawn = [log.read_text().partition("drawn ")[2].split()[:2] for log in logs]
    assert len({*drawn[0], *drawn[1]}) == 4


def test_an_ended_child_is_reported_and_forked_again(supervisor: Supervisor) -> None:
    first = pid_of(supervisor, "a")
    supervisor.kill("a", restart=True)
    poll_until(supervisor, lambda: pid_of(supervisor, "a") not in (None, first))
    assert supervisor.children["a"].code == -signal.SIGKILL
    assert isinstance(supervisor.children["a"].process, ForkedProcess)


def test_an_exit_code_is_reported(supervisor: Supervisor) -> None:
    supervisor.start("b", ["learner", "7"])
    poll_until(supervisor, lambda: supervisor.children["b"].code == 7)


def test_a_child_outlives_its_server_and_the_next_one_imports_torch(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    first = supervisor.children["a"].process
    os.kill(server_of(supervisor).pid, signal.SIGKILL)
    supervisor.start("b", ["learner"])
    assert not isinstance(supervisor.children["b"].process, ForkedProcess)
    assert "fork server" in caplog.text
    supervisor.poll()
    assert supervisor.children["a"].process is first
    supervisor.kill("a", restart=True)
    poll_until(supervisor, lambda: supervisor.children["a"].process not in (None, first))


def test_server_and_children_end_with_the_launcher(supervisor: Supervisor) -> None:
    """Closing the pipes is what the system does for a killed process."""
    server, process = server_of(supervisor), supervisor.children["a"].process
    here = supervisor.placement
    assert isinstance(here, ThisMachine)
    os.close(here._pipe[1])
    here._pipe = here._pipe[:1]
    assert process is not None
    assert process.wait() == 0
    server._orders.close()
    assert server._process.wait(10) == 0


def test_a_server_that_still_imports_ends_with_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "forever.py").write_text(
        "import time\nprint('begun', flush=True)\ntime.sleep(3600)"
    )
    importing = CHILD.replace("IMPORTS = ()", "IMPORTS = ('forever',)")
    launcher, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-c", importing, "fork-server"],
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        )
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"begun\n"
        launcher.close()
        try:
            assert server.wait(20) == 0
        finally:
            server.kill()


def test_the_former_name_of_the_setting_is_reported() -> None:
    with pytest.raises(ConfigError, match=r"'spare' in \[run\] is called 'fork_server' now"):
        RunSettings(max_steps=1, spare=False)
