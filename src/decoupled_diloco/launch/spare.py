"""A process in reserve: it has imported torch, so that what is started again is at work at once.

It holds modules and nothing else: no port, no secret, no device (importing initialises none). It
waits at its standard input for a role, the arguments of a command of `ddiloco`, and is from then on
what a new process with these arguments would be: the environment is that of every process of the
launcher, the output goes to the role's log, and ``ps`` shows the role's command line. When its
input closes before that, the launcher is gone, and it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)

IMPORTS = (
    "decoupled_diloco.launch.roles",
    "decoupled_diloco.launch.shard_role",
    "torch._dynamo",  # the first optimizer brings it in: a second more
)
"""What brings in all that learners, evaluators and shards need."""

NICENESS = 10
"""Niceness of the thread that imports: training goes first. A process with a role has the usual."""

QUIET_SECONDS = 10.0
"""A spare is begun when no other process was started for so long: those import, too."""

DEATHS_MAX = 3
"""After so many spares that ended by themselves there is none: the machine may lack the memory."""


class Spare:
    """The one process in reserve of a launcher.

    ``start`` begins one, whose standard input and output are pipes.
    """

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0

    @property
    def pid(self) -> int | None:
        """Which process it is, once it has imported everything."""
        return self._process.pid if self._process and _is_ready(self._process) else None

    def keep(self) -> None:
        """Begins one, if there is none."""
        if self._process is not None and self._process.poll() is not None:
            self._deaths += 1
            logger.warning("the spare process ended by itself, code %s", self._process.returncode)
            self.end()
        if self._process is None and self._deaths < DEATHS_MAX:
            self._process = self._start()

    def take(self, arguments: list[str], log: Path) -> subprocess.Popen[bytes] | None:
        """Makes it the process of these arguments; ``None``: there is none that is ready."""
        process = self._process
        if process is None or not _is_ready(process):
            return None
        assert process.stdin is not None
        role = {"arguments": arguments, "log": str(log)}
        try:
            process.stdin.write(json.dumps(role).encode() + b"\n")
        except BrokenPipeError:
            return None  # it has just died: `keep` finds out
        self._process = None
        _close(process.stdout)
        return process

    def end(self) -> None:
        """Ends it, at once: it has nothing to lose."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close(process.stdin, process.stdout)


def _close(*pipes: IO[bytes] | None) -> None:
    for pipe in filter(None, pipes):
        pipe.close()


def _is_ready(process: subprocess.Popen[bytes]) -> bool:
    """Whether it lives and has said that everything is imported."""
    assert process.stdout is not None
    said = select.poll()  # which takes any descriptor, however many children there are
    said.register(process.stdout, select.POLLIN)
    return process.poll() is None and bool(said.poll(0))


def wait_for_role() -> list[str]:
    """Imports everything, waits, and returns the arguments of the command that it is now."""
    threading.Thread(target=_import_all, name="imports", daemon=True).start()
    line = _first_line(0)
    if not line:
        os._exit(0)  # the launcher is gone, and nothing has begun
    role = json.loads(line)
    _write_to(role["log"])
    called = sys.orig_argv[: -len(sys.argv[1:])]  # python -m decoupled_diloco.cli
    sys.argv[1:] = role["arguments"]
    _retitle([*called, *sys.argv[1:]])
    return sys.argv[1:]


def _import_all() -> None:
    """Imports in a thread of its own, whose raised niceness ends with it: it cannot be lowered."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    for name in IMPORTS:
        importlib.import_module(name)
    os.write(1, b"ready\n")


def _first_line(descriptor: int) -> bytes:
    """A line and nothing behind it, which `stop_with_parent` reads; empty: it was closed."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return b""
        line += byte
    return line


def _write_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _retitle(command: list[str]) -> None:
    """Writes another command line over its own; what does not fit is cut off.

    For ``ps`` and for users who look for a process by its arguments. Where the system does not tell
    the place, the old one stays.
    """
    with contextlib.suppress(OSError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end of proc(5)
        text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
