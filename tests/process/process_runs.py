"""Runs of real processes on loopback, small enough that a step takes milliseconds."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.launch.fork_server import AVAILABLE, ForkServer
from decoupled_diloco.launch.local import LocalRun, RunOutcome
from decoupled_diloco.launch.placement import ThisMachine
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.segments import segments_of

SMALL = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch_size": 2,
    "corpus_bytes_max": 200_000,
    "warmup_steps": 0,
    "step_seconds": 0.05,
}
STEP_SECONDS_MAX = 5.0
"""A longer step waits for another process. A busy machine alone may take seconds; in virtual time
(`tests/simulation`) no step takes any longer.
"""

PATIENCE = 4
"""Factor on time limits, because a busy machine is slower than an idle one."""


def config_of(folder: Path, **tables: Any) -> RunConfig:
    """Return the configuration of a small run."""
    return RunConfig(
        run={
            "name": "small",
            "folder": folder,
            "learners": 2,
            "max_steps": 60,
            "evaluator": False,
            **tables.get("run", {}),
        },
        sync={"fragments": 4, "sync_every": 4, "overlap_steps": 1, **tables.get("sync", {})},
        syncer={"shards": 1, "port": 0, **tables.get("syncer", {})},
        tls=tables.get("tls", {}),
        learner=tables.get("learner", {}),
        data=tables.get("data", {}),
        workload={"name": "paced", "options": {**SMALL, **tables.get("workload", {})}},
        faults=tables.get("faults", ()),
        sites=tables.get("sites", ()),
        privacy=tables.get("privacy", {}),
    )


def config_file(folder: Path, **tables: Any) -> Path:
    """Write the same configuration to a file next to the run folder."""
    path = folder.with_suffix(".toml")
    path.write_text(dump_config(config_of(folder, **tables)))
    return path


@functools.cache
def fork_server() -> ForkServer | None:
    """One for all tests of this process: each import of PyTorch would take most of their time.

    Its children have this process's present folder and environment.
    """
    if not AVAILABLE:
        return None
    folder = Path(tempfile.mkdtemp())
    (folder / "logs").mkdir()
    here = ThisMachine(folder, forks=True)
    atexit.register(here.close)
    return here.server


@contextlib.contextmanager
def local_run(
    config: RunConfig, *, resume: bool = False, own_server: bool = False, learners: bool = True
) -> Iterator[LocalRun]:
    """Create a `LocalRun` that is closed in any case."""
    server = None if own_server or not config.run.fork_server else fork_server()
    run = LocalRun(config, resume=resume, server=server, learners=learners)
    try:
        yield run
    finally:
        run.close()


def wait(run: LocalRun, script: Iterator[None] | None = None, seconds: float = 90.0) -> RunOutcome:
    """Wait for the run's end while a script advances by one `yield` per poll."""
    deadline = time.monotonic() + PATIENCE * seconds

    def on_poll() -> None:
        assert time.monotonic() < deadline, f"the run does not end: {logs(run.path)}"
        if script is not None:
            next(script, None)

    try:
        return run.wait(on_poll)
    finally:
        if isinstance(script, Generator):
            script.close()  # The script may have started processes; closing it stops them.


def play(run: LocalRun, script: Iterator[None], seconds: float = 90.0) -> None:
    """Advance a script by one `yield` per poll until it ends; the run need not end."""
    deadline = time.monotonic() + PATIENCE * seconds
    for _ in script:
        assert time.monotonic() < deadline, f"the script does not end: {logs(run.path)}"
        run.supervisor.poll()


def pause(seconds: float) -> Iterator[None]:
    """Yield until this time has passed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield


def when(condition: Callable[[], object]) -> Iterator[None]:
    """Yield until a condition is true."""
    while not condition():
        yield


def until(
    condition: Callable[[], object], what: str, seconds: float = 30.0, every: float = 0.02
) -> None:
    """Wait until a condition is true; check it every ``every`` seconds."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE * seconds} s in vain: {what}"
        time.sleep(every)


def send(run: LocalRun, name: str, number: signal.Signals) -> None:
    """Send a signal to a child of the run."""
    process = run.supervisor.children[name].process
    assert process is not None
    process.send_signal(number)


def stop(run: LocalRun) -> None:
    """End a run as if its budget were reached."""
    output_of("stop", run.addresses[0], "--auth-token-file", str(run.secret_file))


def health(address: str) -> dict[str, Any]:
    """Return the answer of a shard at `/healthz`; empty if it does not answer."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/healthz", timeout=1) as r:
        return dict(json.load(r))
    return {}


def records(folder: Path, process: str) -> list[Record]:
    """Return the records on a process's tape; none before the process has begun it."""
    path = folder / "tape" / f"{process}.jsonl"
    return list(TapeReader(path)) if path.exists() or segments_of(path) else []


def relays_of(run: Path, learner: str) -> list[str]:
    """Return the relay of each of a learner's connections to shard 0; empty text: none."""
    made = [r.data for r in records(run, "shard-0") if r.type == "Connected"]
    return [each.get("relay", "") for each in made if each["peer"] == learner]


def kill(run: Path, name: str) -> None:
    """Send SIGKILL to a process of the run."""
    started = [r.value() for r in TapeReader(run) if r.type == "ProcessStarted"]
    os.kill([each.pid for each in started if each.name == name][-1], signal.SIGKILL)


def longest_step(folder: Path, process: str) -> float:
    """Return the longest time between two step boundaries of a learner with one incarnation."""
    own = records(folder, process)
    assert max(r.life for r in own) == 0, f"{process} was restarted"
    steps = [r.at for r in own if r.type == "StepFinished"]
    return max(b - a for a, b in pairwise(steps))


def logs(folder: Path) -> str:
    """Return the ends of all logs, for a failure's message."""
    found = sorted((folder / "logs").glob("*.log"))
    return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in found)


def orphans(folder: Path) -> list[str]:
    """Return the processes of this user whose command line names the run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if f"{folder}/run.toml" in line and "decoupled_diloco" in line:
                found.append(f"{entry.name}: {line}")
    return found


def command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start ``ddiloco ARGUMENTS`` in a separate process group, like a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "decoupled_diloco.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        **options,
    )


@contextlib.contextmanager
def stopped_at_exit(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Yield the process, and kill it at the end if it still runs."""
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def kill_everything(folder: Path, process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to the launcher and to all of its children before they notice."""
    process.send_signal(signal.SIGSTOP)
    for each in orphans(folder):
        number = int(each.partition(":")[0])
        if number != process.pid:
            os.kill(number, signal.SIGKILL)
    process.kill()
    process.wait()
    until(lambda: not orphans(folder), "everybody is dead")


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return all scalars that TensorBoard reads from a folder: steps and values by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def ddiloco(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """Run ``ddiloco ARGUMENTS`` like a user."""
    return subprocess.run(
        [sys.executable, "-m", "decoupled_diloco.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": str(columns)},
        check=False,
    )


def output_of(*arguments: str) -> str:
    """Return the output of a command that must succeed."""
    done = ddiloco(*arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout
