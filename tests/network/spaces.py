"""Two network namespaces joined by a link with a rate: syncer at one end, learners at the other."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
"""Tests that run at the same time have namespaces of their own."""

FAR, NEAR = f"ddtest{WORKER}-far", f"ddtest{WORKER}-near"
FAR_ADDRESS = "10.88.0.1"
ENDS = ((NEAR, "dd1"), (FAR, "dd0"))


def unavailable() -> str:
    """Why namespaces cannot be had here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool!r} is not installed (package iproute2)"
    return ""


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@dataclass
class Link:
    """The link, and what was started at its ends."""

    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, space: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts ``ddiloco ARGUMENTS`` in a namespace."""
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
        """Takes the link down."""
        _run("ip", "netns", "exec", NEAR, "ip", "link", "set", "dd1", "down")

    def heal(self) -> None:
        """Brings it up again."""
        _run("ip", "netns", "exec", NEAR, "ip", "link", "set", "dd1", "up")

    def narrow(self, mbit: float, *, both_ways: bool = False) -> None:
        """From here on the near end sends, or gets as well, at no more than this rate."""
        for space, device in ENDS[: 1 + both_ways]:
            _shape(space, device, mbit, burst="4kb")

    def widen(self, *, both_ways: bool = False) -> None:
        """Takes back `narrow`."""
        for space, device in ENDS[: 1 + both_ways]:
            _run("ip", "netns", "exec", space, "tc", "qdisc", "del", "dev", device, "root")

    def logs(self) -> str:
        """The last lines of everything that was started."""
        paths = sorted(self.folder.glob("log-*"))
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-800:]}" for p in paths)


@contextlib.contextmanager
def link(folder: Path, mbit: float | None) -> Iterator[Link]:
    """A link of this rate in both directions, or of none; everything is gone afterwards."""
    _remove()
    made = Link(folder)
    try:
        for space in (FAR, NEAR):
            _run("ip", "netns", "add", space)
            _run("ip", "netns", "exec", space, "ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "dd0", "netns", FAR, "type", "veth", "peer", "dd1", "netns", NEAR)
        for space, device, address in ((FAR, "dd0", FAR_ADDRESS), (NEAR, "dd1", "10.88.0.2")):
            inside = ("ip", "netns", "exec", space)
            _run(*inside, "ip", "addr", "add", f"{address}/24", "dev", device)
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
