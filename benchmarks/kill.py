"""Kill one of four learners, several times: what the others lose.

Four paced learners (0.25 s a step), two shards, one SIGKILL a run; from the tape: steps that the
others lost between the kill and the return, and their longest gap between steps against their
median, before and after the kill.

    python benchmarks/kill.py
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from evidence import keep, run_to_its_end, spread

from decoupled_diloco.config import RunConfig
from decoupled_diloco.observe.run_model import read_run

ESTIMATE = (
    "0 steps lost by the others; their longest gap stays below 1.5 medians; the killed one is away "
    "for 1.0 s: half a second of pause, then a fork of what has imported torch"
)


def run(number: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        config = RunConfig(
            run={
                "name": f"kill-{number}",
                "folder": str(Path(name) / "run"),
                "learners": 4,
                "budget_steps": steps,
                "evaluator": False,
            },
            sync={"fragments": 8, "period": 24, "overlap": 2},
            syncer={"shards": 2, "port": 0},
            workload={"name": "paced", "options": {"step_seconds": 0.25}},
            faults=[{"at": 0.4, "kill": f"learner-{number % 4}"}],
        )
        run_to_its_end(config)
        history = read_run(config.run.folder)
    outage = next(o for o in history.outages if o.who.startswith("learner"))
    others = [learner for who, learner in history.learners.items() if who != outage.who]
    gaps: dict[str, dict[str, float]] = {}
    for learner in others:
        median = learner.step_seconds_median
        assert median is not None
        steps_at = learner.steps_at
        before = [b - a for a, b in pairwise(steps_at) if b <= outage.down_at]
        after = [b - a for a, b in pairwise(steps_at) if b > outage.down_at]
        gaps[learner.name] = {
            "median_seconds": median,
            "longest_before_in_medians": max(before) / median,
            "longest_after_in_medians": max(after) / median,
        }
    return {
        "killed": outage.who,
        "away_seconds": outage.seconds,
        "steps_lost_by_the_others": sum(outage.lost_steps.values()),
        "gaps": gaps,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    raw = [run(number, arguments.steps) for number in range(arguments.runs)]
    after = [g["longest_after_in_medians"] for row in raw for g in row["gaps"].values()]
    before = [g["longest_before_in_medians"] for row in raw for g in row["gaps"].values()]
    result = {
        "steps lost by the others": [row["steps_lost_by_the_others"] for row in raw],
        "seconds away": spread([row["away_seconds"] for row in raw]),
        "longest gap of a survivor before the kill, in medians": spread(before),
        "longest gap of a survivor after the kill, in medians": spread(after),
    }
    keep(
        "kill",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="learners on machines of their own, where a restart costs the others nothing",
    )


if __name__ == "__main__":
    main()
