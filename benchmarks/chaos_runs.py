"""Half an hour of failures with real processes: losses of the survivors, and accepted tokens.

It runs the scenario chaos-long (four paced learners, two shards, a fault every twenty seconds), or
takes a finished run of it, and saves its verdict.

    python benchmarks/chaos_runs.py
    python benchmarks/chaos_runs.py --of RUN
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

from bench_runs import CLI
from evidence import keep, options, spread

from decoupled_diloco.run_model import read_run
from decoupled_diloco_lab.chaos.verdict import FILE_NAME


def main() -> None:
    arguments = options(of=Path)
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.of or Path(name) / "run"
        if arguments.of is None:
            command = [*CLI, "chaos", "chaos-long", "--set", f"run.folder={folder}"]
            subprocess.run(command, check=False)
        verdict = json.loads((folder / FILE_NAME).read_text())
        history = read_run(folder)
    numbers, faults = verdict["numbers"], verdict["faults"]
    away: dict[str, list[float]] = defaultdict(list)
    for outage in history.outages:
        if outage.seconds is not None:
            away[outage.process.partition("-")[0]].append(outage.seconds)
    longest = numbers["longest_without_a_step_seconds"]
    result = {
        "faults": sum(faults.values()),
        "seconds between faults": round(history.duration / sum(faults.values()), 1),
        "uptime": numbers["uptime"],
        "longest time without a step, seconds": round(longest, 2),
        "steps lost by learners that were not killed": sum(numbers["lost_steps"].values()),
        "longest step gap of a learner that was not killed, in median steps": round(
            numbers["longest_gap_medians"], 2
        ),
        "accepted tokens relative to a fault-free run": round(numbers["accepted_ratio"], 4),
        "lowest participation of a learner in its eligible rounds": round(
            min(numbers["participation"].values()), 4
        ),
        "replayed events": numbers["replayed_events"],
        "checks passed": "; ".join(c["name"] for c in verdict["checks"] if c["kept"]),
        "downtime, seconds": {name: spread(seconds) for name, seconds in away.items()},
    }
    config = {"scenario": "chaos-long", "faults": faults, "seconds": history.duration}
    keep("chaos", config=config, raw=verdict, result=result)


if __name__ == "__main__":
    main()
