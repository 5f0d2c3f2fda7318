"""How much sooner training ends when more chips are there for half of it; as published, and here.

The published figures are for chips that are there while half of the FLOPs are done. Not published
are how large the cluster was, in which pieces more chips came and how long each stayed: all three
are arguments here. Nothing is fitted.

Source: Decoupled DiLoCo (arXiv 2604.21428), training time with scavenged chips.
"""

from __future__ import annotations

from dataclasses import replace

from decoupled_diloco_plan.goodput.settings import BLOCK_CHIPS, Cluster, blocks_of
from decoupled_diloco_plan.goodput.systems import simulate

EVENTS = 20_000

SCAVENGED = {0.25: (0.90, 1.07), 0.5: (0.83, 1.09), 1.0: (0.75, 1.02), 3.0: (0.62, 0.80)}
"""Time of training when so many more chips are there for half of the FLOPs, as a share of that
without them: decoupled, elastic."""


def relative_time(
    cluster: Cluster,
    share: float,
    *,
    stay_seconds: float | None = None,
    block_chips: int = BLOCK_CHIPS,
    seed: int = 0,
) -> float:
    """Time of training, as a share of that without scavenged chips.

    Args:
        cluster: without them.
        share: how many more chips, as a share of those of the cluster, above 0.
        stay_seconds: mean time that a block stays, by default `stay_of`; another one takes its
            place.
        block_chips: chips of a block.
        seed: of both simulations.

    Returns:
        (1 + rate without / rate with) / 2: one half of the work is done at each rate.
    """
    more = blocks_of(cluster.chips, share, block_chips, stay_seconds)
    seconds = min(365 * 86400.0, max(86400.0, EVENTS * cluster.mtbi_seconds / cluster.chips))
    without = simulate(cluster, seconds, seed)
    seconds = max(3600.0, EVENTS * more.stay_seconds / more.blocks)
    joined = simulate(replace(cluster, scavenged=more), seconds, seed)
    return (1 + without.tokens / without.wall / (joined.tokens / joined.wall)) / 2
