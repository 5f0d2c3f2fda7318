"""Learners with unequal speeds at equal tokens: effects of alignment, missed and participation.

Four learners whose steps take 4, 4, 2 and 1 seconds of virtual time, 8 cells of settings, paired
seeds. For comparison, four equal learners train the same number of tokens.

    python benchmarks/speeds.py --seeds 1 2 3
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

from virtual import RATES, SIZE, Row, Watch, compare, gap_percent, global_steps, interval, mean_of

from decoupled_diloco.config import RunConfig
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.training import train_virtually

UNEQUAL, EQUAL = (4.0, 4.0, 2.0, 1.0), (1.0, 1.0, 1.0, 1.0)
BATCH = 8
CLASSES = {4.0: "quarter", 2.0: "half", 1.0: "full"}
Setting = tuple[tuple[float, ...], dict[str, Any]]
CELLS: dict[str, Setting] = {
    f"{missed}, {alignment}, {participation}": (
        UNEQUAL,
        {"apply": {"missed": missed, "alignment": alignment}, "participation": participation},
    )
    for participation, missed, alignment in product(
        ("active", "all"), ("overwrite", "rebase"), ("overwrite", "carry")
    )
}
"""Speeds and settings, the default first."""

DEFAULT = next(iter(CELLS))
CELLS["four equal learners, defaults"] = (EQUAL, {})


def measure(cell: Setting, seed: int, steps: int) -> Row:
    """Return the loss of one run, and counts from its tape."""
    speeds, sync = cell
    inner = {"batch_size": BATCH, "learning_rate": RATES["adamw"]}
    tokens = steps * BATCH * SIZE["context"]
    config = RunConfig(
        run={"learners": len(speeds), "max_tokens": tokens, "seed": seed},
        sync=sync,
        workload={"options": {**SIZE, "total_steps": global_steps(speeds, steps), **inner}},
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


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Return means over the seeds, and the paired difference from the default."""
    own = rows[name]
    means = ("discarded_percent", "discarded_percent_of", "participation_percent", "rounds")
    return {
        "mean_loss": mean_of(own, "loss"),
        "loss": interval([row["loss"] for row in own]),
        "gap_to_default_percent": gap_percent(own, rows[DEFAULT]),
        **{column: mean_of(own, column) for column in means},
        "global_steps": mean_of(own, "clock"),
    }


if __name__ == "__main__":
    config = {"batch_size": BATCH, "inner_rate": RATES["adamw"], "step_seconds": UNEQUAL}
    config |= {"variance": 0.05, "latency_seconds": 0.05}
    compare("speeds", CELLS, measure, summary, steps=1536, config=config)
