"""Training time with scavenged chips for half of the training: as published, and as simulated.

The published figures are for extra chips that are available for half of the FLOPs. The size of the
cluster, the size of each block of extra chips, and how long each block stays are not published.
All three are arguments here. Nothing is fitted.

Source: Decoupled DiLoCo (arXiv 2604.21428), training time with scavenged chips.
"""

from __future__ import annotations

from dataclasses import replace

from decoupled_diloco_plan.goodput.cluster_settings import BLOCK_CHIPS, Cluster, blocks_of
from decoupled_diloco_plan.goodput.systems import simulate

EVENTS = 20_000

SCAVENGED = {0.25: (0.90, 1.07), 0.5: (0.83, 1.09), 1.0: (0.75, 1.02), 3.0: (0.62, 0.80)}
"""For each share of extra chips: the published training time relative to that without them, for
decoupled and for elastic training."""


def relative_time(
    cluster: Cluster,
    share: float,
    *,
    stay_seconds: float | None = None,
    block_chips: int = BLOCK_CHIPS,
    seed: int = 0,
) -> float:
    """Return the training time relative to that without scavenged chips.

    Args:
        cluster: The cluster without them.
        share: Number of scavenged chips as a share of the cluster's chips, above 0.
        stay_seconds: Mean time that a block stays until another one replaces it; default:
            `stay_of`.
        block_chips: Chips per block.
        seed: Seed of both simulations.

    Returns:
        (1 + rate without / rate with) / 2, because half of the work is done at each rate.
    """
    more = blocks_of(cluster.chips, share, block_chips, stay_seconds)
    seconds = min(365 * 86400.0, max(86400.0, EVENTS * cluster.mtbi_seconds / cluster.chips))
    without = simulate(cluster, seconds, seed)
    seconds = max(3600.0, EVENTS * more.stay_seconds / more.blocks)
    joined = simulate(replace(cluster, scavenged=more), seconds, seed)
    return (1 + without.tokens / without.wall / (joined.tokens / joined.wall)) / 2
