"""Two network namespaces joined by a link with a rate: syncer at one end, learners at the other."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
"""Tests that run at the same time use separate namespaces."""

FAR, NEAR = f"ddtest{WORKER}-far", f"ddtest{WORKER}-near"
NETWORKS = ("10.88.0", "10.89.0")
"""The two networks of the link; each can be silenced separately."""
FAR_ADDRESS = f"{NETWORKS[0]}.1"
ENDS = ((NEAR, "dd1"), (FAR, "dd0"))
NOBODY = "02:00:00:00:00:99"
"""A hardware address that no device has."""
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def unavailable() -> str:
    """Return why namespaces cannot be created here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool!r} is not installed (package iproute2)"
    return ""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def enter(space: str) -> None:
    """Create this thread's sockets in a namespace from now on."""
    with Path("/run/netns", space).open() as entry:
        _require(ctypes.CDLL(None, use_errno=True).setns(entry.fileno(), CLONE_NEWNET))


def name_machine(name: str) -> None:
    """Give this process a separate host name from now on."""
    _require(ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS))
    socket.sethostname(name)


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@dataclass
class Link:
    """The link, and the processes that were started at its ends."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, space: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start ``ddiloco ARGUMENTS`` in a namespace."""
        command = ["ip", "netns", "exec", space, sys.executable, "-m", "decoupled_diloco.cli"]
        with (self.folder / f"log-{len(self.started)}").open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parent,
            )
        self.started.append(process)
        return process

    def cut(self) -> None:
        """Take the link down."""
        _run("ip", "netns", "exec", NEAR, "ip", "link", "set", "dd1", "down")

    def heal(self) -> None:
        """Bring the link up again."""
        _run("ip", "netns", "exec", NEAR, "ip", "link", "set", "dd1", "up")

    def silence(self, network: str) -> None:
        """Lose the packets of one network from now on, both ways, without an error."""
        for (space, device), other in zip(ENDS, (1, 2), strict=True):
            neighbour = ("ip", "neigh", "replace", f"{network}.{other}", "lladdr", NOBODY)
            _run("ip", "netns", "exec", space, *neighbour, "dev", device, "nud", "permanent")

    def hear(self, network: str) -> None:
        """Undo `silence`."""
        for (space, device), other in zip(ENDS, (1, 2), strict=True):
            neighbour = ("ip", "neigh", "del", f"{network}.{other}")
            _run("ip", "netns", "exec", space, *neighbour, "dev", device)

    def narrow(self, mbit: float, *, both_ways: bool = False) -> None:
        """Limit the rate of the near end from now on, for sending or for both directions."""
        for space, device in ENDS[: 1 + both_ways]:
            _shape(space, device, mbit, burst="4kb")

    def widen(self, *, both_ways: bool = False) -> None:
        """Undo `narrow`."""
        for space, device in ENDS[: 1 + both_ways]:
            _run("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root")

    def logs(self) -> str:
        """Return the last lines of every log."""
        paths = sorted(self.folder.glob("log-*"))
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-800:]}" for p in paths)


@contextlib.contextmanager
def link(folder: Path, mbit: float | None) -> Iterator[Link]:
    """Create a link of this rate in both directions, or without a limit; remove everything at the
    end.
    """
    _remove()
    made = Link(folder)
    try:
        for space in (FAR, NEAR):
            _run("ip", "netns", "add", space)
            _run("ip", "netns", "exec", space, "ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "dd0", "netns", FAR, "type", "veth", "peer", "dd1", "netns", NEAR)
        for (space, device), own in zip(ENDS, (2, 1), strict=True):
            inside = ("ip", "netns", "exec", space)
            for network in NETWORKS:
                _run(*inside, "ip", "addr", "add", f"{network}.{own}/24", "dev", device)
            _run(*inside, "ip", "link", "set", device, "up")
            if mbit is not None:
                _shape(space, device, mbit, burst="16kb")
        yield made
    finally:
        for process in made.started:
            process.kill()
            process.wait()
        _remove()


def _shape(space: str, device: str, mbit: float, burst: str) -> None:
    inside = ("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root")
    _run(*inside, "tbf", "rate", f"{mbit:.4f}mbit", "burst", burst, "latency", "200ms")


def _remove() -> None:
    for space in (FAR, NEAR):
        subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
