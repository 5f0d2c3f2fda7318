"""Loss after one of two learners is cut off for a while and comes back.

Virtual time, one step per second, 480 steps of both. `missed = "rebase"` merges all that the
learner has trained alone. The default drops it if it is more than four periods. On a slow link of
40 kB/s, all copies of this model take 23 s, and the shard requests contributions from older
versions meanwhile.

    python benchmarks/cut_off.py --seeds 1 2
"""

from __future__ import annotations

import time
from math import inf

from virtual import RATES, SEQUENCES, SIZE, Row, compare, gap_percent, mean_of

from decoupled_diloco.config import RunConfig
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.training import virtual_run
from worlds.faults import Fault, strike

LEARNERS = 2
NONE = "never cut off"
SLOW = 40e3
Setting = tuple[float, str, float]
CELLS: dict[str, Setting] = {NONE: (0.0, "overwrite", inf)} | {
    f"{seconds:g} steps, {what}": (seconds, missed, rate)
    for what, missed, rate in (
        ("dropped", "overwrite", inf),
        ("dropped, a slow link", "overwrite", SLOW),
        ("merged", "rebase", inf),
    )
    for seconds in (96.0, 240.0, 360.0)
}
"""Seconds of the cut, the setting `missed`, and the downlink rate of that learner in bytes/s."""

ENDS_BEFORE = 60.0
"""The link heals at the latest this many steps before the end, and fails at step 120 at the latest.
"""


def measure(cell: Setting, seed: int, steps: int) -> Row:
    """Return the final loss, and the highest within 40 steps after the cut."""
    seconds, missed, rate = cell
    batch = SEQUENCES // LEARNERS
    inner = {"learning_rate": RATES["adamw"], "batch_size": batch, "total_steps": steps}
    tokens = LEARNERS * steps * batch * SIZE["context"]
    config = RunConfig(
        run={"learners": LEARNERS, "max_tokens": tokens, "seed": seed},
        sync={"fragments": 24, "sync_every": 24, "overlap_steps": 2, "apply": {"missed": missed}},
        data={"elastic": False},
        workload={"options": {**SIZE, **inner}},
    )
    begun, after = time.monotonic(), [0.0]
    begins = min(120.0, steps - ENDS_BEFORE - seconds)
    stays, goes = config.learner_ids
    specs = [LearnerSpec(stays), LearnerSpec(goes, down_bytes_per_second=rate)]
    with virtual_run(config, specs) as run:
        system = run.system
        if seconds:
            strike(system, [Fault(begins, "cut", goes, seconds)])
            for look in range(5):
                system.run(stop=lambda: system.finished, until=begins + seconds + 10 * look)
                after.append(run.evaluate()["loss"])
        system.run(stop=lambda: system.finished, until=1e9)
        loss = run.evaluate()["loss"]
    taken = round(time.monotonic() - begun, 1)
    return {"loss": loss, "highest_after": max(after), "seconds": taken}


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    return {
        "loss": mean_of(rows[name], "loss"),
        "highest_after": max(row["highest_after"] for row in rows[name]),
        "over_never_percent": gap_percent(rows[name], rows[NONE]),
    }


if __name__ == "__main__":
    compare("cut_off", CELLS, measure, summary, steps=480, config={"learners": LEARNERS})
