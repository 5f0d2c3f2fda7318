"""A multi-node Ray cluster on this machine, with nodes that come and go."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before Ray is imported, to disable usage reports

STORE_BYTES = 80 * 2**20
LITTLE = {"object_store_memory": STORE_BYTES, "include_log_monitor": False}

SETTINGS = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 5,
    "worker_niceness": 0,
    "worker_register_timeout_seconds": 180,
}
"""Short health checks, so that a lost node is noticed within seconds; the timeout of a busy node
stays at 10 s. By default Ray starts workers with niceness 15, which would starve them beside other
tests."""


class Nodes:
    """The cluster; its head runs no part of a run."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a new cluster that has only a head."""
        from ray.cluster_utils import Cluster

        options = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, **LITTLE}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**options, "_system_config": SETTINGS}
        )
        self.address = str(self._cluster.address)
        self._there: dict[str, list[tuple[Any, int]]] = {}

    def add(self, cpus: int, zone: str) -> Any:
        """Add a node; its label `zone` selects the processes that may run on it."""
        options = {"num_cpus": cpus, "labels": {"zone": zone}, **LITTLE}
        node = self._cluster.add_node(wait=False, **options)
        self._there.setdefault(zone, []).append((node, cpus))
        return node

    def have(self, zone: str, count: int, cpus: int = 1) -> list[Any]:
        """Return the nodes of a zone with enough cores; add nodes until there are `count`."""
        while len(found := [n for n, c in self._there.get(zone, []) if c >= cpus]) < count:
            self.add(cpus, zone)
        return found

    def remove(self, node: Any) -> None:
        """Remove a node without warning, like a preempted spot machine."""
        self._cluster.remove_node(node, allow_graceful=False)
        for zone, there in self._there.items():
            self._there[zone] = [each for each in there if each[0] is not node]

    def lose_head(self) -> None:
        """Kill the head's control process, which does not come back."""
        (control,) = self._cluster.head_node.all_processes["gcs_server"]
        os.kill(control.process.pid, signal.SIGKILL)
        control.process.wait()

    def leave(self) -> None:
        """Disconnect this process."""
        import ray

        ray.shutdown()

    def close(self) -> None:
        self.leave()
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(folder: Path) -> Iterator[Nodes]:
    """Run a cluster while the block runs.

    `import ray` imports jsonschema, which imports a grammar that takes 1.7 s to load if it is
    installed (another package of the tests installs it). Each node has two more processes that
    import Ray, so the grammar is hidden here.
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
