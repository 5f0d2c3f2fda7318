"""Pause processes with SIGSTOP and SIGCONT, or slow them down with a duty cycle."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
from collections.abc import Callable

from decoupled_diloco.launch.termination import send_to_all_of

CYCLE_SECONDS_MAX = 2.0
"""Longest duty cycle. A slowed process is stopped for less than this at a time, so that its leases
do not expire."""

CYCLE_SECONDS_MIN = 0.05

POLL_SECONDS = 0.02

_GUARD = 'all=; while read pid; do all="$all -$pid"; done; [ -z "$all" ] || kill -s CONT -- $all'
"""Shell script that reads process ids from standard input and continues their groups at EOF."""


class Guard:
    """A separate process that continues stopped processes if this one dies first.

    A stopped process cannot notice the death of its parent.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C or a kill of this process group must not reach it
        )

    def watch(self, pid: int) -> None:
        """Add a process whose group must be continued at the end."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{pid}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Brake:
    """Stops and continues one process that leads a group, and the processes that it started.

    Args:
        pid: Returns the current process id, or ``None`` if the process does not run.
        guard: Continues the process if this one dies.
        step_seconds: Duration of an undisturbed step, so that a duty cycle has whole steps.
    """

    def __init__(self, pid: Callable[[], int | None], guard: Guard, step_seconds: float) -> None:
        self._pid = pid
        self._guard = guard
        self._step_seconds = step_seconds
        self._pauses: dict[int, int | None] = {}
        self._factors: list[float] = []
        self._stopped_pid: int | None = None
        self._known: set[int] = set()
        self._ends = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="brake", daemon=True)
        self._thread.start()

    def pause(self, number: int) -> None:
        """Stop the current process. A process that starts later runs."""
        self._pauses[number] = self._pid()
        self._changed.set()

    def resume(self, number: int) -> None:
        self._pauses.pop(number, None)
        self._changed.set()

    def slow(self, factor: float) -> None:
        """Let the process run for only 1/factor of the time. Active factors are multiplied."""
        self._factors.append(factor)
        self._changed.set()

    def quicken(self, factor: float) -> None:
        self._factors.remove(factor)
        self._changed.set()

    def close(self) -> None:
        self._ends.set()
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.is_set():
            self._turn()
        self._continue()

    def _turn(self) -> None:
        """Run one duty cycle, one poll of a pause, or wait for the next change."""
        pid = self._pid()
        factor = math.prod(self._factors)
        if pid is not None and pid in list(self._pauses.values()):
            self._stop(pid)
            self._wait(POLL_SECONDS)
        elif pid is not None and factor > 1.0:
            cycle = min(CYCLE_SECONDS_MAX, max(CYCLE_SECONDS_MIN, factor * self._step_seconds))
            self._stop(pid)
            self._ends.wait(cycle * (1.0 - 1.0 / factor))
            self._continue()
            self._ends.wait(cycle / factor)
        else:
            self._continue()
            self._wait(POLL_SECONDS if self._pauses or self._factors else None)

    def _wait(self, seconds: float | None) -> None:
        self._changed.wait(seconds)
        self._changed.clear()

    def _stop(self, pid: int) -> None:
        if self._stopped_pid == pid:
            return
        # Register with the guard before the first stop: this process may die right after it.
        if pid not in self._known:
            self._known.add(pid)
            self._guard.watch(pid)
        send_to_all_of(pid, signal.SIGSTOP)
        self._stopped_pid = pid

    def _continue(self) -> None:
        if self._stopped_pid is not None:
            send_to_all_of(self._stopped_pid, signal.SIGCONT)
            self._stopped_pid = None
