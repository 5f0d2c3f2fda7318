"""How many random worlds a core checks in a minute: runs, and events with all checkers.

python benchmarks/events.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from evidence import keep, spread

from decoupled_diloco.simulate import worlds

ESTIMATE = (
    "a world is some 2500 events; a machine takes some 10 microseconds for one, its checks as much "
    "again, the virtual network and the processes around it twice that: 25 000 events a second, "
    "600 runs a minute"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=250)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    raw: list[dict[str, Any]] = []
    for repetition in range(arguments.repetitions):
        first = repetition * arguments.runs
        events, wall, cpu = [], time.perf_counter(), time.process_time()
        for seed in range(first, first + arguments.runs):
            events.append(worlds.run(seed).events)
        raw.append(
            {
                "first seed": first,
                "events": events,
                "seconds": time.perf_counter() - wall,
                "processor_seconds": time.process_time() - cpu,
            }
        )
    every = [count for row in raw for count in row["events"]]
    runs = arguments.runs
    result = {
        "runs in a minute of one core": spread([60 * runs / r["processor_seconds"] for r in raw]),
        "runs in a minute, on this shared machine": spread([60 * runs / r["seconds"] for r in raw]),
        "checked events in a second of one core": spread(
            [sum(r["events"]) / r["processor_seconds"] for r in raw]
        ),
        "events of a run": {
            "median": statistics.median(every),
            "min": min(every),
            "max": max(every),
        },
    }
    keep(
        "events",
        estimate=ESTIMATE,
        config=vars(arguments),
        raw=raw,
        result=result,
        not_measured="worlds with tensors, and with thousands of learners",
    )


if __name__ == "__main__":
    main()
