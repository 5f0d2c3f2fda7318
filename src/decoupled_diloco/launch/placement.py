"""Where the processes of a run are: what the supervisor asks of it, and this machine's answer."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.launch.fork_server import AVAILABLE, ForkServer
from decoupled_diloco.launch.termination import handling, send_to_all_of

logger = logging.getLogger(__name__)

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

    def close(self) -> None:
        """Nothing will be started any more."""

    def last_words(self, name: str) -> str:
        """The last line that a process wrote to its log."""


class LaunchedProcess(subprocess.Popen[bytes]):
    """One life of a process that leads a session; see `send_to_all_of`."""

    def send_signal(self, sig: int) -> None:
        """Sends a signal; nothing happens if it has ended."""
        if self.poll() is None:
            send_to_all_of(self.pid, sig)


class ThisMachine:
    """Processes of this machine.

    No orphan is left: their standard input is a pipe from this process, and they end when that
    closes, however this process dies.

    Args:
        folder: The run folder; logs go to ``logs/<name>.log``.
        descriptors: What each process holds for as long as it lives.
        forks: Whether one process imports, and all others are forked from it (on Linux).
        server: The process that does, if there is one already; `close` leaves it.
    """

    def __init__(
        self,
        folder: Path,
        descriptors: tuple[int, ...] = (),
        *,
        forks: bool = False,
        server: ForkServer | None = None,
    ) -> None:
        self.folder = folder
        self._descriptors = descriptors
        self._own = self._fork_server() if forks and AVAILABLE and server is None else None
        self.server = server or self._own
        self._pipe: tuple[int, ...] = (
            os.pipe()
        )  # children read it: it closes when this process ends

    def start(self, name: str, arguments: list[str]) -> PlacedProcess:
        path = self.folder / "logs" / f"{name}.log"
        server = self.server if self.server and self.server.is_ready() else None
        with path.open("ab") as log, interrupts_deferred():
            alive = self._pipe[0]
            passed = (alive, *self._descriptors)
            forked = server.fork(arguments, path, passed) if server else None
            return forked or self._launch(arguments, alive, log, subprocess.STDOUT)

    def command(self, arguments: list[str]) -> list[str]:
        """What is run for a process's arguments."""
        return [*COMMAND, *arguments]

    def _launch(
        self, arguments: list[str], standard: int, output: int | IO[bytes], errors: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """One way for all: what is forked must have the environment of what is not."""
        return LaunchedProcess(
            self.command(arguments),
            bufsize=0,
            stdin=standard,
            stdout=output,
            stderr=errors,
            start_new_session=True,
            pass_fds=self._descriptors,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def _fork_server(self) -> ForkServer | None:
        """Saves seconds, and nothing depends on it: a machine at its limit starts without it."""
        try:
            return ForkServer(self._start_server, self.folder / RUN_FILE)
        except OSError as error:
            logger.warning("no fork server can be started (%s): processes import alone", error)
            return None

    def _start_server(self, arguments: list[str], orders: socket.socket) -> subprocess.Popen[bytes]:
        path = self.folder / "logs" / "fork-server.log"
        with path.open("ab") as errors, interrupts_deferred():
            return self._launch(arguments, orders.fileno(), subprocess.PIPE, errors)

    def close(self) -> None:
        if self._own is not None:
            self._own.end()
        for each in self._pipe:
            os.close(each)
        self._pipe = ()

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
