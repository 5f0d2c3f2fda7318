"""What the runs of `measure` come to: each system beside no communication, by turns."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from run import Row

ESTIMATE = (
    "no communication at all is the bound: on a clean link all systems reach 95 % or more; at "
    "50 ms and 200 Mbit/s DDP 20 to 30 %, torchft 85 to 95 %, ours 95 % or more, for the syncer "
    "takes a part of the two cores; at 20 Mbit/s DDP 5 %, torchft 60 to 80 %, ours as before. "
    "Bytes a step: DDP 3.5 MB, torchft 150 kB, ours 75 kB, and with four bits 20 kB. A killed "
    "worker holds DDP up until it is back, torchft until its timeout, ours not at all. "
    "hivemind, which averages as torchft does and must find its group for it: 85 to 95 %, 45 to "
    "60 % and 50 to 70 %, 150 kB a step; Flower, which starts a process for each message and asks "
    "every 3 s: 25 to 35 % on a clean link, 15 to 25 % on the others, 150 kB. A killed worker "
    "holds hivemind up for 15 s and Flower for a minute; a killed centre hivemind not at all, "
    "Flower for half a minute. One of four for ever: hivemind waits 15 s in that round and a few "
    "seconds in each later one, DDP 60 s until its rendezvous, then goes on with three; torchft "
    "3 s once; ours not at all"
)
NOT_MEASURED = (
    "GPUs; more than four workers; machines with a core for the syncer; peers with other settings "
    "than their documentation's; Flower's deprecated client, which stays one process"
)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """By kind of run, then by model and link, then by system."""
    grouped: dict[str, dict[str, dict[str, list[Row]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for row in rows:
        system, model, link, kind = row["cell"].split(" ")
        grouped[kind][f"{model} {link}"][system].append(row)
    return {
        kind: {
            where: {
                system: _timed(each, systems.get("none", []))
                if kind in ("speed", "slow", "loss")
                else _faulty(each)
                for system, each in systems.items()
            }
            for where, systems in settings.items()
        }
        for kind, settings in grouped.items()
    }


def _timed(rows: list[Row], alone: list[Row]) -> dict[str, Any]:
    """Steps a second of the slowest worker, over those without communication of the same turn."""
    rates = {row["repeat"]: row["rate"] for row in alone if "rate" in row}
    timed = [row for row in rows if "rate" in row]
    found: dict[str, Any] = {
        "finished": sum(row["finished"] for row in rows),
        "runs": len(rows),
        "steps": [min(row["steps"]) for row in rows],
        "rate": [row["rate"] for row in timed],
        "percent_of_none": [
            100 * row["rate"] / rates[row["repeat"]] for row in timed if row["repeat"] in rates
        ],
        "seconds_of_all_steps": [
            max(steps / rate for steps, rate in zip(row["steps"], row["rates"], strict=True))
            for row in timed
        ],
        "longest_gap_seconds": [max(row["gaps"]) for row in timed],
        "bytes_per_step": [sum(row["sent_per_step"]) / 2 for row in timed],
    }
    losses = [loss for row in rows for loss in row["losses"][:1] if loss is not None]
    return found | ({"loss": statistics.mean(losses)} if losses else {})


def _faulty(rows: list[Row]) -> dict[str, Any]:
    """Seconds without a step, of worker 0 and worker 1; when a killed one took a step again."""
    return {
        "finished": sum(row["finished"] for row in rows),
        "runs": len(rows),
        **{
            name: [row[name] for row in rows if name in row]
            for name in ("gaps", "steps_in_minute", "back_seconds")
        },
    }
