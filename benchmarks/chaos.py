"""Half an hour of failures with real processes: what the survivors lose, and what is accepted.

Carries out the scenario chaos-long (four paced learners, two shards, something fails every twenty
seconds; see scenarios/chaos-long.toml), or takes a run that has been made with it, and keeps its
verdict.

    python benchmarks/chaos.py
    python benchmarks/chaos.py --of RUN
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from evidence import keep, spread

from decoupled_diloco.chaos.verdict import FILE_NAME
from decoupled_diloco.observe.run_model import read_run

ESTIMATE = (
    "some learner always steps; 0 steps lost by survivors; accepted tokens 0.98 of a fault-free "
    "run's: a killed learner loses two to three steps, every 80 s, and what it trained while a "
    "shard was starting; every rule of versions and merges holds, every tape replays"
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", type=Path, help="A run folder of chaos-long.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = arguments.of or Path(name) / "run"
        if arguments.of is None:
            command = [sys.executable, "-m", "decoupled_diloco.cli", "chaos", "chaos-long"]
            subprocess.run([*command, "--set", f"run.folder={folder}"], check=False)
        verdict: dict[str, Any] = json.loads((folder / FILE_NAME).read_text())
        history = read_run(folder)
    numbers, faults = verdict["numbers"], verdict["faults"]
    away: dict[str, list[float]] = {}
    for outage in history.outages:
        if outage.seconds is not None:
            away.setdefault(outage.who.partition("-")[0], []).append(outage.seconds)
    result = {
        "faults": sum(faults.values()),
        "seconds between faults": round(history.duration / sum(faults.values()), 1),
        "uptime": numbers["uptime"],
        "longest moment without a step, seconds": round(
            numbers["longest_without_a_step_seconds"], 2
        ),
        "steps lost by survivors": sum(numbers["lost_steps"].values()),
        "longest gap of a survivor, in median steps": round(numbers["longest_gap_medians"], 2),
        "accepted tokens over a fault-free run's": round(numbers["accepted_ratio"], 4),
        "least share of its eligible rounds": round(min(numbers["participation"].values()), 4),
        "replayed events": numbers["replayed_events"],
        "promises kept": "; ".join(c["name"] for c in verdict["checks"] if c["kept"]),
        "seconds away": {who: spread(each) for who, each in away.items()},
    }
    keep(
        "chaos",
        estimate=ESTIMATE,
        config={"scenario": "chaos-long", "faults": faults, "seconds": history.duration},
        raw=verdict,
        result=result,
        not_measured="learners on machines of their own; CUDA; a fault-free real run as reference",
    )


if __name__ == "__main__":
    main()
