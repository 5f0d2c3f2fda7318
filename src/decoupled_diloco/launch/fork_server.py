"""One process imports torch, and the other processes of a launcher are forked from it.

An import takes seconds of CPU time and a fork takes milliseconds, so runs and restarted learners
start seconds sooner. The server holds only modules: no port, no secret, no device, and one thread.
It receives roles on its standard input, as arguments of `ddiloco` commands. Each child then equals
a new process with these arguments. It has its own session and the launcher's environment, its
output goes to the role's log, and ``ps`` shows the role's command line. A role also brings file
descriptors for the child: its standard input, and the lock of the run folder. The server reports
every child that ends. When its input closes, the launcher is gone, and the server ends. Its
children end too, because their input closes as well.

Only Linux has the server: on macOS, libraries that PyTorch calls do not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from decoupled_diloco.launch.termination import send_to_all_of

logger = logging.getLogger(__name__)

IMPORTS = (
    "decoupled_diloco.launch.roles",
    "decoupled_diloco.launch.shard_role",
    "torch._dynamo",  # the first optimizer imports it, which takes another second
)
"""Modules that import everything that learners, evaluators and shards need."""

AVAILABLE = sys.platform == "linux"

READY_SECONDS = 120.0
"""Time that a server may take to import everything, or to answer. A slower one is not used."""

ROLE_BYTES = 1 << 16
DESCRIPTORS_MAX = 8

ROOM = 4096
"""Bytes of the server's command line that its children overwrite with their own command lines."""


class ForkedProcess:
    """A forked process, with the interface of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal; ``None`` while it runs."""
        if self._code is None:
            self._code = self._server.code_of(self.pid)
        return self._code

    def send_signal(self, sig: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self.poll() is None:
            send_to_all_of(self.pid, sig)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


class ForkServer:
    """A launcher's end of the server.

    Args:
        start: Starts the process with these arguments and this socket as its standard input; its
            standard output is a pipe.
        run: Path that ``ps`` shows for the server.
    """

    def __init__(
        self, start: Callable[[list[str], socket.socket], subprocess.Popen[bytes]], run: Path
    ) -> None:
        self._orders, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = start(["fork-server", str(run), " " * ROOM], theirs)
            except OSError:
                self._orders.close()
                raise
        self._unparsed = b""
        self._ready = False
        self._codes: dict[int, int] = {}
        self._answer: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self) -> bool:
        """Whether the server can fork; waits until it has imported everything."""
        return self._until(lambda: self._ready)

    def fork(
        self, arguments: list[str], log: Path, descriptors: Sequence[int]
    ) -> ForkedProcess | None:
        """Fork a process with these arguments; return ``None`` if the server has ended.

        Args:
            arguments: Arguments of `ddiloco`.
            log: File that receives the output.
            descriptors: Its standard input, and further descriptors that it keeps open.

        Raises:
            OSError: The server cannot fork now, at a limit on processes or memory.
        """
        self._answer = None
        role = {"arguments": arguments, "log": str(log)}
        with contextlib.suppress(OSError):  # the server has ended, which `_until` notices
            socket.send_fds(self._orders, [json.dumps(role).encode() + b"\n"], descriptors)
        if not self._until(lambda: self._answer is not None):
            return None
        assert self._answer is not None
        if self._answer < 0:
            raise OSError(-self._answer, os.strerror(-self._answer))
        return ForkedProcess(self, self._answer)

    def code_of(self, pid: int) -> int | None:
        """Return a child's exit code; ``None`` while it runs.

        Without the server, the code of a child that has ended is unknown: it counts as killed.
        """
        open_ = self._receive(0.0)
        if pid not in self._codes and not open_ and not _is_running(pid):
            self._codes[pid] = -signal.SIGKILL
        return self._codes.get(pid)

    def end(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.wait()
        self._orders.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _until(self, done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + READY_SECONDS
        while not done():
            if not self._receive(0.1) or time.monotonic() > deadline:
                logger.warning("the fork server does not answer; each process imports torch itself")
                return False
        return True

    def _receive(self, seconds: float) -> bool:
        """Read the server's messages; return whether the server still exists."""
        pipe = self._process.stdout
        assert pipe is not None
        if pipe.closed:
            return False
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while poll.poll(1000 * seconds):
            received = os.read(pipe.fileno(), 65536)
            if not received:
                return False
            *lines, self._unparsed = (self._unparsed + received).split(b"\n")
            for line in lines:
                self._on_message(json.loads(line))
            seconds = 0.0
        return True

    def _on_message(self, message: dict[str, int]) -> None:
        self._ready = True
        if "forked" in message:
            self._answer = message["forked"]
            self._codes.pop(self._answer, None)  # of an earlier process with the same id
        elif "refused" in message:
            self._answer = -message["refused"]
        elif "ended" in message:
            self._codes[message["ended"]] = message["code"]


def _is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie.

    Children of a server that has died may stay zombies: possibly no process reaps them.
    """
    try:
        return stat_of(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third, ``state``, on (see proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def serve() -> list[str]:
    """Fork until the launcher is gone; in each child, return its arguments."""
    with _ending_with_the_launcher():
        _import_everything()
    gc.collect()
    gc.freeze()  # a child's collector must not write to the shared pages, which would copy them
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _report(ready=os.getpid())
    orders = socket.socket(fileno=0)
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _reap()
        if 0 not in readable:
            continue
        order, descriptors, _, _ = socket.recv_fds(orders, ROLE_BYTES, DESCRIPTORS_MAX)
        if not order:
            os._exit(0)
        while not order.endswith(b"\n"):  # one role at a time: the launcher waits for the answer
            order += orders.recv(ROLE_BYTES)
        try:
            pid = os.fork()
        except OSError as error:  # all other processes still need this one
            _close(descriptors)
            _report(refused=error.errno or errno.EAGAIN)
            continue
        if pid == 0:
            signal.set_wakeup_fd(-1)
            _close((woken, wakes))
            orders.detach()
            return _become(json.loads(order), descriptors[0])
        _close(descriptors)
        _report(forked=pid)


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


@contextlib.contextmanager
def _ending_with_the_launcher() -> Iterator[None]:
    """End the process when its input closes while it imports modules and does not read it."""
    over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(0, 0)  # reports only that the input is closed, not that data is there
        while not over.is_set():
            if poll.poll(100):
                os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()  # a fork would copy this thread's locks without the thread


def _import_everything() -> None:
    """Import `IMPORTS` without a CUDA context, which does not survive a fork.

    The variable makes PyTorch count devices through the driver's NVML instead of CUDA.
    """
    with _environment("PYTORCH_NVML_BASED_CUDA_CHECK", "1"):
        for name in IMPORTS:
            importlib.import_module(name)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    yield
    if before is None:
        del os.environ[name]
    else:
        os.environ[name] = before


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            _report(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _report(**message: int) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _become(role: dict[str, Any], alive: int) -> list[str]:
    """Do in a forked child what `subprocess.Popen` does for a new process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(role["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor, standard in ((alive, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    os.close(alive)
    os.close(log)
    if numpy := sys.modules.get("numpy"):
        # Children must not share random numbers. Python reseeds its generator after a fork, and
        # torch's generator has a fixed seed anyway.
        numpy.random.seed()
    called = sys.orig_argv[: -len(sys.argv[1:])]  # python -m decoupled_diloco.cli
    sys.argv[1:] = role["arguments"]
    _retitle([*called, *sys.argv[1:]])
    return sys.argv[1:]


def _retitle(command: list[str]) -> None:
    """Overwrite this process's command line, for ``ps`` and for searches by arguments.

    The command is truncated to the space of the old one. If the system does not report where the
    command line is in memory, the old one stays.
    """
    with contextlib.suppress(OSError, ValueError):
        start, end = map(int, stat_of("self")[45:47])  # arg_start, arg_end
        text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
