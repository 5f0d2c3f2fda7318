"""Settings that cannot be simulated are rejected in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.goodput.cluster_settings import (
    Cluster,
    Constants,
    Preemption,
    Scavenged,
    Stragglers,
    blocks_of,
)
from decoupled_diloco_plan.goodput.study import Effort


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chips": 0}, "chips=0 is out of range: it must be at least 1"),
        ({"chips": 10**9}, "chips=1000000000 exceeds 100000000"),
        ({"chips": 1000, "learners": 8}, "learners=8 exceeds the 4 slices of 1k chips"),
        ({"quorum": 9}, "quorum=9 is out of range: 1 to learners=8"),
        ({"quorum": 0}, "quorum=0 is out of range: 1 to learners=8"),
        ({"system": "elastic"}, "learners=8: elastic has one learner"),
        ({"system": "magic"}, "system='magic' is unknown: choose from"),
        ({"mtbi_seconds": 0.0}, "mtbi_seconds=0 is out of range"),
        ({"mtbi_seconds": float("nan")}, "mtbi_seconds=nan is not finite"),
        ({"mtbi_seconds": 1.0}, "7e-06 s between failures of 150k chips, less than 0.001"),
        ({"scavenged": Scavenged(chips=10**8, blocks=5)}, "chips=100150000 exceeds 100000000"),
        ({"minimum_share": 1.5}, "minimum_share=1.5 is out of range: 0 to 1"),
        ({"slowdowns": (1.0, 2.0)}, "slowdowns has 2 values for learners=8"),
        ({"slowdowns": (0.5,) * 8}, "slowdown=0.5 is out of range: it must be at least 1"),
        ({"jitter": -0.1}, "jitter=-0.1 is out of range"),
        ({"slack_steps": -1}, "slack_steps=-1 is out of range"),
        ({"checkpoint_seconds": -1.0}, "checkpoint_seconds=-1 is out of range"),
        ({"period": 0}, "period=0 is out of range"),
    ],
)
def test_impossible_clusters(fields: dict[str, Any], message: str) -> None:
    given = {"system": "decoupled", "chips": 150_000, "learners": 8, **fields}
    with pytest.raises(ConfigError, match=message):
        Cluster(**given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constants(downscale_seconds=-1.0), "downscale_seconds=-1"),
        (lambda: Constants(step_seconds=0.0), "step_seconds=0"),
        (lambda: Constants(step_seconds=1e-9), "step_seconds=1e-09 .* at least 0.001"),
        (lambda: Constants(slice_chips=0), "slice_chips=0"),
        (lambda: Constants(repair_tail=0.0), "repair_tail=0"),
        (lambda: Stragglers(0.0), "interval_seconds=0"),
        (lambda: Scavenged(chips=2, blocks=3), "blocks=3 exceeds scavenged chips=2"),
        (lambda: Preemption(0.0, 60.0, 1.5), "share=1.5 of a preemption"),
        (lambda: blocks_of(100, -1.0), "scavenged share=-1"),
        (lambda: blocks_of(100, 1.0, block_chips=0), "block_chips=0"),
        (lambda: Effort(seeds=0), "seeds=0"),
        (lambda: blocks_of(10**7, 1.0, block_chips=1), "blocks=10000000 exceeds 1000000"),
        (lambda: Effort(days=0.0), "days=0"),
        (lambda: Effort(days=1e9), "days=1e.09 is out of range: .* at most 36525"),
        (lambda: Effort(seeds=10**6), "seeds=1000000 is out of range: 1 to 1000"),
    ],
)
def test_impossible_terms(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_chips_are_divided_evenly() -> None:
    cluster = Cluster("decoupled", 10_003, 4)
    sizes = [cluster.chips_of(m) for m in range(4)]
    assert sum(sizes) == 10_003
    assert max(sizes) - min(sizes) == 1
