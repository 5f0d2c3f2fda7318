"""The tables of `peers/measure.py`."""

from __future__ import annotations

from typing import Any

from shapes import few, table

PEERS = {
    "none": "no communication",
    "ddp": "DDP (gloo)",
    "ddp-fp16": "DDP, fp16 hook",
    "torchft": "torchft, DiLoCo",
    "torchft-buckets": "torchft, one bucket",
    "torchft-streaming": "torchft, streaming",
    "hivemind": "hivemind, DiLoCo",
    "flower": "Flower, FedAvgM",
    "ours-bf16": "this project, bf16",
    "ours-int4": "this project, int4",
}
FAULTS = {
    "slow": "one worker four times slower",
    "kill-worker": "a worker is killed, and started again after 5 s",
    "kill-centre": "the centre is killed, and started again after 5 s",
    "lose-worker": "one worker of four is killed, and never comes back",
    "cut": "the link is cut for a minute",
}


def _longest(kind: str, gaps: list[float | None]) -> float:
    """Of the workers that were not killed."""
    alive = gaps[:-1] if kind.endswith("-worker") else gaps
    return max(gap for gap in alive if gap is not None)


def peers(result: Any) -> str:
    parts = []
    if "speed" in result:
        rows = [
            [
                where,
                PEERS[system],
                few(row["percent_of_none"], 1, " %")
                if row["rate"]
                else f"{row['steps'][0]} of its steps",
                few(row["longest_gap_seconds"], 2, " s"),
                few([n / 1e3 for n in row["bytes_per_step"]], 1, " kB"),
                f"{row['finished']} of {row['runs']}",
            ]
            for where, systems in result["speed"].items()
            for system, row in systems.items()
        ]
        header = ["model and link", "system", "steps/s, of no communication", "longest step"]
        parts.append(table([*header, "sent a step, each way", "came to the end"], rows))
    slow = [
        [PEERS[system], few(row["seconds_of_all_steps"], 0, " s"), f"{row['loss']:.2f}"]
        for systems in result.get("slow", {}).values()
        for system, row in systems.items()
    ]
    if slow:
        header = [f"{FAULTS['slow']}, equal tokens", "seconds of training", "loss"]
        parts.append(table(header, slow))
    faulty = [
        [
            FAULTS[kind],
            PEERS[system],
            few([_longest(kind, gaps) for gaps in row["gaps"] if gaps[0] is not None], 1, " s"),
            few([back[-1] for back in row["back_seconds"] if back[-1] is not None], 1, " s"),
            few([float(steps[0]) for steps in row["steps_in_minute"]], 0, ""),
            f"{row['finished']} of {row['runs']}",
        ]
        for kind, settings in result.items()
        if kind in FAULTS and kind != "slow"
        for systems in settings.values()
        for system, row in systems.items()
    ]
    if faulty:
        header = ["what happens", "system", "longest time without a step, of who was not killed"]
        more = ["the killed worker steps again after", "steps in the minute after it"]
        parts.append(table([*header, *more, "came to the end"], faulty))
    return "\n\n".join(parts)
