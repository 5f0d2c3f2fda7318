"""The processes that a run's launcher has started on this machine, and which of them still exist.

The launcher writes every start and every end of a process to its tape. A process id can belong to
another program later, so an id counts only if its process started when the tape says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from decoupled_diloco.launch.fork_server import stat_of
from decoupled_diloco.run_model.phrases import ending_in_words
from decoupled_diloco.tape.reader import TapeReader
from decoupled_diloco.tape.records import FOLDER_NAME
from decoupled_diloco.tape.samples import ProcessEnded, ProcessStarted

START_SECONDS_MAX = 60.0
"""The longest time between the start of a process and its record: a busy machine takes a while."""

CLOCK_SECONDS = 2.0
"""How much earlier the record can seem to be: `ps` shows whole seconds, and clocks are adjusted."""


@dataclass(frozen=True)
class LocalProcess:
    """The last start of a process of a run.

    Attributes:
        name: Its name in the run, such as ``learner-1``.
        pid: Its process id.
        started: When the launcher recorded its start, in seconds since 1970.
        ended: How it ended, in words; empty: the launcher has not noticed an end.
    """

    name: str
    pid: int
    started: float
    ended: str = ""

    @property
    def exists(self) -> bool:
        """Whether this process still exists, and its id does not belong to another program."""
        began = None if self.ended else process_start(self.pid)
        return began is not None and (
            self.started - START_SECONDS_MAX <= began <= self.started + CLOCK_SECONDS
        )

    @property
    def state(self) -> str:
        """A short description for users."""
        return self.ended or ("running" if self.exists else "gone")


def local_processes(run: Path) -> list[LocalProcess]:
    """Return the processes that the launcher of a run has started, each as of its last start.

    Raises:
        StorageError: The launcher's tape cannot be read.
    """
    found: dict[str, LocalProcess] = {}
    path = run / FOLDER_NAME / "launcher.jsonl"
    if not path.exists():
        return []
    for record in TapeReader(path):
        if record.kind == "start":
            found.clear()  # the run was resumed: earlier processes are gone
        elif record.type in (ProcessStarted.__name__, ProcessEnded.__name__):
            value = record.value()
            if isinstance(value, ProcessStarted):
                found[value.name] = LocalProcess(value.name, value.pid, record.wall)
            elif isinstance(value, ProcessEnded) and value.name in found:
                last = found[value.name]
                how = ending_in_words(value.code, value.signal)
                found[value.name] = LocalProcess(last.name, last.pid, last.started, how)
    return list(found.values())


def process_start(pid: int) -> float | None:
    """Return when a process started, in seconds since 1970; ``None`` if no such process runs."""
    if sys.platform == "linux":
        return _start_on_linux(pid)
    done = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)],
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    state, _, text = done.stdout.strip().partition(" ")
    if not text or state.startswith("Z"):
        return None
    return time.mktime(time.strptime(text.strip(), "%a %b %d %H:%M:%S %Y"))


def _start_on_linux(pid: int) -> float | None:
    try:
        fields = stat_of(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":  # the process has ended, but its parent has not read its exit code
        return None
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")
