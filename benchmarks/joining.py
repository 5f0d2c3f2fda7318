"""A learner joins: the others' step times before, during and after, side by side.

Three paced learners train; a fourth starts when a third of the run is over. *During* is from its
first word to the syncer until all fragments are there and it trains. The start of its process
(Python, torch) is looked at by itself: on one machine it takes a core from the others.

    python benchmarks/joining.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from evidence import keep, spread

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun
from decoupled_diloco.observe.tape import TapeReader

ESTIMATE = (
    "median step of the others: the same to 1 % before, during and after; p99 up to a fifth longer "
    "while the new process imports torch on one of two cores. The join itself (1.8 M parameters, "
    "7 MB, loopback) takes well under a second"
)
JOINER = "learner-3"


def run(number: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        config = RunConfig(
            run={
                "name": f"joining-{number}",
                "folder": str(Path(name) / "run"),
                "learners": 4,
                "budget_steps": steps,
                "evaluator": False,
            },
            sync={"fragments": 8, "period": 24, "overlap": 2},
            syncer={"shards": 2, "port": 0},
            workload={
                "name": "paced",
                "options": {"step_seconds": 0.3, "width": 192, "layers": 4},
            },
        )
        local = LocalRun(config)
        try:
            local.start()
            arguments = local.supervisor.children[JOINER].arguments
            local.supervisor.kill(JOINER, restart=False)

            waiting = [arguments]

            def join_in_time() -> None:
                if waiting and local.used_budget() > 1 / 3:
                    local.supervisor.start(JOINER, waiting.pop())

            outcome = local.wait(join_in_time)
        finally:
            local.close()
        assert outcome.finished, outcome.reason
        records = list(TapeReader(Path(config.run.folder)))
    return measured(records)


def measured(records: list[Any]) -> dict[str, Any]:
    started = [r.at for r in records if r.type == "ProcessStarted" and r.data["name"] == JOINER][-1]
    asked = next(r.at for r in records if r.type == "Connected" and r.data["peer"] == JOINER)
    trains = next(r.at for r in records if r.type == "StepFinished" and r.who == JOINER)
    spans = {
        "before": (0.0, started),
        "while its process starts": (started, asked),
        "while it takes the weights": (asked, trains),
        "after": (trains, float("inf")),
    }
    seconds: dict[str, list[float]] = {name: [] for name in spans}
    for number in range(3):
        at = [r.at for r in records if r.type == "StepFinished" and r.who == f"learner-{number}"]
        for before, after in list(pairwise(at))[5:]:
            for name, (first, last) in spans.items():
                if before < last and after > first:
                    seconds[name].append(after - before)
    steps = {
        name: {
            "steps": len(each),
            "median": statistics.median(each),
            "longest": max(each),
        }
        for name, each in seconds.items()
        if each
    }
    return {"process_starts_seconds": asked - started, "joins_seconds": trains - asked, **steps}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    raw = [run(number, arguments.steps) for number in range(arguments.runs)]
    result: dict[str, Any] = {
        "seconds until it asks to join (its process starts)": spread(
            [row["process_starts_seconds"] for row in raw]
        ),
        "seconds from there to its first step (0.3 of them the step)": spread(
            [row["joins_seconds"] for row in raw]
        ),
    }
    for span in ("before", "while its process starts", "while it takes the weights", "after"):
        rows = [row[span] for row in raw if span in row]
        for what in ("median", "longest"):
            name = f"{what} step of the others, seconds: {span}"
            result[name] = spread([row[what] for row in rows])
    keep(
        "joining",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="models whose copy takes longer than a step; a link that is full",
    )


if __name__ == "__main__":
    main()
