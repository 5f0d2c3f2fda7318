"""A long run of random worlds, in pieces: each call goes on where the record ends.

    python benchmarks/worlds.py --hours 8

The record, ``results/worlds/raw.jsonl``, has a line for each block of seeds: the first, how many
worlds, the commit, the events checked, processor seconds, and the worlds that did not hold.
`result.json` adds them up.
"""

from __future__ import annotations

import argparse
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
BLOCK = 500
"""Worlds of a line of the record."""


def commit() -> str:
    """The commit whose worlds these are."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    here = Path(__file__).parent
    return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip()


def block(first: int, at: str, deadline: float) -> dict[str, Any]:
    """What becomes of the worlds of the seeds from `first` on, until the deadline (monotonic s)."""
    worlds_run, events, seconds = 0, 0, 0.0
    failed: dict[int, str] = {}
    while worlds_run < BLOCK and time.monotonic() < deadline:
        seed = first + worlds_run
        worlds_run += 1
        try:
            report = worlds.run(seed)
        except Exception as error:  # whatever it is, the seed repeats it
            failed[seed] = repr(error)[:300]
            print(f"{seed}: {failed[seed]}", flush=True)
            continue
        events += report.events
        seconds += report.processor_seconds
        worlds.collect(first=seed == first)
    return {
        "first": first,
        "worlds": worlds_run,
        "commit": at,
        "events": events,
        "processor_seconds": round(seconds, 1),
        "failed": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hours", type=float, default=1.0)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    blocks = [json.loads(line) for line in lines]
    at = commit()
    deadline = time.monotonic() + 3600 * arguments.hours
    with RECORD.open("a") as record:
        while time.monotonic() < deadline:
            first = blocks[-1]["first"] + blocks[-1]["worlds"] if blocks else 0
            blocks.append(block(first, at, deadline))
            record.write(json.dumps(blocks[-1]) + "\n")
            record.flush()
    count = sum(each["worlds"] for each in blocks)
    failed = {seed: why for each in blocks for seed, why in each["failed"].items()}
    seconds = sum(each["processor_seconds"] for each in blocks)
    keep(
        "worlds",
        estimate=ESTIMATE,
        config={"hours of this piece": arguments.hours},
        raw={"lines of": RECORD.name, "worlds": count, "did not hold": failed},
        result={
            "worlds": count,
            "did not hold": len(failed),
            "checked events": sum(each["events"] for each in blocks),
            "processor hours": round(seconds / 3600, 2),
            "worlds a minute of one core": round(60 * (count - len(failed)) / max(seconds, 1.0), 1),
        },
        not_measured="worlds of thousands of learners; learners of several ranks before world 8098",
    )


if __name__ == "__main__":
    main()
