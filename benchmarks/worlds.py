"""A long run of random worlds, in pieces: each call goes on where the record ends.

    python benchmarks/worlds.py --hours 8

The record, ``results/worlds/raw.jsonl``, has a line for each world: its seed, the commit, events,
processor seconds, and what did not hold. `result.json` adds them up.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import time
from pathlib import Path
from typing import Any

from evidence import RESULTS, keep

from decoupled_diloco.simulate import worlds

ESTIMATE = (
    "a world takes 0.3 s of one core, so 8 hours on two cores are 190 000 worlds; of the first ten "
    "thousand one in a thousand shows something"
)
RECORD = RESULTS / "worlds" / "raw.jsonl"


def commit() -> str:
    """The commit whose worlds these are."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip()


def one(seed: int, at: str) -> dict[str, Any]:
    """What becomes of the world of a seed."""
    line: dict[str, Any] = {"seed": seed, "commit": at}
    try:
        report = worlds.run(seed)
    except Exception as error:  # whatever it is, the seed repeats it
        return line | {"problem": repr(error)[:300]}
    seconds = round(report.processor_seconds, 3)
    return line | {"events": report.events, "processor_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=1.0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    before = RECORD.read_text().splitlines() if RECORD.exists() else []
    seed, at = len(before), commit()
    deadline = time.monotonic() + 3600 * arguments.hours
    with RECORD.open("a") as record:
        while time.monotonic() < deadline:
            record.write(json.dumps(one(seed, at)) + "\n")
            record.flush()
            seed += 1
            if seed % 20 == 0:
                gc.collect()
    every = [json.loads(line) for line in RECORD.read_text().splitlines()]
    held = [line for line in every if "problem" not in line]
    seconds = sum(line["processor_seconds"] for line in held)
    keep(
        "worlds",
        estimate=ESTIMATE,
        config={"hours of this piece": arguments.hours},
        raw={"lines of": RECORD.name, "worlds": len(every)},
        result={
            "worlds": len(every),
            "did not hold": len(every) - len(held),
            "checked events": sum(line["events"] for line in held),
            "processor hours": round(seconds / 3600, 2),
            "worlds a minute of one core": round(60 * len(held) / max(seconds, 1.0), 1),
        },
        not_measured="worlds of learners of several ranks, of thousands of learners",
    )


if __name__ == "__main__":
    main()
