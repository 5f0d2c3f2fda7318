"""A long run of random worlds, in pieces: each call continues at the end of the record.

    python benchmarks/random_worlds.py --hours 8

The record, ``results/worlds/raw.jsonl``, has one line per block of seeds: the first seed, the
number of worlds, the commit, the events checked, CPU seconds, and the worlds that failed.
`result.json` has the totals.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from typing import Any

from evidence import HERE, RESULTS, keep, options

from worlds import worlds

RECORD = RESULTS / "worlds" / "raw.jsonl"
BLOCK = 500
"""Worlds per line of the record."""


def block(first: int, commit: str, deadline: float) -> dict[str, Any]:
    """Run the worlds with seeds from `first` on, until the deadline (monotonic, s)."""
    seed, events, seconds = first, 0, 0.0
    failed: dict[int, str] = {}
    while seed < first + BLOCK and time.monotonic() < deadline:
        try:
            report = worlds.run(seed)
            events += report.events
            seconds += report.processor_seconds
            worlds.collect(first=seed == first)
        except Exception as error:  # any error; the seed reproduces it
            failed[seed] = repr(error)[:300]
            print(f"{seed}: {failed[seed]}", flush=True)
        seed += 1
    return {
        "first": first,
        "worlds": seed - first,
        "commit": commit,
        "events": events,
        "processor_seconds": round(seconds, 1),
        "failed": failed,
    }


def main() -> None:
    arguments = options(hours=1.0)
    logging.disable(logging.CRITICAL)
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    lines = RECORD.read_text().splitlines() if RECORD.exists() else []
    blocks = [json.loads(line) for line in lines]
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=HERE, capture_output=True, text=True).stdout.strip()
    deadline = time.monotonic() + 3600 * arguments.hours
    with RECORD.open("a") as record:
        while time.monotonic() < deadline:
            first = blocks[-1]["first"] + blocks[-1]["worlds"] if blocks else 0
            blocks.append(block(first, commit, deadline))
            print(json.dumps(blocks[-1]), file=record, flush=True)
    count = sum(each["worlds"] for each in blocks)
    failed = {seed: why for each in blocks for seed, why in each["failed"].items()}
    seconds = sum(each["processor_seconds"] for each in blocks)
    keep(
        "worlds",
        config={"hours of this piece": arguments.hours},
        raw={"lines of": RECORD.name, "worlds": count, "failed worlds": failed},
        result={
            "worlds": count,
            "failed worlds": len(failed),
            "checked events": sum(each["events"] for each in blocks),
            "CPU hours": round(seconds / 3600, 2),
            "worlds per minute and core": round(60 * (count - len(failed)) / max(seconds, 1.0), 1),
        },
    )


if __name__ == "__main__":
    main()
