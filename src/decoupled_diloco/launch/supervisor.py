"""Processes of this machine: started, watched, started again with bounded backoff, ended.

No orphan is left: each child's standard input is a pipe from this process, and a child ends when
that closes, however this process dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.spare import QUIET_SECONDS, Spare
from decoupled_diloco.launch.termination import handling
from decoupled_diloco.observe.samples import (
    EndRequested,
    ProcessEnded,
    ProcessStarted,
    RestartScheduled,
)
from decoupled_diloco.observe.tape import TapeWriter

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "decoupled_diloco.cli")
"""What runs a child's arguments: the same as ``ddiloco``."""

RESTART_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Delays before a process is started again; after as many failures in a row it stays down."""

HEALTHY_SECONDS = 30.0
"""A process that has lived so long has not failed in a row."""

TERMINATE_SECONDS = 3.0
"""How long a process that was told to end may take before it is killed. Learners and shards end one
after the other, and a user who has pressed Ctrl-C waits for both."""


@dataclass
class Child:
    """One process and its lives."""

    name: str
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    restart_at: float | None = None
    restarts: bool = True
    held: bool = False
    code: int | None = None

    @property
    def running(self) -> bool:
        """Whether it has a live process."""
        return self.process is not None

    @property
    def down(self) -> bool:
        """Whether it failed and will not come back; not if it is kept down on purpose."""
        ended = not (self.running or self.held) and self.restart_at is None
        return ended and self.code not in (None, 0)

    @property
    def done(self) -> bool:
        """Whether it ended well."""
        return not self.running and self.restart_at is None and self.code == 0


@dataclass
class Supervisor:
    """The children of this process.

    Attributes:
        folder: The run folder; logs go to ``logs/<name>.log``.
        tape: The launcher's tape.
        descriptors: Open files that every child inherits.
        spare: The process in reserve, if one is kept.
    """

    folder: Path
    tape: TapeWriter
    descriptors: tuple[int, ...] = ()
    children: dict[str, Child] = field(default_factory=dict)
    stopping: bool = False
    spare: Spare | None = None

    def keep_spare(self) -> None:
        """From now on, one process is kept in reserve for what must be started again."""
        self.spare = Spare(self._start_spare)

    def _start_spare(self) -> subprocess.Popen[bytes]:
        """With room in its command line for that of any child, whose place it may take."""
        room = max(len(" ".join(child.arguments).encode()) for child in self.children.values())
        log = self.folder / "logs" / "spare.log"
        with log.open("ab") as errors, interrupts_deferred():
            arguments = ["spare", str(self.folder / RUN_FILE), " " * room]
            return self._launch(arguments, subprocess.PIPE, errors)

    def start(self, name: str, arguments: list[str], *, held: bool = False) -> None:
        """Starts ``ddiloco ARGUMENTS`` under a name; ``held``: only when it is brought back."""
        child = Child(name, arguments, held=held)
        self.children[name] = child
        if not held:
            self._spawn(child)

    def _spawn(self, child: Child) -> None:
        child.restart_at, child.started_at = None, time.monotonic()
        path = self.folder / "logs" / f"{child.name}.log"
        with path.open("ab") as log, interrupts_deferred():
            spare = self.spare.take(child.arguments, path) if self.spare else None
            child.process = spare or self._launch(child.arguments, log, subprocess.STDOUT)
        self._sample(ProcessStarted(child.name, child.process.pid))

    def _launch(
        self, arguments: list[str], output: int | IO[bytes], errors: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """One way for all: a spare must have the environment of the one whose place it takes."""
        return subprocess.Popen(
            [*COMMAND, *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            pass_fds=self.descriptors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _sample(
        self, sample: ProcessStarted | ProcessEnded | EndRequested | RestartScheduled
    ) -> None:
        self.tape.sample(time.monotonic(), sample)
        self.tape.flush()

    def poll(self) -> None:
        """Takes note of children that ended, and starts again those whose time has come."""
        now = time.monotonic()
        for child in self.children.values():
            if child.process is not None and (code := child.process.poll()) is not None:
                self._ended(child, code, now)
            if child.restart_at is not None and now >= child.restart_at and not self.stopping:
                self._spawn(child)
        if self.spare is not None and self._is_quiet(now):
            self.spare.keep()

    def _is_quiet(self, now: float) -> bool:
        """Whether nothing was started of late, and something may have to be."""
        started = max((child.started_at for child in self.children.values()), default=now)
        may_be_needed = any(child.restarts for child in self.children.values())
        return may_be_needed and not self.stopping and now - started > QUIET_SECONDS

    def _ended(self, child: Child, code: int, now: float) -> None:
        assert child.process is not None
        if child.process.stdin is not None:
            child.process.stdin.close()
        child.process, child.code = None, code
        by_signal = -code if code < 0 else None
        self._sample(ProcessEnded(child.name, None if by_signal else code, by_signal))
        if code == 0 or self.stopping or not child.restarts or child.held:
            return
        child.failures = 1 if now - child.started_at > HEALTHY_SECONDS else child.failures + 1
        if code == ConfigError.exit_code or child.failures > len(RESTART_SECONDS):
            logger.error("%s stays down: %s", child.name, self.last_words(child.name))
            return
        delay = RESTART_SECONDS[child.failures - 1]
        child.restart_at = now + delay
        self._sample(RestartScheduled(child.name, delay))

    def last_words(self, name: str) -> str:
        """The last line that a child wrote to its log."""
        log = self.folder / "logs" / f"{name}.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "it wrote nothing to its log"

    def retire(self) -> None:
        """Starts no process again from now on."""
        for child in self.children.values():
            child.restarts, child.restart_at = False, None

    def kill(self, name: str, *, restart: bool) -> bool:
        """SIGKILL; returns whether there was a process."""
        child = self.children[name]
        child.restarts = restart
        if child.process is None:
            return False
        child.process.kill()
        return True

    def take_down(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends a process on purpose and keeps it down until `bring_back`: it has not failed.

        Args:
            name: Which.
            number: SIGKILL, or SIGTERM: it is told to end, and has the time that it takes.
        """
        child = self.children[name]
        child.held, child.restart_at = True, None
        if child.process is not None:
            child.process.send_signal(number)
            if number == signal.SIGTERM:
                self._sample(EndRequested((name,)))

    def bring_back(self, name: str) -> bool:
        """Starts a process again that was taken down; ``False``: it has not ended yet."""
        child = self.children[name]
        if child.process is not None:
            return False
        child.held = False
        if child.restarts and not self.stopping:
            self._spawn(child)
        return True

    def stop(self, names: list[str] | None = None, extra_seconds: float = 0.0) -> None:
        """Tells children to end, in a group; kills those that take too long.

        ``extra_seconds``: what they may take beyond the usual, to hand in what they have.
        """
        self.stopping = self.stopping or names is None
        if self.stopping and self.spare is not None:
            self.spare.end()
        chosen = [c for n, c in self.children.items() if names is None or n in names]
        told = []
        for child in chosen:
            child.restarts, child.restart_at = False, None
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)
                told.append(child.name)
        if told:  # after the signals: no child lives on because the tape cannot be written
            self._sample(EndRequested(tuple(told)))
        deadline = time.monotonic() + TERMINATE_SECONDS + extra_seconds
        while any(child.running for child in chosen) and time.monotonic() < deadline:
            time.sleep(0.05)
            self.poll()
        for child in chosen:
            if child.process is not None:
                logger.warning("%s does not end: killing it", child.name)
                child.process.kill()
                child.process.wait()
        self.poll()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C and SIGTERM take effect at the end of the block, not between a process and its name.

    The handlers are exchanged; blocking the signals would be inherited by the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)

    try:
        with handling(note, signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if caught:
            signal.raise_signal(caught[0])
