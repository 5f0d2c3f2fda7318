"""One process imports torch, and all others of a launcher are forked from it.

Importing takes seconds of a core, forking milliseconds: a run begins, and a killed learner is back,
as much sooner. The server holds modules and nothing else: no port, no secret, no device, and one
thread. It is told roles on its standard input, the arguments of commands of `ddiloco`. Each child
is then what a new process with these arguments would be: a session of its own, the launcher's
environment, output to the role's log, and ``ps`` shows the role's command line. What else a child
holds comes with its role: its standard input, and the lock of the run folder. The server tells of
every child that ends. When its input closes, the launcher is gone, and it ends; so do its children,
whose input closes as well.

Linux alone has it: on macOS what PyTorch calls does not survive a fork.
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
    "torch._dynamo",  # the first optimizer brings it in: a second more
)
"""What brings in all that learners, evaluators and shards need."""

AVAILABLE = sys.platform == "linux"

READY_SECONDS = 120.0
"""A server that has not imported everything by then is given up."""

ROLE_BYTES = 1 << 16
DESCRIPTORS_MAX = 8

ROOM = 4096
"""Bytes of its command line that are left for those of its children."""


class ForkedProcess:
    """One life of a process, as `subprocess.Popen` has it."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; ``None``: it lives."""
        if self._code is None:
            self._code = self._server.code_of(self.pid)
        return self._code

    def send_signal(self, sig: int) -> None:
        """Sends a signal; nothing happens if it has ended."""
        if self.poll() is None:
            send_to_all_of(self.pid, sig)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Waits until it has ended; its exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


class ForkServer:
    """A launcher's end of the server.

    Args:
        start: Begins the process with these arguments and this socket as its standard input; its
            standard output is a pipe.
        run: Whose it is, for ``ps``.
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
        self._said = b""
        self._ready = False
        self._codes: dict[int, int] = {}
        self._answer: int | None = None

    @property
    def pid(self) -> int:
        """Which process it is."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Whether it can fork; waits until it has imported everything."""
        return self._until(lambda: self._ready)

    def fork(
        self, arguments: list[str], log: Path, descriptors: Sequence[int]
    ) -> ForkedProcess | None:
        """A process of these arguments; ``None``: the server has ended.

        Raises:
            OSError: The server cannot fork, at a limit on processes or memory; it may again later.

        Args:
            arguments: Of `ddiloco`.
            log: Where its output goes.
            descriptors: Its standard input, and what else it holds for as long as it lives.
        """
        self._answer = None
        role = {"arguments": arguments, "log": str(log)}
        with contextlib.suppress(OSError):  # it has ended, which is told below
            socket.send_fds(self._orders, [json.dumps(role).encode() + b"\n"], descriptors)
        if not self._until(lambda: self._answer is not None):
            return None
        assert self._answer is not None
        if self._answer < 0:
            raise OSError(-self._answer, os.strerror(-self._answer))
        return ForkedProcess(self, self._answer)

    def code_of(self, pid: int) -> int | None:
        """A child's exit code; without the server nobody knows it, and it counts as killed."""
        open_ = self._listen(0.0)
        if pid not in self._codes and not open_ and not _lives(pid):
            self._codes[pid] = -signal.SIGKILL
        return self._codes.get(pid)

    def end(self) -> None:
        """Ends it, and what is left of its children."""
        self._process.kill()
        self._process.wait()
        self._orders.close()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _until(self, done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + READY_SECONDS
        while not done():
            if not self._listen(0.1) or time.monotonic() > deadline:
                logger.warning("the fork server does not answer: processes import by themselves")
                return False
        return True

    def _listen(self, seconds: float) -> bool:
        """Takes in what it has said; whether it is still there."""
        pipe = self._process.stdout
        assert pipe is not None
        if pipe.closed:
            return False
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while poll.poll(1000 * seconds):
            said = os.read(pipe.fileno(), 65536)
            if not said:
                return False
            *lines, self._said = (self._said + said).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
            seconds = 0.0
        return True

    def _take(self, said: dict[str, int]) -> None:
        self._ready = True
        if "forked" in said:
            self._answer = said["forked"]
            self._codes.pop(self._answer, None)  # of an earlier process that had the same number
        elif "refused" in said:
            self._answer = -said["refused"]
        elif "ended" in said:
            self._codes[said["ended"]] = said["code"]


def _lives(pid: int) -> bool:
    """Whether a process is there that is no zombie: nobody may care for what a server left."""
    try:
        return stat_of(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stat_of(pid: int | str) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the third, ``state``, on (see proc(5))."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def serve() -> list[str]:
    """Forks until the launcher is gone; returns in each child, with its arguments."""
    with _ending_with_the_launcher():
        _import_everything()
    gc.collect()
    gc.freeze()  # what is shared stays shared: the collector of no child writes to it
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _say(ready=os.getpid())
    orders = socket.socket(fileno=0)
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _reap()
        if 0 not in readable:
            continue
        told, descriptors, _, _ = socket.recv_fds(orders, ROLE_BYTES, DESCRIPTORS_MAX)
        if not told:
            os._exit(0)
        while not told.endswith(b"\n"):  # one role at a time: the launcher waits for the answer
            told += orders.recv(ROLE_BYTES)
        try:
            pid = os.fork()
        except OSError as error:  # all other processes still need this one
            _close(descriptors)
            _say(refused=error.errno or errno.EAGAIN)
            continue
        if pid == 0:
            signal.set_wakeup_fd(-1)
            _close((woken, wakes))
            orders.detach()
            return _become(json.loads(told), descriptors[0])
        _close(descriptors)
        _say(forked=pid)


def _close(descriptors: Sequence[int]) -> None:
    for each in descriptors:
        os.close(each)


@contextlib.contextmanager
def _ending_with_the_launcher() -> Iterator[None]:
    """Ends the process when its input closes, for the seconds in which nobody reads it."""
    over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(0, 0)  # whether it is closed, not what it holds
        while not over.is_set():
            if poll.poll(100):
                os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()  # no thread is left when it forks


def _import_everything() -> None:
    """Without a CUDA context, which no fork survives: who asks for devices now asks the driver."""
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
            _say(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _say(**what: int) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _become(role: dict[str, Any], alive: int) -> list[str]:
    """What `subprocess.Popen` would have done for a new process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    log = os.open(role["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor, standard in ((alive, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    os.close(alive)
    os.close(log)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python's own generator does that by itself, torch's has a fixed seed
    called = sys.orig_argv[: -len(sys.argv[1:])]  # python -m decoupled_diloco.cli
    sys.argv[1:] = role["arguments"]
    _retitle([*called, *sys.argv[1:]])
    return sys.argv[1:]


def _retitle(command: list[str]) -> None:
    """Writes another command line over its own; what does not fit is cut off.

    For ``ps`` and for users who look for a process by its arguments. Where the system does not tell
    the place, the old one stays.
    """
    with contextlib.suppress(OSError, ValueError):
        start, end = map(int, stat_of("self")[45:47])  # arg_start, arg_end
        text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
