"""Steady state of a case: some periods of its rounds, simulated by `world`."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from decoupled_diloco_plan.bandwidth.case import Case, demand
from decoupled_diloco_plan.bandwidth.steady_state import Rounds
from decoupled_diloco_plan.bandwidth.world import ROUNDS_MEASURED, ROUNDS_WARM, World

ROUNDS_ENOUGH = 0.5
"""With a smaller share of completed rounds, more periods are simulated to observe enough."""

ROUNDS_MAX = 400
"""Approximate limit on simulated rounds; it is exceeded only to see each fragment twice."""

PERIODS_MAX = 40


@lru_cache(maxsize=128)
def simulate(case: Case) -> Rounds:
    """Simulate periods until enough rounds were observed, and return their steady state."""
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
    """Return the periods that show enough rounds, and each fragment twice if links are too slow."""
    o = case.options
    rounds = 1.0 if kept >= ROUNDS_ENOUGH else 2 * ROUNDS_ENOUGH / max(kept, 1 / PERIODS_MAX)
    few = ROUNDS_MAX / (ROUNDS_WARM + ROUNDS_MEASURED + o.fragments)
    repeats = 1.0
    if full > 1 and o.wait == "never":
        repeats = 2 * full / ceil(ROUNDS_MEASURED / o.fragments)
    return max(1, ceil(min(PERIODS_MAX, max(repeats, min(few, rounds)))))
