"""Start processes for the supervisor: the interface, and its implementation for this machine."""

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
"""The command that runs a child's arguments; it is equivalent to ``ddiloco``."""


class PlacedProcess(Protocol):
    """A process, with the interface of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal; ``None`` while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal; do nothing if the process has ended."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""


class Placement(Protocol):
    """Starts processes on a real or virtual machine."""

    def start(self, name: str, arguments: list[str]) -> PlacedProcess:
        """Start ``ddiloco ARGUMENTS`` under a name.

        Raises:
            OSError: The process cannot be started.
        """

    def close(self) -> None:
        """Free resources: nothing will be started any more."""

    def last_words(self, name: str) -> str:
        """Return the last line of a process's log."""


class LaunchedProcess(subprocess.Popen[bytes]):
    """A process that leads a session; see `send_to_all_of`."""

    def send_signal(self, sig: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self.poll() is None:
            send_to_all_of(self.pid, sig)


class ThisMachine:
    """Starts processes on this machine.

    No process outlives this one: the standard input of each is a pipe from this process. When the
    pipe closes, even after a SIGKILL, they end.

    Args:
        folder: The run folder; logs go to ``logs/<name>.log``.
        descriptors: File descriptors that each process inherits and keeps open.
        forks: Whether to fork the processes from a fork server (on Linux only).
        server: An existing fork server; `close` does not end it. Default: a new one, with
            ``forks``.
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
        # Children read this pipe as their standard input. It closes when this process ends.
        self._pipe: tuple[int, ...] = os.pipe()

    def start(self, name: str, arguments: list[str]) -> PlacedProcess:
        path = self.folder / "logs" / f"{name}.log"
        server = self.server if self.server and self.server.is_ready() else None
        with path.open("ab") as log, interrupts_deferred():
            alive = self._pipe[0]
            passed = (alive, *self._descriptors)
            forked = server.fork(arguments, path, passed) if server else None
            return forked or self._launch(arguments, alive, log, subprocess.STDOUT)

    def command(self, arguments: list[str]) -> list[str]:
        """Return the command line for a process's arguments."""
        return [*COMMAND, *arguments]

    def _launch(
        self, arguments: list[str], standard: int, output: int | IO[bytes], errors: int | IO[bytes]
    ) -> subprocess.Popen[bytes]:
        """Launch a process or the fork server, whose children inherit the same environment."""
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
        """Start a fork server; return `None` on failure, because it only saves time."""
        try:
            return ForkServer(self._start_server, self.folder / RUN_FILE)
        except OSError as error:
            logger.warning(
                "the fork server cannot be started (%s); each process imports torch itself", error
            )
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
    """Defer Ctrl-C and SIGTERM to the end of the block.

    Otherwise a signal could come after a process has started and before its id is stored. The
    handlers are replaced; a started process would inherit a block of the signals.
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
