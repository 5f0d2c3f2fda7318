"""Starting, watching and ending processes, with commands that take milliseconds."""

from __future__ import annotations

import errno
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import StorageError
from decoupled_diloco.launch import placement
from decoupled_diloco.launch import supervisor as module
from decoupled_diloco.launch.placement import ThisMachine, interrupts_deferred
from decoupled_diloco.launch.supervised_process import supervise
from decoupled_diloco.launch.supervisor import Restarts, Supervisor
from decoupled_diloco.tape import TapeReader, TapeWriter


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """A supervisor whose children are ``python -c TEXT``."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(module, "RESTART_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(placement, "COMMAND", (sys.executable, "-S", "-c"))
    with TapeWriter(tmp_path / "tape", "launcher") as tape:
        supervisor = Supervisor(ThisMachine(tmp_path), tape)
        yield supervisor
        supervisor.stop()


def settle(supervisor: Supervisor) -> None:
    """Poll until no process runs or is scheduled."""
    deadline = time.monotonic() + 10
    while any(c.running or c.restart_at is not None for c in supervisor.children.values()):
        assert time.monotonic() < deadline
        supervisor.poll()
        time.sleep(0.005)


def test_a_failed_process_restarts_a_limited_number_of_times(supervisor: Supervisor) -> None:
    code = "print('no luck'); raise SystemExit(1)"
    supervisor.start("bad", [code], limits=Restarts(failures_max=2))
    settle(supervisor)
    child = supervisor.children["bad"]
    assert child.down
    assert not child.done
    assert supervisor.last_words("bad") == "no luck"
    supervisor.tape.flush()
    types = [r.type for r in TapeReader(supervisor.tape.path)]
    assert types.count("ProcessStarted") == 3
    assert types.count("RestartScheduled") == 2


@pytest.mark.parametrize(("code", "down"), [(0, False), (2, True), (9, True)])
def test_success_wrong_configuration_and_the_end_of_the_run_are_final(
    supervisor: Supervisor, code: int, down: bool
) -> None:
    supervisor.start("once", [f"raise SystemExit({code})"])
    settle(supervisor)
    child = supervisor.children["once"]
    assert (child.failures, child.down, child.done) == (int(down), down, not down)


ENDINGS = {
    "preempted": "raise SystemExit(130)",
    "preempted, but its program went on": "raise SystemExit(143)",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_preemptions_do_not_count_as_failures(supervisor: Supervisor, how: str) -> None:
    limits = Restarts(failures_max=0, preemptions_max=4)
    supervisor.start("spot", [ENDINGS[how]], limits=limits)
    settle(supervisor)
    child = supervisor.children["spot"]
    assert (child.down, child.failures, child.preemptions) == (True, 0, 5)


def test_without_a_limit_a_preempted_process_always_restarts(supervisor: Supervisor) -> None:
    supervisor.start("spot", [ENDINGS["preempted"]], limits=Restarts(failures_max=0))
    deadline = time.monotonic() + 20
    while supervisor.children["spot"].preemptions < 8:
        assert time.monotonic() < deadline
        supervisor.poll()
        time.sleep(0.005)
    assert not supervisor.children["spot"].down


def refusing(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, errors: list[Exception]
) -> None:
    """Make the next starts fail with these errors."""
    start = supervisor.placement.start

    def refuse(name: str, arguments: list[str]) -> placement.PlacedProcess:
        if errors:
            raise errors.pop(0)
        return start(name, arguments)

    monkeypatch.setattr(supervisor.placement, "start", refuse)


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.EMFILE, "Too many open files"),
        StorageError("RUN/places/shard-1 cannot be written: No space left on device"),
    ],
)
def test_a_process_that_cannot_be_started_is_started_later(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    refusing(supervisor, monkeypatch, [error])
    supervisor.start("late", ["import time; time.sleep(60)"])
    child = supervisor.children["late"]
    assert (child.running, child.down, child.failures) == (False, False, 1)
    assert supervisor.last_words("late") == f"it cannot be started: {error}"
    deadline = time.monotonic() + 10
    while not child.running:
        assert time.monotonic() < deadline
        supervisor.poll()
        time.sleep(0.005)
    child.failures = 0
    refusing(supervisor, monkeypatch, [error])
    supervisor.kill("late", restart=True)
    deadline = time.monotonic() + 10
    while child.failures < 2 or not child.running:
        assert time.monotonic() < deadline
        supervisor.poll()
        time.sleep(0.005)


def test_a_supervised_process_of_a_cluster_job_is_started_later_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]
    start = ThisMachine.start

    def refuse(self: ThisMachine, name: str, arguments: list[str]) -> placement.PlacedProcess:
        if errors:
            raise errors.pop()
        return start(self, name, arguments)

    monkeypatch.setattr(ThisMachine, "start", refuse)
    monkeypatch.setattr(module, "RESTART_SECONDS", (0.01, 0.02))
    monkeypatch.setattr(placement, "COMMAND", (sys.executable, "-S", "-c"))
    run = {"name": "r", "folder": tmp_path / "r", "max_steps": 10, "fork_server": False}
    assert supervise(RunConfig(run=run), "learner-0", ["print('it runs')"]) == 0
    assert (tmp_path / "r" / "logs" / "learner-0.log").read_text() == "it runs\n"


def test_a_process_that_can_never_be_started_stays_down(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(supervisor, monkeypatch, [OSError(errno.EAGAIN, "no process is left")] * 99)
    supervisor.start("never", ["pass"], limits=Restarts(failures_max=2))
    settle(supervisor)
    child = supervisor.children["never"]
    assert (child.down, child.failures) == (True, 3)
    assert "no process is left" in supervisor.last_words("never")


def test_processes_start_without_a_fork_server_if_it_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(ThisMachine, "_launch", refuse)
    (tmp_path / "logs").mkdir()
    here = ThisMachine(tmp_path, forks=True)
    assert here.server is None
    here.close()


def test_a_killed_process_restarts_if_requested(supervisor: Supervisor) -> None:
    for name, restart in (("back", True), ("gone", False)):
        supervisor.start(name, ["import time; time.sleep(60)"])
        assert supervisor.kill(name, restart=restart)
    deadline = time.monotonic() + 10
    while supervisor.children["back"].failures == 0 or not supervisor.children["back"].running:
        assert time.monotonic() < deadline
        supervisor.poll()
        time.sleep(0.005)
    settled = supervisor.children["gone"]
    while settled.running:
        supervisor.poll()
    assert settled.down
    assert not supervisor.kill("gone", restart=True)


def test_a_requested_stop_is_on_the_tape_before_the_end_of_the_process(
    supervisor: Supervisor,
) -> None:
    supervisor.start("failed", ["raise SystemExit(2)"])
    settle(supervisor)
    supervisor.start("runs", ["import time; time.sleep(60)"])
    supervisor.stop()
    supervisor.stop()
    records = [r for r in TapeReader(supervisor.tape.path) if r.kind == "sample"]
    assert [r.type for r in records[-2:]] == ["EndRequested", "ProcessEnded"]
    assert [list(r.data["names"]) for r in records if r.type == "EndRequested"] == [["runs"]]


def test_no_process_restarts_after_retire(supervisor: Supervisor) -> None:
    supervisor.start("bad", ["raise SystemExit(1)"])
    supervisor.retire()
    settle(supervisor)
    assert supervisor.children["bad"].failures == 0


def test_a_process_that_ignores_sigterm_is_killed(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "TERMINATE_SECONDS", 0.1)
    text = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    supervisor.start("deaf", [text + "time.sleep(60)"])
    while not (tmp_path / "logs" / "deaf.log").read_text():
        time.sleep(0.005)
    supervisor.stop()
    assert supervisor.children["deaf"].code == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_deferred_to_the_end_of_the_block(number: signal.Signals) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    done: list[bool] = []

    def work() -> None:
        with interrupts_deferred():
            signal.raise_signal(number)
            done.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert done
        assert signal.getsignal(number) is interrupt
    finally:
        signal.signal(number, before)


def test_a_process_that_is_taken_down_stays_down_without_a_failure(supervisor: Supervisor) -> None:
    supervisor.start("p", ["import time; time.sleep(60)"])
    child = supervisor.children["p"]
    for _ in range(8):  # more often than a process may fail in a row
        supervisor.take_down("p")
        settle(supervisor)
        supervisor.poll()
        assert (child.running, child.down, child.done, child.failures) == (False, False, False, 0)
        assert supervisor.bring_back("p")
        assert child.running
    assert not supervisor.bring_back("p"), "it runs"


def test_a_process_may_take_any_time_after_a_requested_stop(supervisor: Supervisor) -> None:
    text = "import signal, time; signal.signal(15, lambda *_: sys.exit(3)); print(1, flush=True)"
    supervisor.start("p", [f"import sys, {text[7:]}; time.sleep(60)"])
    log = supervisor.placement.folder / "logs" / "p.log"
    while not log.read_text():
        time.sleep(0.01)
    supervisor.take_down("p", signal.SIGTERM)
    settle(supervisor)
    child = supervisor.children["p"]
    assert (child.code, child.down, child.failures) == (3, False, 0)
    supervisor.tape.flush()
    asked = [r.data["names"] for r in TapeReader(supervisor.tape.path) if r.type == "EndRequested"]
    assert asked == [["p"]]


def test_a_held_process_starts_when_it_is_brought_back(supervisor: Supervisor) -> None:
    supervisor.start("late", ["import time; time.sleep(60)"], held=True)
    child = supervisor.children["late"]
    supervisor.poll()
    assert (child.running, child.down, child.done) == (False, False, False)
    assert supervisor.bring_back("late")
    assert child.running
    supervisor.take_down("late")
    settle(supervisor)
    supervisor.retire()
    assert supervisor.bring_back("late")
    assert not child.running, "the run is over"
