"""A long run of random worlds, in pieces: each call continues at the end of the record.

    python benchmarks/random_worlds.py --hours 8

The record, ``results/worlds/raw.jsonl``, has one line per block of seeds: the first seed, the
number of worlds, their kind, the commit, the events checked, CPU seconds, and the worlds that
failed, each with the command that repeats it. `result.json` has the totals. Devices and ranks are
drawn in every kind that allows them.
"""

from __future__ import annotations

import json
import logging
import subprocess
import time
from typing import Any

from evidence import HERE, RESULTS, keep, options

from worlds import worlds
from worlds.shrink import Changes

KINDS = {
    "plain": Changes(),
    "relays": Changes(relays=True),
    "secure sums": Changes(secure=True),
    "secure sums with relays": Changes(secure=True, relays=True),
    "parties with quotas": Changes(quotas=True),
    "moments": Changes(moments=True),
    "moments with relays": Changes(moments=True, relays=True),
}
"""The kind of a block of worlds; blocks take turns."""

RECORD = RESULTS / "worlds" / "raw.jsonl"
BLOCK = 100
"""Worlds per line of the record."""


def block(first: int, kind: str, commit: str, deadline: float) -> dict[str, Any]:
    """Run the worlds with seeds from `first` on, until the deadline (monotonic, s)."""
    seed, events, seconds = first, 0, 0.0
    failed: dict[int, str] = {}
    while seed < first + BLOCK and time.monotonic() < deadline:
        try:
            report = worlds.run(seed, changes=KINDS[kind])
            events += report.events
            seconds += report.processor_seconds
            worlds.collect(first=seed == first)
        except Exception as error:  # any error; the seed reproduces it
            failed[seed] = f"{worlds.command(seed, KINDS[kind])}: {repr(error)[:300]}"
            print(f"{seed}: {failed[seed]}", flush=True)
        seed += 1
    return {
        "first": first,
        "worlds": seed - first,
        "kind": kind,
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
            kind = list(KINDS)[len(blocks) % len(KINDS)]
            blocks.append(block(first, kind, commit, deadline))
            print(json.dumps(blocks[-1]), file=record, flush=True)
    count = sum(each["worlds"] for each in blocks)
    failed = {seed: why for each in blocks for seed, why in each["failed"].items()}
    seconds = sum(each["processor_seconds"] for each in blocks)
    by_kind = dict.fromkeys(KINDS, 0)
    for each in blocks:
        by_kind[each.get("kind", "plain")] += each["worlds"]
    keep(
        "worlds",
        config={"hours of this piece": arguments.hours},
        raw={"lines of": RECORD.name, "worlds": count, "failed worlds": failed},
        result={
            "worlds": count,
            **by_kind,
            "failed worlds": len(failed),
            "checked events": sum(each["events"] for each in blocks),
            "CPU hours": round(seconds / 3600, 2),
            "worlds per minute and core": round(60 * (count - len(failed)) / max(seconds, 1.0), 1),
        },
    )


if __name__ == "__main__":
    main()
