"""Scenarios that real processes cannot carry out are rejected before anything starts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_lab.chaos import spaces
from decoupled_diloco_lab.chaos.pauses import Brake, Guard
from decoupled_diloco_lab.chaos.real import needs_links, paced_config, require_real
from decoupled_diloco_lab.chaos.spaces import Disks
from decoupled_diloco_lab.simulate.scenario import Scenario, load_scenario

HEAD = """
run = { max_steps = 100 }
syncer = { shards = 2 }
workload = { name = "paced" }
"""
EVENT = '[[events]]\nkind = "{}"\ntarget = "{}"\nat_seconds = 5\n'


def load(folder: Path, text: str) -> Scenario:
    path = folder / "story.toml"
    path.write_text(HEAD + text)
    return load_scenario(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (EVENT.format("clock-jump", "shard-0") + "jump_seconds = 5\n", "it reads cannot be set"),
        (EVENT.format("kill", "coordinator"), "shard-0 hosts it: use target='shard-0'"),
        ("[[learners]]\nvariance = 0.1\n", "variance=0.1 .* would be ignored"),
        ("parameters = 1000\n", "parameters=1000 .* would be ignored"),
        ("[[learners]]\ntokens = 8\n", "tokens=8 .* would be ignored"),
    ],
)
def test_faults_that_real_processes_cannot_carry_out(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_real(load(tmp_path, text))


def test_links_forward_to_this_machine(tmp_path: Path) -> None:
    text = EVENT.format("cut", "shard-1") + "for_seconds = 1\n"
    assert needs_links(require_real(load(tmp_path, text)))
    path = tmp_path / "story.toml"
    with pytest.raises(ConfigError, match="the links of a scenario forward to"):
        require_real(load_scenario(path, overrides=["syncer.host=0.0.0.0"]))
    encrypted = ["tls.cert=a.pem", "tls.key=a.key"]
    with pytest.raises(ConfigError, match="is not valid for the addresses at which the links"):
        require_real(load_scenario(path, overrides=encrypted))
    killed = load(tmp_path, EVENT.format("kill", "shard-1"))
    assert not needs_links(killed)
    require_real(load_scenario(path, overrides=encrypted))


def test_a_pace_needs_a_workload_that_has_one(tmp_path: Path) -> None:
    text = "[[learners]]\nstep_seconds = 0.5\n[[learners]]\nstep_seconds = 2.0\n"
    scenario = require_real(load(tmp_path, text))
    assert paced_config(scenario).workload.options["step_seconds"] == [0.5, 2.0]
    path = tmp_path / "story.toml"
    with pytest.raises(ConfigError, match="the duration of a real step cannot be set"):
        require_real(load_scenario(path, overrides=["workload.name=gpt"]))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps writing to its standard output."""
    text = (
        "import sys, time\n"
        "for n in range(10**6):\n"
        "    sys.stdout.buffer.write(b'.'); sys.stdout.flush(); time.sleep(0.01)"
    )
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", text], stdout=subprocess.PIPE, start_new_session=True
    )
    yield process
    process.kill()
    process.communicate()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_for(pid: int, states: str) -> None:
    deadline = time.monotonic() + 5
    while state(pid) not in states:
        assert time.monotonic() < deadline, f"it is {state(pid)}, not one of {states}"
        time.sleep(0.005)


def test_pauses_overlap_and_end_with_the_last(child: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    brake = Brake(lambda: child.pid, guard, 0.1)
    try:
        brake.pause(1)
        wait_for(child.pid, "T")
        brake.pause(2)
        brake.resume(1)
        time.sleep(0.1)
        assert state(child.pid) == "T"
        brake.resume(2)
        wait_for(child.pid, "RS")
    finally:
        brake.close()
        guard.close()


def test_a_slowed_process_runs_in_a_duty_cycle(child: subprocess.Popen[bytes]) -> None:
    guard = Guard()
    brake = Brake(lambda: child.pid, guard, 0.02)
    try:
        brake.slow(4.0)
        wait_for(child.pid, "T")
        seen = []
        for _ in range(200):
            seen.append(state(child.pid))
            time.sleep(0.005)
        assert 0.4 < seen.count("T") / len(seen) < 0.95, "three quarters of the time"
        brake.quicken(4.0)
        wait_for(child.pid, "RS")
    finally:
        brake.close()
        guard.close()


def test_a_stopped_process_continues_when_its_stopper_dies(
    child: subprocess.Popen[bytes],
) -> None:
    text = (
        "import os, signal, sys, time\n"
        "from decoupled_diloco_lab.chaos.pauses import Brake, Guard\n"
        f"guard = Guard(); brake = Brake(lambda: {child.pid}, guard, 0.1); brake.pause(1)\n"
        "time.sleep(60)"
    )
    stopper = subprocess.Popen([sys.executable, "-c", text])
    try:
        wait_for(child.pid, "T")
    finally:
        stopper.send_signal(signal.SIGKILL)
        stopper.wait()
    wait_for(child.pid, "RS")


FULL = """
import errno, sys
from pathlib import Path
from decoupled_diloco_lab.chaos import spaces
from decoupled_diloco_lab.chaos.spaces import Disks
folder = Path(sys.argv[1])
spaces.own_mounts()
disks = Disks(folder, ["shard-0"])
path = folder / "durable" / "shard-0" / "1.journal"
path.write_bytes(b"a" * 100_000)
disks.fill("shard-0")
try:
    path.with_name("2.journal").write_bytes(b"b" * 100_000)
except OSError as error:
    assert error.errno == errno.ENOSPC
    print("full")
disks.free("shard-0")
path.with_name("2.journal").write_bytes(b"b" * 100_000)
disks.close()
"""


@pytest.mark.skipif(
    bool(spaces.unavailable("mount", "umount")),
    reason=spaces.unavailable("mount", "umount") or "available",
)
def test_a_full_disk_refuses_writes_and_its_files_move_to_the_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "full\n"
    found = {p.name: p.stat().st_size for p in (tmp_path / "durable" / "shard-0").iterdir()}
    assert found == {"1.journal": 100_000, "2.journal": 100_000}
    assert [p.name for p in (tmp_path / "durable").iterdir()] == ["shard-0"]


def test_a_lost_disk_is_empty(tmp_path: Path) -> None:
    disks = Disks(tmp_path)
    disks.lose("shard-1")  # its folder does not exist yet
    folder = tmp_path / "durable" / "shard-1"
    folder.mkdir(parents=True)
    (folder / "00000001.journal").write_bytes(b"x")
    disks.lose("shard-1")
    assert list(folder.iterdir()) == []
    disks.close()
