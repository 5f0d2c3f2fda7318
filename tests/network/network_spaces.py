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
UNUSED_MAC = "02:00:00:00:00:99"
"""A MAC address that no device has."""
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def unavailable() -> str:
    """Return why namespaces cannot be created here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool!r} is not installed (package iproute2)"
    return ""


def run_ip(*words: str) -> None:
    """Run ``ip WORDS``; an error states what it printed."""
    _run("ip", *words)


def _run(*words: str) -> None:
    ended = subprocess.run(words, check=False, capture_output=True, text=True)
    if ended.returncode != 0:
        raise OSError(f"{' '.join(words)} ended with {ended.returncode}: {ended.stderr.strip()}")


@contextlib.contextmanager
def spaces(*names: str) -> Iterator[None]:
    """Create namespaces, each with its loopback device up; remove them at the end.

    Namespaces that a killed test run left under these names are removed first.
    """
    _remove(*names)
    try:
        for name in names:
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        _remove(*names)


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
        run_ip("-n", NEAR, "link", "set", "dd1", "down")

    def heal(self) -> None:
        """Bring the link up again."""
        run_ip("-n", NEAR, "link", "set", "dd1", "up")

    def silence(self, network: str) -> None:
        """Lose the packets of one network from now on, both ways, without an error."""
        for (space, device), other in zip(ENDS, (1, 2), strict=True):
            neighbor = (f"{network}.{other}", "dev", device, "lladdr", UNUSED_MAC)
            run_ip("-n", space, "neighbor", "replace", *neighbor, "nud", "permanent")

    def hear(self, network: str) -> None:
        """Undo `silence`."""
        for (space, device), other in zip(ENDS, (1, 2), strict=True):
            run_ip("-n", space, "neighbor", "del", f"{network}.{other}", "dev", device)

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
    made = Link(folder)
    with spaces(FAR, NEAR):
        try:
            run_ip("link", "add", "dd0", "netns", FAR, "type", "veth", "peer", "dd1", "netns", NEAR)
            for (space, device), own in zip(ENDS, (2, 1), strict=True):
                for network in NETWORKS:
                    run_ip("-n", space, "addr", "add", f"{network}.{own}/24", "dev", device)
                run_ip("-n", space, "link", "set", device, "up")
                if mbit is not None:
                    _shape(space, device, mbit, burst="16kb")
            yield made
        finally:
            for process in made.started:
                process.kill()
                process.wait()


def _shape(space: str, device: str, mbit: float, burst: str) -> None:
    inside = ("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, "root")
    _run(*inside, "tbf", "rate", f"{mbit:.4f}mbit", "burst", burst, "latency", "200ms")


def _remove(*names: str) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
