"""How much sooner training ends when more chips are there for half of it.

The published figures are for chips that are there while half of the FLOPs are done. How large the
pieces are in which they come, and how long each stays, was not published; both are arguments here.
"""

from __future__ import annotations

import math
from dataclasses import replace

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.goodput.settings import Cluster, Scavenged
from decoupled_diloco.goodput.systems import simulate

BLOCK_CHIPS = 1024
"""A block is so many chips: four slices, the least that is worth a learner of its own."""

STAY_SECONDS = 1500.0
"""Mean time that a block stays: with it the first published figure of elastic training, +25 %, is
met; the other three are predictions."""

EVENTS = 20_000


def blocks_of(
    chips: int,
    share: float,
    block_chips: int = BLOCK_CHIPS,
    stay_seconds: float = STAY_SECONDS,
    away_seconds: float = 0.0,
    join_seconds: float = 1.0,
) -> Scavenged:
    """So many more chips, as a share of a cluster's, in blocks as even as can be."""
    if not (math.isfinite(share) and share > 0):
        raise ConfigError(f"scavenged share={share:g} is out of range: it must be above 0")
    if block_chips < 1:
        raise ConfigError(f"scavenged block_chips={block_chips} is out of range: at least 1")
    more = max(1, round(share * chips))
    return Scavenged(
        chips=more,
        blocks=max(1, round(more / block_chips)),
        stay_seconds=stay_seconds,
        away_seconds=away_seconds,
        join_seconds=join_seconds,
    )


def relative_time(
    cluster: Cluster,
    share: float,
    *,
    stay_seconds: float = STAY_SECONDS,
    block_chips: int = BLOCK_CHIPS,
    seed: int = 0,
) -> float:
    """Time of training, as a share of that without scavenged chips.

    Args:
        cluster: without them.
        share: how many more chips, as a share of those of the cluster, above 0.
        stay_seconds: mean time that a block stays; another one takes its place.
        block_chips: chips of a block.
        seed: of both simulations.

    Returns:
        (1 + rate without / rate with) / 2: one half of the work is done at each rate.
    """
    more = blocks_of(cluster.chips, share, block_chips, stay_seconds)
    seconds = min(365 * 86400.0, max(86400.0, EVENTS * cluster.mtbi_seconds / cluster.chips))
    without = simulate(cluster, seconds, seed)
    seconds = max(3600.0, EVENTS * stay_seconds / more.blocks)
    joined = simulate(replace(cluster, scavenged=more), seconds, seed)
    return (1 + without.tokens / without.wall / (joined.tokens / joined.wall)) / 2
