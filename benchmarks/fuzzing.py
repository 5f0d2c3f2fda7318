"""A million hostile inputs for everything that reads data from others.

    python benchmarks/fuzzing.py --inputs 1000000 --seed 1
    python benchmarks/fuzzing.py --only weights --seed 1 --number 4711    # one input again

The targets are those of ``tests/fuzz``: valid samples with bit flips, truncation, splices, changed
lengths, huge numbers, deep nesting and matching digests. An input fails if it raises an unexpected
exception, takes long, or makes the process grow.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from evidence import keep, options

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fuzz.harness import MEMORY_BYTES_MAX, SECONDS_MAX, Tally, Target, input_of, run
from fuzz.targets import all_targets

MEMORY = Path("/dev/shm")
"""Input files go into memory if possible, because the disk is not under test."""


def main() -> None:
    arguments = options(inputs=1_000_000, seed=1, only=str, number=int, name="fuzz")
    logging.disable(logging.WARNING)
    os.nice(10)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        targets = all_targets(Path(folder))
        if arguments.number is not None:
            data = input_of(targets[arguments.only], arguments.seed, arguments.number)
            print(repr(data[:10_000]), len(data), "bytes")
            targets[arguments.only].read(data)
            return
        chosen = [targets[arguments.only]] if arguments.only else list(targets.values())
        tallies = fuzz(chosen, arguments.inputs, arguments.seed)
    faults = [fault for tally in tallies.values() for fault in tally.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    if arguments.only is None:
        record(arguments.name, arguments.seed, tallies)
    sys.exit(1 if faults else 0)


def fuzz(targets: list[Target], inputs: int, seed: int) -> dict[str, Tally]:
    """Run this number of inputs in total, divided by the targets' shares."""
    each = inputs / sum(target.share for target in targets)
    tallies = {}
    for target in targets:
        count = max(len(target.samples), int(each * target.share) + 1)
        tallies[target.name] = tally = run(target, count, seed)
        rate, faults = tally.inputs / max(tally.seconds, 1e-9), len(tally.faults)
        print(f"{target.name}: {tally.inputs} inputs, {rate:.0f}/s, {faults} faults", flush=True)
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
    peak = max(tally.peak_bytes for tally in tallies.values())
    result = {
        "inputs": total,
        "targets": len(tallies),
        "faults": sum(len(tally.faults) for tally in tallies.values()),
        "seconds": round(seconds),
        "inputs per second": round(total / seconds),
        "slowest input": f"{tallies[slowest].slowest_seconds:.2f} s ({slowest})",
        "largest memory growth of a target": f"{tallies[grown].grown_bytes >> 20} MiB ({grown})",
        "peak memory of the process, including PyTorch": f"{peak >> 20} MiB",
    }
    limits = {"seconds_of_an_input": SECONDS_MAX, "memory_bytes_of_an_input": MEMORY_BYTES_MAX}
    config = {"seed": seed, "at": time.strftime("%Y-%m-%d"), **limits}
    keep(name, of="fuzz", config=config, raw=each, result=result)


if __name__ == "__main__":
    main()
