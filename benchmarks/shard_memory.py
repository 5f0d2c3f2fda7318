"""What memory a shard really needs: the largest of real shard processes, as the kernel counts it.

Runs of two learners and one shard, with models of different sizes. The difference between two of
them is what a parameter costs, and the rest is what a process needs anyway.

    python benchmarks/shard_memory.py
"""

from __future__ import annotations

import argparse
import re
import tempfile
from itertools import pairwise
from pathlib import Path

from evidence import keep, spread

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.local import LocalRun

ESTIMATE = (
    "16 bytes a parameter are held (master, published copy, momentum, two bf16 differences), and "
    "during a merge some 24 of its fragment, one in 24: 17 to 19 bytes a parameter, and 300 to 400 "
    "MB for Python and PyTorch"
)
FRAGMENTS = 24
LEARNERS = 2


def measured(width: int, layers: int, steps: int) -> tuple[float, float]:
    """One run: the model's parameters, and the largest resident memory of its shard in bytes."""
    largest = 0.0
    with tempfile.TemporaryDirectory() as name:
        run = LocalRun(config_of(Path(name) / "run", width, layers, steps))

        def look() -> None:
            nonlocal largest
            process = run.supervisor.children["shard-0"].process
            if process is not None:
                largest = max(largest, most_resident(process.pid))

        try:
            run.start()
            outcome = run.wait(look)
        finally:
            run.close()
        assert outcome.finished, outcome.reason
        assert outcome.weights is not None
        parameters = outcome.weights.stat().st_size / 4
    print(f"{parameters / 1e6:.1f} M parameters: {largest / 1e6:.0f} MB", flush=True)
    return parameters, largest


def config_of(folder: Path, width: int, layers: int, steps: int) -> RunConfig:
    return RunConfig(
        run={
            "name": f"width-{width}",
            "folder": str(folder),
            "learners": LEARNERS,
            "budget_steps": steps,
            "evaluator": False,
            "fork_server": False,  # a forked shard would count pages that it shares
        },
        sync={"fragments": FRAGMENTS, "period": FRAGMENTS, "quorum": LEARNERS},
        syncer={"shards": 1, "port": 0},
        learner={"checkpoint_every_seconds": 0.0},
        workload={
            "name": "gpt",
            "options": {
                "width": width,
                "layers": layers,
                "heads": 4,
                "context": 16,
                "batch_size": 1,
                "corpus_bytes_max": 200_000,
            },
        },
    )


def most_resident(pid: int) -> float:
    try:
        told = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:  # it has ended
        return 0.0
    return 1024.0 * int(told[1]) if told else 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 384, 640])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=1)
    arguments = parser.parse_args()
    raw = [
        [measured(width, 4, arguments.steps) for width in arguments.widths]
        for _ in range(arguments.repetitions)
    ]
    result = {
        f"{n / 1e6:.1f} M parameters: MB at most": spread([row[i][1] / 1e6 for row in raw])
        for i, (n, _) in enumerate(raw[0])
    }
    for i, ((small, _), (large, _)) in enumerate(pairwise(raw[0])):
        name = f"from {small / 1e6:.1f} to {large / 1e6:.1f} M: bytes a parameter"
        result[name] = spread([(row[i + 1][1] - row[i][1]) / (large - small) for row in raw])
    keep(
        "shard_memory",
        estimate=ESTIMATE,
        config={**vars(arguments), "layers": 4, "fragments": FRAGMENTS, "learners": LEARNERS},
        raw=raw,
        result=result,
        not_measured="many learners, whose bodies on their way take more; slow links, on which "
        "more bodies are on their way at a time; models beyond 20 M parameters",
    )


if __name__ == "__main__":
    main()
