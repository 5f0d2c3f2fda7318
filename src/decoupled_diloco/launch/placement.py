"""Where the processes of a run are: what the supervisor asks of it, and this machine's answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.launch.spare import Spare
from decoupled_diloco.launch.termination import handling

COMMAND = (sys.executable, "-m", "decoupled_diloco.cli")
"""What runs a child's arguments: the same as ``ddiloco``."""


class PlacedProcess(Protocol):
    """One life of a process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; ``None``: it lives."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal; nothing happens if it has ended."""

    def kill(self) -> None:
        """SIGKILL."""

    def wait(self) -> int:
        """Waits until it has ended; its exit code."""


class Placement(Protocol):
    """Starts processes somewhere."""

    def start(self, name: str, arguments: list[str]) -> PlacedProcess:
        """Starts ``ddiloco ARGUMENTS`` under a name."""

    def ended(self, life: PlacedProcess) -> None:
        """A process has ended: what was kept for it is let go."""

    def prepare(self, arguments: list[list[str]]) -> None:
        """Nothing was started for a while: time to get ready to start one of these again."""

    def close(self) -> None:
        """Nothing will be started any more."""

    def last_words(self, name: str) -> str:
        """The last line that a process wrote to its log."""


class ThisMachine:
    """Processes of this machine.

    No orphan is left: each one's standard input is a pipe from this process, and it ends when that
    closes, however this process dies.

    Args:
        folder: The run folder; logs go to ``logs/<name>.log``.
        keep_spare: Whether one process is kept in reserve for what must be started again.
    """

    def __init__(
        self, folder: Path, descriptors: tuple[int, ...] = (), *, keep_spare: bool = False
    ) -> None:
        self.folder = folder
        self._descriptors = descriptors
        self._room = 0
        self.spare = Spare(self._start_spare) if keep_spare else None

    def start(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        path = self.folder / "logs" / f"{name}.log"
        with path.open("ab") as log, interrupts_deferred():
            spare = self.spare.take(arguments, path) if self.spare else None
            return spare or self._launch(arguments, log, subprocess.STDOUT)

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
            pass_fds=self._descriptors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ended(self, life: PlacedProcess) -> None:
        assert isinstance(life, subprocess.Popen)
        if life.stdin is not None:
            life.stdin.close()

    def prepare(self, arguments: list[list[str]]) -> None:
        """See `Placement`: the spare has room in its command line for that of any other."""
        if self.spare is not None:
            self._room = max(len(" ".join(each).encode()) for each in arguments)
            self.spare.keep()

    def _start_spare(self) -> subprocess.Popen[bytes]:
        with (self.folder / "logs" / "spare.log").open("ab") as errors, interrupts_deferred():
            arguments = ["spare", str(self.folder / RUN_FILE), " " * self._room]
            return self._launch(arguments, subprocess.PIPE, errors)

    def close(self) -> None:
        if self.spare is not None:
            self.spare.end()

    def last_words(self, name: str) -> str:
        log = self.folder / "logs" / f"{name}.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return lines[-1] if lines else "it wrote nothing to its log"


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
