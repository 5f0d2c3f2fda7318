"""Loss from late contributions: folded into the next round, dropped, or discounted.

Four equal learners in virtual time. For one of them a fragment's upload takes 0.5, 1 or 3 periods.
In one more row, three of them have an uplink of half a period. Every run trains the same number of
tokens; seeds are paired.

    python benchmarks/late.py --seeds 1 2 3
"""

from __future__ import annotations

import time
from math import inf
from typing import Any

from virtual import LEARNERS, RATES, SIZE, Row, Watch, compare, gap_percent, interval, mean_of

from decoupled_diloco.config import RunConfig
from decoupled_diloco.merge import layout_of
from decoupled_diloco.workloads import load_workload
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.training import train_virtually

PERIOD = 24
INNER = {"batch_size": 8, "learning_rate": RATES["adamw"]}
RULES: dict[str, dict[str, Any]] = {
    "next": {"late": {"policy": "next"}},
    "discount 0.5": {"late": {"policy": "next", "discount": 0.5}},
    "drop": {"late": {"policy": "drop"}},
}
Setting = tuple[float, int, dict[str, Any]]
REFERENCE = "no slow learner"
CELLS: dict[str, Setting] = {REFERENCE: (0.0, 0, {})} | {
    f"{periods:g} periods, {slow} slow, {rule}": (periods, slow, settings)
    for periods, slow in ((0.5, 1), (1.0, 1), (3.0, 1), (0.5, 3))
    for rule, settings in RULES.items()
}
"""Periods per upload, number of slow learners, settings."""


def measure(cell: Setting, seed: int, steps: int) -> Row:
    """Return the loss of one run, and counts from its tape."""
    periods, slow, sync = cell
    config = RunConfig(
        run={"learners": LEARNERS, "max_steps": steps, "seed": seed},
        sync={"sync_every": PERIOD, **sync},
        workload={"options": {**SIZE, "total_steps": steps, **INNER}},
    )
    layout = layout_of(load_workload("gpt", {**SIZE, **INNER}).model())
    body = 2.0 * sum(spec.numel for spec in layout.tensors) / config.sync.fragments
    rate = body / (periods * PERIOD) if periods else inf
    specs = [
        LearnerSpec(
            name,
            step_seconds=1.0,
            variance=0.05,
            latency=0.05,
            up_bytes_per_second=rate if LEARNERS - slow <= number else inf,
        )
        for number, name in enumerate(config.learner_ids)
    ]
    watch = Watch(config.sync.fragments)
    begun = time.monotonic()
    run = train_virtually(config, specs, recorder=watch)
    first, *_, last = config.learner_ids
    return {
        "loss": run.evaluate()["loss"],
        "tokens": run.tokens,
        "rounds": watch.rounds,
        "bodies_of_the_last": watch.folded[last],
        "bodies_of_the_first": watch.folded[first],
        "ages": dict(sorted(watch.ages.items())),
        "discarded_percent_of_the_last": watch.discarded_percent([last]),
        "seconds": round(time.monotonic() - begun, 1),
    }


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Return means over the seeds, and the paired difference from the reference."""
    own = rows[name]
    return {
        "mean_loss": mean_of(own, "loss"),
        "loss": interval([row["loss"] for row in own]),
        "gap_to_reference_percent": gap_percent(own, rows[REFERENCE]),
        "bodies_of_the_last": mean_of(own, "bodies_of_the_last"),
        "bodies_of_the_first": mean_of(own, "bodies_of_the_first"),
    }


if __name__ == "__main__":
    config = {"batch_size": INNER["batch_size"], "inner_rate": INNER["learning_rate"]}
    config |= {"period": PERIOD, "variance": 0.05, "latency_seconds": 0.05}
    compare("late", CELLS, measure, summary, steps=384, config=config)
