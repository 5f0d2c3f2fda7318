"""Kill one of four learners, several times, and measure what the others lose.

Four paced learners (0.25 s per step), two shards, one SIGKILL per run. The tape gives the steps
that the others lost until the learner was back, and their longest gap between steps relative to
their median, before and after the kill.

    python benchmarks/kill_one.py
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from bench_runs import carry_out, paced
from evidence import keep, options, spread

from decoupled_diloco.run_model import read_run


def run(number: int, steps: int) -> dict[str, Any]:
    with paced(
        step_seconds=0.25,
        run={"name": f"kill-{number}", "learners": 4, "max_steps": steps},
        sync={"fragments": 8, "sync_every": 24, "overlap_steps": 2},
        syncer={"shards": 2},
        faults=[{"at": 0.4, "kill": f"learner-{number % 4}"}],
    ) as config:
        carry_out(config)
        history = read_run(config.run.folder)
    outage = next(o for o in history.outages if o.process.startswith("learner"))
    gaps: dict[str, dict[str, float]] = {}
    for name, learner in history.learners.items():
        if name != outage.process:
            median = learner.step_seconds_median
            assert median is not None
            sides: dict[bool, list[float]] = {False: [], True: []}
            for before, after in pairwise(learner.steps_at):
                sides[after > outage.down_at].append(after - before)
            gaps[name] = {
                "median_seconds": median,
                "longest_before_in_medians": max(sides[False]) / median,
                "longest_after_in_medians": max(sides[True]) / median,
            }
    return {
        "killed": outage.process,
        "away_seconds": outage.seconds,
        "steps_lost_by_the_others": sum(outage.lost_steps.values()),
        "gaps": gaps,
    }


def main() -> None:
    arguments = options(runs=4, steps=120)
    raw = [run(number, arguments.steps) for number in range(arguments.runs)]
    gaps = [gap for row in raw for gap in row["gaps"].values()]
    result = {
        "steps lost by the other learners": [row["steps_lost_by_the_others"] for row in raw],
        "downtime, seconds": spread(row["away_seconds"] for row in raw),
        **{
            f"longest step gap of another learner {when} the kill, in median steps": spread(
                gap[f"longest_{when}_in_medians"] for gap in gaps
            )
            for when in ("before", "after")
        },
    }
    keep("kill", config=vars(arguments), raw=raw, result=result)


if __name__ == "__main__":
    main()
