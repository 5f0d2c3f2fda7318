"""What becomes of the loss when one of two learners is cut off for a while, and comes back.

Virtual time, a step a second, 480 steps of both. `missed = "rebase"` merges all that the learner
has trained alone; the default drops it, once that is more than four periods. Behind a slow link,
40 kB/s, all copies of this model take 23 s: the shard asks for what is older meanwhile.

    python benchmarks/cut_off.py --seeds 1 2
"""

from __future__ import annotations

import math
import statistics
import time

import torch
from cells import Row, measured, parser
from evidence import keep
from quality import SEQUENCES, SIZE, interval

from decoupled_diloco.config import RunConfig
from decoupled_diloco.simulate import LearnerSpec
from decoupled_diloco.simulate.faults import Fault, strike
from decoupled_diloco.simulate.training import virtual_run

ESTIMATE = (
    "after a first look: while it is away the other trains alone, 2 % for 96 steps, 4 % for "
    "240, 6 % for 360. Merged, 360 steps alone are 23 times as long as a usual contribution, and "
    "the loss jumps by a half; it has 60 steps to recover and ends 25 % above. Dropped behind a "
    "slow link: within 1 % of the same behind a fast one"
)
LEARNERS = 2
NONE = "never cut off"
SLOW = 40e3
CELLS: dict[str, tuple[float, str, float]] = {
    NONE: (0.0, "overwrite", math.inf),
    **{
        f"{seconds:g} steps, {what}": (seconds, missed, rate)
        for what, missed, rate in (
            ("dropped", "overwrite", math.inf),
            ("dropped, a slow link", "overwrite", SLOW),
            ("merged", "rebase", math.inf),
        )
        for seconds in (96.0, 240.0, 360.0)
    },
}
ENDS_BEFORE = 60.0
"""The link heals so many steps before the end at the latest, and begins to fail no later than at
step 120."""


def measure(seconds: float, missed: str, rate: float, seed: int, steps: int) -> Row:
    """The loss at the end, and the highest within 40 steps after the cut.

    ``rate``: bytes a second of the downlink of who is cut off.
    """
    batch = SEQUENCES // LEARNERS
    config = RunConfig(
        run={
            "learners": LEARNERS,
            "budget_tokens": LEARNERS * steps * batch * SIZE["context"],
            "seed": seed,
        },
        sync={"fragments": 24, "period": 24, "overlap": 2, "missed": missed},
        data={"leases": False},
        workload={
            "options": {**SIZE, "learning_rate": 8e-3, "batch_size": batch, "total_steps": steps}
        },
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
    seconds_taken = round(time.monotonic() - begun, 1)
    return {"loss": loss, "highest_after": max(after), "seconds": seconds_taken}


def main() -> None:
    arguments = parser(480, "of each learner", "cut_off").parse_args()
    torch.set_num_threads(1)
    rows = measured(
        arguments.kept,
        CELLS,
        arguments.seeds,
        lambda name, seed: measure(*CELLS[name], seed, arguments.steps),
    )
    result = {
        name: {
            "loss": statistics.mean(row["loss"] for row in found),
            "highest_after": max(row["highest_after"] for row in found),
            "over_never_percent": interval(
                [100 * (a["loss"] / b["loss"] - 1) for a, b in zip(found, rows[NONE], strict=True)]
            ),
        }
        for name, found in rows.items()
    }
    keep(
        arguments.name,
        estimate=ESTIMATE,
        config={"steps": arguments.steps, "seeds": arguments.seeds, **SIZE, "learners": LEARNERS},
        raw=[row for found in rows.values() for row in found],
        result=result,
        not_measured="larger models; more learners; learners that come back several times",
    )


if __name__ == "__main__":
    main()
