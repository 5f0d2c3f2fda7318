"""Two sites, each a network namespace, and the link between them.

The link "clean" is a veth pair without a limit. The others go packet by packet through a tool with
delay, rate and loss, so that they affect real TCP (netem is not in every kernel):

    TOOL up NAME DELAY_MS RATE_MBIT LOSS_PERCENT    creates NAME-a and NAME-b, joined by device wan0
    TOOL cut NAME, TOOL heal NAME, TOOL down NAME

DELAY_MS is one way. The sites have the addresses 10.9.0.1 and 10.9.0.2. Each site's host name is
its address, so that a process which sends its host name to others can be reached.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TextIO

ADDRESSES = ("10.9.0.1", "10.9.0.2")
DEVICE = "wan0"
SAMPLE_SECONDS = 0.25
CLONE_NEWNET = 0x4000_0000


@dataclass(frozen=True)
class Link:
    """One direction: delay, rate and loss; without `mbit` the link has no limit."""

    delay_ms: float = 0.0
    mbit: float | None = None
    loss_percent: float = 0.0


LINKS = {
    "clean": Link(),
    **{
        f"50ms-{mbit}Mbit-{loss:g}%": Link(25.0, mbit, loss)
        for mbit in (200, 20)
        for loss in (0, 0.1, 1)
    },
}
"""The round trip is 50 ms."""


def unavailable() -> str:
    """Return why namespaces are not available; empty if they are."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    return "" if shutil.which("ip") else "'ip' is not installed (package iproute2)"


@dataclass
class Sites:
    """The two sites of a link, and samples of the traffic between them."""

    name: str
    tool: Path | None
    samples: list[tuple[float, int, int]] = field(default_factory=list)

    def space(self, site: int) -> str:
        return f"{self.name}-{'ab'[site]}"

    def command(self, site: int) -> list[str]:
        """Return the prefix of a command that runs at a site."""
        rename = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        inside = ["ip", "netns", "exec", self.space(site), "unshare", "--uts"]
        return [*inside, "sh", "-c", rename, ADDRESSES[site]]

    def cut(self) -> None:
        self._set("down")

    def heal(self) -> None:
        self._set("up")

    def _set(self, state: str) -> None:
        for site in (0, 1):
            _run(*_in(self.space(site)), "ip", "link", "set", DEVICE, state)

    def passed(self, begin: float, end: float) -> tuple[float, float]:
        """Return the bytes that have left each site between two instants."""
        totals = [self._at(end, way) - self._at(begin, way) for way in (1, 2)]
        return totals[0], totals[1]

    def _at(self, instant: float, way: int) -> float:
        for before, after in pairwise(self.samples):
            if before[0] <= instant <= after[0]:
                part = (instant - before[0]) / (after[0] - before[0])
                return before[way] + part * (after[way] - before[way])
        return float(self.samples[-1][way])


@contextlib.contextmanager
def joined(name: str, link: Link, tool: Path | None) -> Iterator[Sites]:
    """Create the sites for the block; first remove what is left of earlier ones."""
    sites, limited = Sites(name, tool), link.mbit is not None
    if limited and tool is None:
        raise SystemExit(f"a link of {link} needs --wan-tool")
    _remove(sites, limited)
    try:
        if limited:
            numbers = (link.delay_ms, link.mbit, link.loss_percent)
            _run(str(tool), "up", name, *(f"{each:g}" for each in numbers))
        else:
            _pair(sites)
        stop = threading.Event()
        sampler = threading.Thread(target=_sample, args=(sites, stop), daemon=True)
        sampler.start()
        yield sites
        stop.set()
        sampler.join()
    finally:
        _remove(sites, limited)


def _pair(sites: Sites) -> None:
    for site in (0, 1):
        _run("ip", "netns", "add", sites.space(site))
    ends = ["type", "veth", "peer", DEVICE, "netns", sites.space(1)]
    _run("ip", "link", "add", DEVICE, "netns", sites.space(0), *ends)
    for site in (0, 1):
        inside = _in(sites.space(site))
        _run(*inside, "ip", "addr", "add", f"{ADDRESSES[site]}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _run(*inside, "ip", "link", "set", device, "up")


def _remove(sites: Sites, limited: bool) -> None:
    if limited:
        subprocess.run([str(sites.tool), "down", sites.name], check=False, capture_output=True)
    for site in (0, 1):
        command = ["ip", "netns", "del", sites.space(site)]
        subprocess.run(command, check=False, capture_output=True)


def _sample(sites: Sites, stop: threading.Event) -> None:
    """Sample the counters of both ends. An open file in /proc stays that of its namespace."""
    with contextlib.ExitStack() as stack:
        files = []
        for site in (0, 1):
            with Path("/run/netns", sites.space(site)).open() as entry:
                if ctypes.CDLL(None, use_errno=True).setns(entry.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            files.append(stack.enter_context(Path("/proc/thread-self/net/dev").open()))
        while not stop.is_set():
            sites.samples.append((time.monotonic(), _sent(files[0]), _sent(files[1])))
            stop.wait(SAMPLE_SECONDS)
        sites.samples.append((time.monotonic(), _sent(files[0]), _sent(files[1])))


def _sent(file: TextIO) -> int:
    file.seek(0)
    (line,) = [line for line in file if line.strip().startswith(f"{DEVICE}:")]
    return int(line.split(":")[1].split()[8])


def _in(space: str) -> list[str]:
    return ["ip", "netns", "exec", space]


def _run(*words: str) -> None:
    """Run it in a new session, so that the link's process gets a separate share of the CPUs."""
    done = subprocess.run(
        words, check=False, capture_output=True, text=True, start_new_session=True
    )
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or f'code {done.returncode}'}")
