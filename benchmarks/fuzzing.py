"""Hostile inputs for everything that reads what others have written: what a million of them do.

    python benchmarks/fuzzing.py --inputs 1000000 --seed 1
    python benchmarks/fuzzing.py --only weights --seed 1 --number 4711    # one input again

The targets are those of ``tests/fuzz``: valid samples with flips, cuts, splices, other lengths,
huge numbers, deep nesting and digests that fit. An input fails that raises anything but what its
target may raise, that takes long, or that makes the process grow.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evidence import keep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzz.harness import MEMORY_BYTES_MAX, SECONDS_MAX, Tally, Target, input_of, peak_bytes, run
from fuzz.targets import all_targets

ESTIMATE = (
    "1,000 to 5,000 inputs a second for what is read in memory, 200 to 1,000 for files and for "
    "connections, 30 to 100 for whole tapes and journals with tensors: twenty to thirty minutes. "
    "A handful of exceptions that escape, of JSON and TOML that are nested too deep"
)
MEMORY = Path("/dev/shm")
"""Files of inputs go into memory, if there is a place: the disk is not what is tested."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="one target")
    parser.add_argument("--number", type=int, help="with --only: one input, printed and read")
    parser.add_argument("--name", default="fuzz", help="of the result's folder")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    os.nice(10)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        targets = all_targets(Path(folder))
        if arguments.number is not None:
            again(targets[arguments.only], arguments.seed, arguments.number)
            return
        chosen = [targets[arguments.only]] if arguments.only else list(targets.values())
        tallies = fuzz(chosen, arguments.inputs, arguments.seed)
    faults = [fault for tally in tallies.values() for fault in tally.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    if arguments.only is None:
        record(arguments.name, arguments.seed, tallies)
    sys.exit(1 if faults else 0)


def again(target: Target, seed: int, number: int) -> None:
    data = input_of(target, seed, number)
    print(repr(data[:10_000]), len(data), "bytes")
    target.read(data)


def fuzz(targets: list[Target], inputs: int, seed: int) -> dict[str, Tally]:
    """So many inputs in all, by each target's share."""
    each = inputs / sum(target.share for target in targets)
    tallies = {}
    for target in targets:
        count = max(len(target.samples), int(each * target.share) + 1)
        tallies[target.name] = tally = run(target, count, seed)
        rate = tally.inputs / max(tally.seconds, 1e-9)
        print(f"{target.name}: {tally.inputs} inputs, {rate:.0f}/s, {len(tally.faults)} faults")
        sys.stdout.flush()
    return tallies


def record(name: str, seed: int, tallies: dict[str, Tally]) -> None:
    each: dict[str, Any] = {
        target: {
            "inputs": tally.inputs,
            "inputs_per_second": round(tally.inputs / tally.seconds),
            "outcomes": dict(tally.outcomes.most_common()),
            "slowest_seconds": round(tally.slowest_seconds, 3),
            "grown_mib": tally.grown_bytes >> 20,
            "faults": [str(fault) for fault in tally.faults],
        }
        for target, tally in tallies.items()
    }
    total = sum(tally.inputs for tally in tallies.values())
    seconds = sum(tally.seconds for tally in tallies.values())
    slowest = max(tallies, key=lambda target: tallies[target].slowest_seconds)
    grown = max(tallies, key=lambda target: tallies[target].grown_bytes)
    result = {
        "inputs": total,
        "targets": len(tallies),
        "faults": sum(len(tally.faults) for tally in tallies.values()),
        "seconds": round(seconds),
        "inputs a second": round(total / seconds),
        "slowest input": f"{tallies[slowest].slowest_seconds:.2f} s ({slowest})",
        "most memory that a target added": f"{tallies[grown].grown_bytes >> 20} MiB ({grown})",
        "most memory of the process, PyTorch and all": f"{peak_bytes() >> 20} MiB",
    }
    limits = {"seconds_of_an_input": SECONDS_MAX, "memory_bytes_of_an_input": MEMORY_BYTES_MAX}
    keep(
        name,
        estimate=ESTIMATE,
        config={"seed": seed, "at": time.strftime("%Y-%m-%d"), **limits},
        raw=each,
        result=result,
        not_measured="coverage; inputs above 1 MiB; checkpoints of several ranks, which PyTorch "
        "reads; a disk that answers with errors; two connections that act together",
    )


if __name__ == "__main__":
    main()
