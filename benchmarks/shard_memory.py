"""Peak memory of a shard process, as counted by the kernel.

Runs have two learners and one shard, with models of different sizes. The difference between two
runs is the cost per parameter, and the rest is the fixed cost of a process.

    python benchmarks/shard_memory.py
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from bench_runs import carry_out
from evidence import keep, options, spread

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun

FRAGMENTS, LEARNERS, LAYERS = 24, 2, 4


def measured(width: int, steps: int) -> tuple[float, float]:
    """Return the model's parameters, and the peak resident memory of its shard in bytes."""
    largest = [0.0]

    def watch(run: LocalRun) -> Iterator[None]:
        while True:
            process = run.supervisor.children["shard-0"].process
            if process is not None:
                with suppress(OSError):  # the process has ended
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    largest.extend(1024.0 * int(n) for n in re.findall(r"VmHWM:\s+(\d+)", status))
            yield

    with tempfile.TemporaryDirectory() as name:
        outcome = carry_out(config_of(Path(name) / "run", width, steps), watch)
        assert outcome is not None
        assert outcome.weights is not None
        parameters = outcome.weights.stat().st_size / 4
    print(f"{parameters / 1e6:.1f} M parameters: {max(largest) / 1e6:.0f} MB", flush=True)
    return parameters, max(largest)


def config_of(folder: Path, width: int, steps: int) -> RunConfig:
    small = {"heads": 4, "context": 16, "batch_size": 1, "corpus_bytes_max": 200_000}
    return RunConfig(
        run={
            "name": f"width-{width}",
            "folder": folder,
            "learners": LEARNERS,
            "max_steps": steps,
            "evaluator": False,
            "fork_server": False,  # a forked shard would also count the pages that it shares
        },
        sync={"fragments": FRAGMENTS, "sync_every": FRAGMENTS, "quorum": LEARNERS},
        syncer={"shards": 1, "port": 0},
        learner={"checkpoint_interval_seconds": 0.0},
        workload={"name": "gpt", "options": {"width": width, "layers": LAYERS, **small}},
    )


def main() -> None:
    arguments = options(widths=[64, 384, 640], steps=60, repetitions=1)
    raw = [
        [measured(width, arguments.steps) for width in arguments.widths]
        for _ in range(arguments.repetitions)
    ]
    result = {
        f"{n / 1e6:.1f} M parameters: peak MB": spread(row[i][1] / 1e6 for row in raw)
        for i, (n, _) in enumerate(raw[0])
    }
    for i, ((small, _), (large, _)) in enumerate(pairwise(raw[0])):
        name = f"from {small / 1e6:.1f} to {large / 1e6:.1f} M: bytes per parameter"
        result[name] = spread((row[i + 1][1] - row[i][1]) / (large - small) for row in raw)
    fixed = {"layers": LAYERS, "fragments": FRAGMENTS, "learners": LEARNERS}
    keep("shard_memory", config={**vars(arguments), **fixed}, raw=raw, result=result)


if __name__ == "__main__":
    main()
