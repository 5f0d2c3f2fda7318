"""A `ddiloco` command for pages that is forked from one process with all imports.

`Zygote` starts that process and writes the command, a client that starts in milliseconds. The
client sends its arguments, folder, environment and open files, forwards signals, and ends like the
forked process. Processes of a run's launcher start in the same way. Otherwise every command of a
page would import PyTorch, most of them twice: more than half of the time of the pages.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

IMPORTS = (
    "decoupled_diloco.launch.roles",
    "decoupled_diloco.launch.shard_role",
    "decoupled_diloco_lab.chaos.fault_runner",
    "decoupled_diloco_lab.simulate.simulation",
    "torch._dynamo",
)
BYTES_MAX = 1 << 20

CLIENT = """#!{python} -SE
import array, json, os, signal, socket, sys
opened = map(int, os.listdir("/proc/self/fd"))
numbers = [n for n in opened if os.path.exists("/proc/self/fd/%d" % n)]
orders = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
orders.connect({address!r})
order = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), numbers]).encode()
files = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))
orders.sendmsg([len(order).to_bytes(8, "big")], [files])
orders.sendall(order)
answers = orders.makefile()
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda given, frame: os.kill(pid, given))
code = int(answers.readline() or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


class Zygote:
    """The forking process, and the command that asks it to fork.

    Args:
        folder: Where the command and the socket are.
    """

    def __init__(self, folder: Path) -> None:
        self.command = folder / "ddiloco"
        address = folder / "socket"
        self.command.write_text(CLIENT.format(python=sys.executable, address=str(address)))
        self.command.chmod(0o755)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = [sys.executable, __file__, str(address), str(self.command)]
        self._process = subprocess.Popen(arguments, env=environment, stdin=subprocess.PIPE)
        while not address.exists():
            assert self._process.poll() is None
            time.sleep(0.05)

    def close(self) -> None:
        """End the process, but not the processes that it has forked."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def serve(address: str, command: str) -> None:
    """Fork for every client; return in the child, which runs the command."""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address + "~")
    listener.listen(64)
    Path(address + "~").rename(address)
    waiting: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([0, listener.fileno(), woken], [], [])
        if 0 in readable:
            os._exit(0)  # the process that has started it is gone
        if woken in readable:
            os.read(woken, 4096)
            _report_ended(waiting)
        if listener.fileno() not in readable:
            continue
        client, _ = listener.accept()
        head, descriptors, _, _ = socket.recv_fds(client, 8, 64)
        order = b""
        while len(order) < int.from_bytes(head, "big"):
            order += client.recv(BYTES_MAX)
        arguments, folder, environment, numbers = json.loads(order)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (
                woken,
                wakes,
                *(c.detach() for c in (listener, client, *waiting.values())),
            ):
                os.close(each)
            _become(arguments, folder, environment, dict(zip(numbers, descriptors, strict=False)))
            from decoupled_diloco.launch import placement

            placement.COMMAND = (command,)
            return
        for each in descriptors:
            os.close(each)
        client.sendall(b"%d\n" % pid)
        waiting[pid] = client


def _report_ended(waiting: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            client = waiting.pop(ended[0])
            with contextlib.suppress(OSError):
                client.sendall(b"%d\n" % os.waitstatus_to_exitcode(ended[1]))
            client.close()


def _become(
    arguments: list[str], folder: str, environment: dict[str, str], opened: dict[int, int]
) -> None:
    """Take over the client's arguments, folder, environment, and files with their numbers."""
    # First move all files above the highest number, so that no dup2 closes one of them.
    above = max((*opened, *opened.values())) + 1
    moved = {number: os.dup2(mine, above + n) for n, (number, mine) in enumerate(opened.items())}
    for each in opened.values():
        os.close(each)
    for number, mine in moved.items():
        os.dup2(mine, number)
        os.close(mine)
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["ddiloco", *arguments]


if __name__ == "__main__":
    serve(*sys.argv[1:])
    from decoupled_diloco.__main__ import main

    main()
