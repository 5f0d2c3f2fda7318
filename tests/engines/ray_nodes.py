"""A Ray cluster of several nodes on this machine, of which some come and go."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # before Ray is imported: it tells nobody anything

STORE_BYTES = 80 * 2**20


class Nodes:
    """The cluster; its head runs no part of a run."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        told = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        self._cluster = Cluster(initialize_head=True, head_node_args=told)
        self.address = str(self._cluster.address)

    def add(self, cpus: int, zone: str) -> Any:
        """A node whose label `zone` says what may run on it."""
        return self._cluster.add_node(
            num_cpus=cpus, object_store_memory=STORE_BYTES, labels={"zone": zone}
        )

    def remove(self, node: Any) -> None:
        """As a spot machine goes: without a word."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """A cluster as long as the block lasts."""
    nodes = Nodes()
    try:
        yield nodes
    finally:
        nodes.close()
