"""A Ray cluster of several nodes on this machine, of which some come and go."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before Ray is imported: it tells nobody anything

STORE_BYTES = 80 * 2**20
LITTLE = {"object_store_memory": STORE_BYTES, "include_log_monitor": False}

SETTINGS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 5,
    "worker_niceness": 0,
    "worker_register_timeout_seconds": 180,
}
"""A node that is gone is missed after seconds. What a busy one may take to answer stays at 10 s. By
itself Ray gives whatever it starts the rest of the processor's time (niceness 15): beside other
tests that would be next to none."""


class Nodes:
    """The cluster; its head runs no part of a run."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new cluster, without a node but its head."""
        from ray.cluster_utils import Cluster

        told = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, **LITTLE}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**told, "_system_config": SETTINGS}
        )
        self.address = str(self._cluster.address)
        self._there: dict[str, list[tuple[Any, int]]] = {}

    def add(self, cpus: int, zone: str) -> Any:
        """A node whose label `zone` says what may run on it."""
        told = {"num_cpus": cpus, "labels": {"zone": zone}, **LITTLE}
        node = self._cluster.add_node(wait=False, **told)
        self._there.setdefault(zone, []).append((node, cpus))
        return node

    def have(self, zone: str, count: int, cpus: int = 1) -> list[Any]:
        """So many nodes of a zone with so many cores; those that are missing are added."""
        while len(found := [n for n, c in self._there.get(zone, []) if c >= cpus]) < count:
            self.add(cpus, zone)
        return found

    def remove(self, node: Any) -> None:
        """As a spot machine goes: without a word."""
        self._cluster.remove_node(node, allow_graceful=False)
        for zone, there in self._there.items():
            self._there[zone] = [each for each in there if each[0] is not node]

    def lose_head(self) -> None:
        """The process that knows of all others is killed, and does not come back."""
        (control,) = self._cluster.head_node.all_processes["gcs_server"]
        os.kill(control.process.pid, signal.SIGKILL)
        control.process.wait()

    def leave(self) -> None:
        """This process is no longer connected."""
        import ray

        ray.shutdown()

    def close(self) -> None:
        self.leave()
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(folder: Path) -> Iterator[Nodes]:
    """A cluster as long as the block lasts.

    `import ray` imports jsonschema, and that a grammar which takes 1.7 s, if it is there (of what
    the tests need, another package brings it). Each node has two processes more that import Ray, so
    here it is not there.
    """
    (folder / "rfc3987_syntax.py").write_text("raise ImportError\n")
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        nodes = Nodes()
        try:
            yield nodes
        finally:
            nodes.close()
    finally:
        os.environ["PYTHONPATH"] = before
