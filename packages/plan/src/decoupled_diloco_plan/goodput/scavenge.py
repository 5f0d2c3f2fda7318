"""Chips that are only borrowed, and preempted as often as a cloud's cheap machines are.

Source: Google Cloud's documentation of preemptible instances (2021): of such machines, "the average
preemption rate varies between 5% and 15% per day" (another edition: "per seven days").
"""

from __future__ import annotations

import math

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.goodput.settings import Scavenged

BLOCK_CHIPS = 1024
"""A block is so many chips: four slices, the least that is worth a learner of its own."""

MACHINE_CHIPS = 8
"""Chips of one machine, which is preempted as a whole, and its block with it."""

PREEMPTED_A_DAY = (0.05, 0.10, 0.15)
"""Share of the machines that are preempted in a day: the least, the middle and the most."""


def stay_of(block_chips: int, preempted_a_day: float = PREEMPTED_A_DAY[1]) -> float:
    """Mean seconds until the first machine of a block is preempted.

    >>> round(stay_of(1024) / 3600, 1)
    1.8
    """
    machines = max(1.0, block_chips / MACHINE_CHIPS)
    return 86400.0 / (machines * -math.log1p(-preempted_a_day))


def blocks_of(
    chips: int,
    share: float,
    block_chips: int = BLOCK_CHIPS,
    stay_seconds: float | None = None,
    away_seconds: float = 0.0,
    join_seconds: float = 1.0,
) -> Scavenged:
    """So many more chips, as a share of a cluster's, in blocks as even as can be.

    They stay as long as `stay_of` says unless ``stay_seconds`` does.
    """
    if not (math.isfinite(share) and share > 0):
        raise ConfigError(f"scavenged share={share:g} is out of range: it must be above 0")
    if block_chips < 1:
        raise ConfigError(f"scavenged block_chips={block_chips} is out of range: at least 1")
    if stay_seconds is None:
        stay_seconds = stay_of(block_chips)
    more = max(1, round(share * chips))
    return Scavenged(
        chips=more,
        blocks=max(1, round(more / block_chips)),
        stay_seconds=stay_seconds,
        away_seconds=away_seconds,
        join_seconds=join_seconds,
    )
