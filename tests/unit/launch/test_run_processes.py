"""The processes that a launcher has started, and whether they still exist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.launch.processes import open_tape
from decoupled_diloco.launch.run_processes import LocalProcess, local_processes, process_start
from decoupled_diloco.tape.samples import ProcessEnded, ProcessStarted, RestartScheduled


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that does nothing."""
    with subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    ) as process:
        yield process
        process.kill()


def record(folder: Path, *samples: ProcessStarted | ProcessEnded | RestartScheduled) -> None:
    """Write samples to the launcher's tape, as one start of the launcher."""
    with open_tape(folder, "launcher", {"machine": "launcher"}) as tape:
        for each in samples:
            tape.sample(time.monotonic(), each)


def test_the_last_start_of_each_process_counts(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    record(tmp_path, ProcessStarted("shard-0", 1), ProcessStarted("evaluator", 2))
    record(
        tmp_path,
        ProcessStarted("shard-0", os.getpid()),
        ProcessStarted("learner-0", 3),
        ProcessEnded("learner-0", None, int(signal.SIGKILL)),
        RestartScheduled("learner-0", 0.5),
        ProcessStarted("learner-0", sleeper.pid),
        ProcessStarted("learner-1", 4),
        ProcessEnded("learner-1", 6, None),
    )
    found = {each.name: each for each in local_processes(tmp_path)}
    assert list(found) == ["shard-0", "learner-0", "learner-1"]
    assert found["learner-0"].pid == sleeper.pid
    assert found["learner-0"].state == "running"
    assert found["learner-1"].state == "ended with exit code 6"
    assert not found["learner-1"].exists


def test_a_process_that_has_ended_does_not_exist(sleeper: subprocess.Popen[bytes]) -> None:
    process = LocalProcess("learner-0", sleeper.pid, time.time())
    assert process.exists
    sleeper.kill()
    deadline = time.monotonic() + 20
    while process.exists:  # a zombie from here on, because nothing waits for it
        assert time.monotonic() < deadline
    assert process.state == "gone"
    sleeper.wait()
    assert process_start(sleeper.pid) is None


def test_a_process_id_of_another_program_does_not_count(sleeper: subprocess.Popen[bytes]) -> None:
    earlier = LocalProcess("learner-0", sleeper.pid, time.time() - 3600)
    assert not earlier.exists
    assert earlier.state == "gone"
    later = LocalProcess("learner-0", os.getppid(), time.time() + 3600)
    assert not later.exists


def test_a_folder_without_a_launcher_has_no_processes(tmp_path: Path) -> None:
    assert local_processes(tmp_path) == []
