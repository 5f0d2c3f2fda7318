"""What late contributions cost in loss: folded into the next round, dropped, or discounted.

Four equal learners in virtual time. One of them has an uplink on which a fragment takes 0.5, 1 or 3
periods, and in one more row three of them have one of half a period. Every run trains the same
number of tokens; seeds are paired.

    python benchmarks/late.py --seeds 1 2 3
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from cells import Row, Watch, measured, parser
from evidence import keep
from quality import SIZE, interval

from decoupled_diloco.config import RunConfig
from decoupled_diloco.merge import layout_of
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.training import train_virtually
from decoupled_diloco.workloads import load_workload

ESTIMATE = (
    "a learner whose uploads take half a period delivers two fragments of 24 in a period, so one "
    "learner of four is nearly missing: loss 0.5 to 1.5 % above that of four whole ones, whatever "
    "becomes of the late bodies; next against drop within 0.3 %, the discount between them; three "
    "slow learners 2 to 4 % above, and there next 0.5 % better than drop"
)
LEARNERS = 4
BATCH = 8
RATE = 8e-3
PERIOD = 24
REFERENCE = "nobody is slow"
RULES: dict[str, dict[str, Any]] = {
    "next": {"late": "next"},
    "discount 0.5": {"late": "next", "late_discount": 0.5},
    "drop": {"late": "drop"},
}


def cells() -> dict[str, tuple[float, int, dict[str, Any]]]:
    """Name of each row: the periods that an upload takes, how many learners are slow, settings."""
    rows: dict[str, tuple[float, int, dict[str, Any]]] = {REFERENCE: (0.0, 0, {})}
    for periods, slow in ((0.5, 1), (1.0, 1), (3.0, 1), (0.5, 3)):
        for rule, settings in RULES.items():
            rows[f"{periods:g} periods, {slow} slow, {rule}"] = (periods, slow, settings)
    return rows


def fragment_nbytes(config: RunConfig) -> float:
    """Bytes of a mean fragment's body."""
    workload = load_workload("gpt", {**SIZE, "batch_size": BATCH, "learning_rate": RATE})
    numel = sum(spec.numel for spec in layout_of(workload.model()).tensors)
    return 2.0 * numel / config.sync.fragments


def measure(periods: float, slow: int, sync: dict[str, Any], seed: int, steps: int) -> Row:
    """One run: its loss and what the tape says of it."""
    config = RunConfig(
        run={"learners": LEARNERS, "budget_steps": steps, "seed": seed},
        sync={"period": PERIOD, **sync},
        workload={
            "options": {
                **SIZE,
                "total_steps": steps,
                "batch_size": BATCH,
                "learning_rate": RATE,
            }
        },
    )
    names = config.learner_ids
    rate = fragment_nbytes(config) / (periods * PERIOD) if periods else float("inf")
    specs = [
        LearnerSpec(
            name,
            step_seconds=1.0,
            variance=0.05,
            latency=0.05,
            up_bytes_per_second=rate if LEARNERS - slow <= number else float("inf"),
        )
        for number, name in enumerate(names)
    ]
    watch = Watch(config.sync.fragments)
    begun = time.monotonic()
    run = train_virtually(config, specs, recorder=watch)
    late = names[-1]
    return {
        "loss": run.evaluate()["loss"],
        "tokens": run.tokens,
        "rounds": watch.rounds,
        "bodies_of_the_last": watch.folded[late],
        "bodies_of_the_first": watch.folded[names[0]],
        "ages": dict(sorted(watch.ages.items())),
        "discarded_percent_of_the_last": watch.discarded_percent([late]),
        "seconds": round(time.monotonic() - begun, 1),
    }


def summary(rows: list[Row], default: list[Row]) -> dict[str, Any]:
    """Means over the seeds, and the paired difference to the reference."""
    gaps = [100 * (x["loss"] / y["loss"] - 1) for x, y in zip(rows, default, strict=True)]
    return {
        "mean_loss": statistics.mean(row["loss"] for row in rows),
        "loss": interval([row["loss"] for row in rows]),
        "gap_to_reference_percent": interval(gaps),
        "bodies_of_the_last": statistics.mean(row["bodies_of_the_last"] for row in rows),
        "bodies_of_the_first": statistics.mean(row["bodies_of_the_first"] for row in rows),
    }


def main() -> None:
    arguments = parser(384, "of each learner", "late").parse_args()
    torch.set_num_threads(1)
    rows = measured(
        arguments.kept,
        cells(),
        arguments.seeds,
        lambda cell, seed: measure(*cells()[cell], seed, arguments.steps),
    )
    folder = keep(
        arguments.name,
        estimate=ESTIMATE,
        config={
            "steps": arguments.steps,
            "seeds": arguments.seeds,
            **SIZE,
            "batch_size": BATCH,
            "inner_rate": RATE,
            "period": PERIOD,
            "variance": 0.05,
            "latency_seconds": 0.05,
        },
        raw=[row for each in rows.values() for row in each],
        result={name: summary(each, rows[REFERENCE]) for name, each in rows.items()},
        not_measured="larger models, longer runs, other periods and alignments, links whose speed "
        "changes",
    )
    print(folder)


if __name__ == "__main__":
    main()
