"""Private namespaces: their mounts and traffic shaping vanish with this process.

The kernel removes a namespace with the last process in it, however that process dies, so nothing
needs manual cleanup. Unshare before starting any thread, because a namespace belongs to a thread.

The mount namespace holds the shards' disks. When one is filled, the kernel returns ENOSPC. The
network namespace limits link rates, with one token bucket filter per link and direction. Each
process's wires start at its own loopback address (`chaos.proxy`), so packets to and from that
address belong to that process's link.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from decoupled_diloco.errors import DilocoError
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco_lab.simulate.scenario import Scenario
from decoupled_diloco_lab.simulate.scenario_file import LinkSettings

_MOUNTS = 0x0002_0000
_NETWORK = 0x4000_0000


def unavailable(*tools: str) -> str:
    """Return why namespaces are not available here, or an empty string if they are.

    Args:
        tools: Names of commands that must be installed.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need root on Linux"
    for tool in tools:
        if shutil.which(tool) is None:
            return f"{tool!r} is not installed"
    return ""


def own_mounts() -> None:
    """Enter a new mount namespace: later mounts are visible to this process and its children only.

    Raises:
        DilocoError: The kernel refuses.
    """
    _unshare(_MOUNTS, "mount")
    command("mount", "--make-rprivate", "/")


def own_network() -> None:
    """Enter a new network namespace with its own loopback network.

    Raises:
        DilocoError: The kernel refuses.
    """
    _unshare(_NETWORK, "network")
    command("ip", "link", "set", "lo", "up")


def command(*words: str) -> None:
    """Run a system command.

    Raises:
        DilocoError: Its exit code is not 0.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DilocoError(f"{' '.join(words)}: {done.stderr.strip() or f'code {done.returncode}'}")


def _unshare(flag: int, what: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(flag):
        reason = os.strerror(ctypes.get_errno())
        raise DilocoError(f"cannot create a {what} namespace: {reason}")


class Disks:
    """The durable folders of a run's shards.

    A disk that a scenario fills is a separate in-memory file system for the duration of the run.
    Only this process and its children see it. `close` moves its files to the run folder.

    Args:
        run_folder: The run folder.
        mounted: The shards whose disks the scenario fills at some time.
    """

    def __init__(self, run_folder: Path, mounted: Iterable[str] = ()) -> None:
        self._folder = run_folder / DURABLE
        self._mounted = tuple(mounted)
        for name in self._mounted:
            path = self._folder / name
            path.mkdir(parents=True, exist_ok=True)
            command("mount", "-t", "tmpfs", "tmpfs", str(path))

    def fill(self, name: str) -> None:
        """Fill a shard's disk so that no further byte fits."""
        stat = os.statvfs(self._folder / name)
        used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        self._resize(name, str(max(used, stat.f_frsize)))

    def free(self, name: str) -> None:
        self._resize(name, "50%")

    def lose(self, name: str) -> None:
        """Delete all files on a shard's disk. The shard must not be running."""
        folder = self._folder / name
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()

    def close(self) -> None:
        """Move the files to the run folder. No process may use them any more."""
        while self._mounted:
            name, *rest = self._mounted
            path = self._folder / name
            copy = path.with_name(f".{name}.copy")
            shutil.copytree(path, copy)
            command("umount", str(path))
            path.rmdir()
            copy.rename(path)
            self._mounted = tuple(rest)

    def _resize(self, name: str, size: str) -> None:
        path = self._folder / name
        command("mount", "-o", f"remount,size={size}", str(path))


QUEUE_MILLISECONDS = 200
"""Longest time that a packet may queue. After that it is dropped, and TCP slows down."""

BURST_BYTES_MIN = 16_000
BURST_SECONDS = 0.01
MTU_BYTES = 1_500


class Shaper:
    """Limits the rates of a scenario's links on this namespace's loopback device.

    Args:
        scenario: Describes the links.
        host: Returns the loopback address of a learner.
    """

    def __init__(self, scenario: Scenario, host: Callable[[str], str]) -> None:
        self._links: Mapping[str, LinkSettings] = scenario.links
        self._buckets: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        self._factors: defaultdict[str, list[float]] = defaultdict(list)
        self._shared: dict[tuple[str, str], int] = {}
        self._count = 0
        command("ip", "link", "set", "lo", "mtu", str(MTU_BYTES))
        _tc("qdisc", "add", "root", "handle", "1:", "htb", "default", "0")
        for learner, group in scenario.members.items():
            if group.link is not None:
                self._limit(self._links[group.link], host(learner))

    def throttle(self, link: str, factor: float, *, begins: bool) -> None:
        """Divide a link's rate by ``factor``, or undo that. Active factors are multiplied."""
        factors = self._factors[link]
        (factors.append if begins else factors.remove)(factor)
        for number, rate in self._buckets[link]:
            _bucket("change", number, rate / math.prod(factors))

    def _limit(self, link: LinkSettings, address: str) -> None:
        """Limit both directions: ``up`` goes to the learner's own address, ``down`` from it."""
        ways = (("dst", link.up_bytes_per_second), ("src", link.down_bytes_per_second))
        for way, rate in ways:
            if math.isinf(rate):
                continue
            number = self._shared.get((link.name, way)) if link.shared else None
            if number is None:
                number = self._add(rate)
                self._shared[link.name, way] = number
                self._buckets[link.name].append((number, rate))
            match = ("u32", "match", "ip", way, f"{address}/32", "flowid", f"1:{number:x}")
            _tc("filter", "add", "parent", "1:", "protocol", "ip", *match)

    def _add(self, rate: float) -> int:
        self._count += 1
        number = self._count + 0xF
        # The class must not limit anything itself: the token bucket below it sets the rate.
        unlimited = ("htb", "rate", "100gbit", "quantum", "60000")
        _tc("class", "add", "parent", "1:", "classid", f"1:{number:x}", *unlimited)
        _bucket("add", number, rate)
        return number


def _bucket(action: str, number: int, bytes_per_second: float) -> None:
    burst = max(BURST_BYTES_MIN, round(bytes_per_second * BURST_SECONDS))
    rate = ("rate", f"{round(8 * bytes_per_second)}bit", "burst", str(burst))
    place = ("parent", f"1:{number:x}", "handle", f"{number:x}:")
    _tc("qdisc", action, *place, "tbf", *rate, "latency", f"{QUEUE_MILLISECONDS}ms")


def _tc(kind: str, action: str, *words: str) -> None:
    command("tc", kind, action, "dev", "lo", *words)
