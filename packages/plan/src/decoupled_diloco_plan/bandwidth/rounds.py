"""The steady state of a case: some periods of its rounds, simulated (`world`)."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from decoupled_diloco_plan.bandwidth.case import Case, demand
from decoupled_diloco_plan.bandwidth.steady import Rounds
from decoupled_diloco_plan.bandwidth.world import ROUNDS_MEASURED, ROUNDS_WARM, World

ROUNDS_ENOUGH = 0.5
"""With a smaller share of the due rounds more periods are simulated, to see enough rounds."""

ROUNDS_MAX = 400
"""No more rounds than about these, unless it takes more to see each fragment twice."""

PERIODS_MAX = 40


@lru_cache(maxsize=128)
def simulate(case: Case) -> Rounds:
    """As many periods of rounds as it takes to see enough of them."""
    full = demand(case)
    if full <= 1:
        world = World(case)
        found = world.run()
        if found.kept == 1.0 and found.delay_steps_max < world.steps / 2:
            return found
    more = 1
    while True:
        found = World(case, more).run()
        enough = _periods(case, full, found.kept)
        if enough <= more:
            return found
        more = enough


def _periods(case: Case, full: float, kept: float) -> int:
    """So many as show enough rounds, and each fragment twice where the links are too slow."""
    o = case.options
    rounds = 1.0 if kept >= ROUNDS_ENOUGH else 2 * ROUNDS_ENOUGH / max(kept, 1 / PERIODS_MAX)
    few = ROUNDS_MAX / (ROUNDS_WARM + ROUNDS_MEASURED + o.fragments)
    turns = 1.0
    if full > 1 and o.wait == "never":
        turns = 2 * full / ceil(ROUNDS_MEASURED / o.fragments)
    return max(1, ceil(min(PERIODS_MAX, max(turns, min(few, rounds)))))
