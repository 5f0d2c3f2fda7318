"""Namespaces of this process's own: what is mounted or shaped in them is gone with the process.

However it dies, the kernel takes a namespace down with the last process in it, so nothing has to
be cleaned up by hand. Called before any thread is started: a namespace is a thread's.

In them are the shards' disks, full, so that the kernel says ENOSPC, and links with a rate: a token
bucket filter for each direction of each link. Everybody's wires begin at a loopback address of
their own (`chaos.proxy`), so packets to and from that address are those of one process's link.
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

from decoupled_diloco.errors import Error
from decoupled_diloco.simulate.scenario import Scenario
from decoupled_diloco.simulate.scenario_file import LinkSettings
from decoupled_diloco.syncer.durable import DURABLE

_MOUNTS = 0x0002_0000
_NETWORK = 0x4000_0000


def unavailable(*tools: str) -> str:
    """Why namespaces cannot be had here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "namespaces need root on Linux"
    for tool in tools:
        if shutil.which(tool) is None:
            return f"{tool!r} is not installed"
    return ""


def own_mounts() -> None:
    """From now on what this process mounts is seen by it and its children only."""
    _unshare(_MOUNTS, "mounts")
    command("mount", "--make-rprivate", "/")


def own_network() -> None:
    """From now on this process and its children have a loopback network of their own."""
    _unshare(_NETWORK, "network")
    command("ip", "link", "set", "lo", "up")


def command(*words: str) -> None:
    """Runs one of the system's commands."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Error(f"{' '.join(words)}: {done.stderr.strip() or f'code {done.returncode}'}")


def _unshare(flag: int, what: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(flag):
        reason = os.strerror(ctypes.get_errno())
        raise Error(f"a namespace for this process's own {what} cannot be had: {reason}")


class Disks:
    """The durable folders of a run's shards.

    A disk that is to be full is a file system of its own, in memory, for as long as the run goes
    on; it is seen by this process and its children only, and its files come to the run folder at
    the end.

    Args:
        mounted: The shards whose disks are to be full at some time.
    """

    def __init__(self, run_folder: Path, mounted: Iterable[str] = ()) -> None:
        self._folder = run_folder / DURABLE
        self._mounted = tuple(mounted)
        for name in self._mounted:
            path = self._folder / name
            path.mkdir(parents=True, exist_ok=True)
            command("mount", "-t", "tmpfs", "tmpfs", str(path))

    def fill(self, name: str) -> None:
        """Makes a shard's disk full: no further byte fits."""
        stat = os.statvfs(self._folder / name)
        used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
        self._resize(name, str(max(used, stat.f_frsize)))

    def free(self, name: str) -> None:
        self._resize(name, "50%")

    def lose(self, name: str) -> None:
        """Deletes everything on a shard's disk; the shard does not run meanwhile."""
        folder = self._folder / name
        for path in folder.iterdir() if folder.exists() else ():
            path.unlink()

    def close(self) -> None:
        """Moves the files to the run folder, once no process uses them any more."""
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
"""How long a packet may wait for its turn; then it is dropped, and TCP slows down."""

BURST_BYTES_MIN = 16_000
BURST_SECONDS = 0.01
MTU_BYTES = 1_500


class Shaper:
    """The rates of a scenario's links, on this namespace's loopback device.

    ``host`` gives the loopback address of a learner.
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
        """A link has 1/``factor`` of its rate from now on, or has it back."""
        factors = self._factors[link]
        (factors.append if begins else factors.remove)(factor)
        for number, rate in self._buckets[link]:
            _bucket("change", number, rate / math.prod(factors))

    def _limit(self, link: LinkSettings, address: str) -> None:
        """``up`` is to the address at which a learner's wires begin, ``down`` from it."""
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
        unlimited = ("htb", "rate", "100gbit", "quantum", "60000")
        _tc("class", "add", "parent", "1:", "classid", f"1:{number:x}", *unlimited)
        _bucket("add", number, rate)
        return number


def _bucket(what: str, number: int, bytes_per_second: float) -> None:
    burst = max(BURST_BYTES_MIN, round(bytes_per_second * BURST_SECONDS))
    rate = ("rate", f"{round(8 * bytes_per_second)}bit", "burst", str(burst))
    place = ("parent", f"1:{number:x}", "handle", f"{number:x}:")
    _tc("qdisc", what, *place, "tbf", *rate, "latency", f"{QUEUE_MILLISECONDS}ms")


def _tc(kind: str, what: str, *words: str) -> None:
    command("tc", kind, what, "dev", "lo", *words)
