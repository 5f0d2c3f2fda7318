"""Learners of unequal speed at equal tokens: what alignment, missed and participants change.

Four learners whose steps take 4, 4, 2 and 1 seconds of virtual time, 8 cells of settings, paired
seeds; and four equal learners with the same tokens.

    python benchmarks/speeds.py --seeds 1 2 3
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from cells import Row, Watch, measured, parser
from evidence import keep
from quality import SIZE, interval

from decoupled_diloco.config import RunConfig
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.training import train_virtually

ESTIMATE = (
    "discarded with the defaults 15 to 20 % of all tokens: the fast learner 4 % (one step of 24 in "
    "flight), the slow ones half (one step of six in flight, and rounds that they miss); carry "
    "takes 4 to 5 points off, rebase 10, participants=all 8 to 12, carry with rebase leaves below "
    "1 %. Loss: rebase, carry and all each 0 to 1 % better than the default, together 1 to 2 %. "
    "Four equal learners 0 to 5 % worse at equal tokens, since they take half as many global steps "
    "and outer rounds"
)
UNEQUAL = (4.0, 4.0, 2.0, 1.0)
EQUAL = (1.0, 1.0, 1.0, 1.0)
BATCH = 8
RATE = 8e-3
CLASSES = {4.0: "quarter", 2.0: "half", 1.0: "full"}
DEFAULT = "overwrite, overwrite, reported"
REFERENCE = "four equal learners, defaults"


def global_steps(speeds: Sequence[float], steps: int) -> int:
    """Steps of the fastest learner while all together take so many."""
    return round(steps / sum(min(speeds) / speed for speed in speeds))


def measure(speeds: Sequence[float], sync: dict[str, str], seed: int, steps: int) -> Row:
    """One run: its loss and what the tape says of it."""
    schedule = {"total_steps": global_steps(speeds, steps)}
    config = RunConfig(
        run={
            "learners": len(speeds),
            "budget_tokens": steps * BATCH * SIZE["context"],
            "seed": seed,
        },
        sync=sync,
        workload={"options": {**SIZE, **schedule, "batch_size": BATCH, "learning_rate": RATE}},
    )
    specs = [
        LearnerSpec(name, step_seconds=speed, variance=0.05, latency=0.05)
        for name, speed in zip(config.learner_ids, speeds, strict=True)
    ]
    watch = Watch(config.sync.fragments)
    begun = time.monotonic()
    run = train_virtually(config, specs, recorder=watch)
    classes = {CLASSES[s]: [x.name for x in specs if x.step_seconds == s] for s in sorted(speeds)}
    return {
        "loss": run.evaluate()["loss"],
        "tokens": dict(watch.tokens),
        "rounds": watch.rounds,
        "clock": run.system.shards[0].machine.state.clock,
        "discarded_percent": watch.discarded_percent(config.learner_ids),
        "discarded_percent_of": {k: watch.discarded_percent(v) for k, v in classes.items()},
        "participation_percent": {k: watch.participation_percent(v) for k, v in classes.items()},
        "seconds": round(time.monotonic() - begun, 1),
    }


def cells() -> dict[str, tuple[Sequence[float], dict[str, str]]]:
    """Name, speeds and settings of each row; the default first, the reference last."""
    rows: dict[str, tuple[Sequence[float], dict[str, str]]] = {}
    for participants, missed, alignment in product(
        ("reported", "all"), ("overwrite", "rebase"), ("overwrite", "carry")
    ):
        sync = {"missed": missed, "alignment": alignment, "participants": participants}
        rows[f"{missed}, {alignment}, {participants}"] = (UNEQUAL, sync)
    return rows | {REFERENCE: (EQUAL, {})}


def summary(rows: list[Row], default: list[Row]) -> dict[str, Any]:
    """Means over the seeds, and the paired difference to the default."""

    def mean_of(key: str) -> dict[str, float]:
        return {name: statistics.mean(row[key][name] for row in rows) for name in rows[0][key]}

    gaps = [100 * (x["loss"] / y["loss"] - 1) for x, y in zip(rows, default, strict=True)]
    return {
        "mean_loss": statistics.mean(row["loss"] for row in rows),
        "loss": interval([row["loss"] for row in rows]),
        "gap_to_default_percent": interval(gaps),
        "discarded_percent": statistics.mean(row["discarded_percent"] for row in rows),
        "discarded_percent_of": mean_of("discarded_percent_of"),
        "participation_percent": mean_of("participation_percent"),
        "rounds": statistics.mean(row["rounds"] for row in rows),
        "global_steps": statistics.mean(row["clock"] for row in rows),
    }


def main() -> None:
    arguments = parser(1536, "of all learners together", "speeds").parse_args()
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
            "step_seconds": UNEQUAL,
            "variance": 0.05,
            "latency_seconds": 0.05,
        },
        raw=[row for each in rows.values() for row in each],
        result={name: summary(each, rows[DEFAULT]) for name, each in rows.items()},
        not_measured="inner rates tuned for each cell, larger models, longer runs, learners whose "
        "batches differ too",
    )
    print(folder)


if __name__ == "__main__":
    main()
