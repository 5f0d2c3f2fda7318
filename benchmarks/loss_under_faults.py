"""Loss under faults against loss without, at equal tokens, on virtual machines, paired seeds.

Four learners, a step a second. With faults, each is killed every 100 seconds or so and is away for
20 (exponential), a shard every 200 and is away for 5. Both runs end when the same number of tokens
has been trained; what a fault has cost is then in the loss.

    python benchmarks/loss_under_faults.py --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from evidence import keep
from quality import interval

from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco.simulate.scenario import load_scenario
from decoupled_diloco.simulate.simulation import Simulation

ESTIMATE = (
    "margin named before the run: at most 2 % worse than without faults. Learners are away for a "
    "sixth of the time, so the same tokens take longer and fewer learners are in each round; what "
    "is lost is what a dead learner had trained since its last contribution, and inner optimizer "
    "state"
)
LEARNERS = 4
TOKENS_PER_STEP = 8 * 128

SCENARIO = """
seed = {seed}
run = "quickstart"
set = [
    "faults=",
    "run.learners=4",
    "run.budget_steps=",
    "run.budget_tokens={tokens}",
    "run.seed={seed}",
    "sync.fragments=24",
    "sync.period=24",
    "workload.options.layers=4",
    "workload.options.width=64",
    "workload.options.heads=4",
    "workload.options.context=128",
    "workload.options.batch_size=8",
    "workload.options.total_steps={steps}",
]

[[learners]]
name = "four"
count = 4
variance = 0.05
"""

FAULTS = """
[[random]]
kind = "kill"
targets = ["four"]
mean_seconds_between = 100.0
repair_seconds = 20.0

[[random]]
kind = "kill"
targets = ["shard-0", "shard-1"]
mean_seconds_between = 200.0
repair_seconds = 5.0
repair = "fixed"
"""


def simulate(seed: int, steps: int, *, faults: bool) -> dict[str, Any]:
    tokens = steps * LEARNERS * TOKENS_PER_STEP
    text = SCENARIO.format(seed=seed, tokens=tokens, steps=steps) + (FAULTS if faults else "")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        file, folder = Path(place) / "scenario.toml", Path(place) / "run"
        file.write_text(text)
        (folder / "tape").mkdir(parents=True)
        simulation = Simulation(load_scenario(file), folder)
        while simulation.advance():
            pass
        simulation.finish()
        virtual_seconds = simulation.system.now
        simulation.close()
        records = list(TapeReader(folder))
    losses = [r.data["loss"] for r in records if r.type == "Evaluated"]
    struck = sum(r.type == "FaultInjected" for r in records)
    return {
        "seed": seed,
        "faults": struck,
        "loss": losses[-1],
        "virtual_seconds": virtual_seconds,
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    raw = []
    for seed in arguments.seeds:
        pair = {
            "without": simulate(seed, arguments.steps, faults=False),
            "with": simulate(seed, arguments.steps, faults=True),
        }
        raw.append(pair)
        print(json.dumps(pair), flush=True)
    gaps = [100 * (p["with"]["loss"] / p["without"]["loss"] - 1) for p in raw]
    result = {
        "without": statistics.mean(p["without"]["loss"] for p in raw),
        "with": statistics.mean(p["with"]["loss"] for p in raw),
        "gap_percent": interval(gaps),
        "gaps_percent": gaps,
        "faults": [p["with"]["faults"] for p in raw],
        "virtual_seconds": {
            "without": statistics.mean(p["without"]["virtual_seconds"] for p in raw),
            "with": statistics.mean(p["with"]["virtual_seconds"] for p in raw),
        },
    }
    keep(
        "loss_under_faults",
        estimate=ESTIMATE,
        config={"steps": arguments.steps, "scenario": SCENARIO, "faults": FAULTS},
        raw=raw,
        result=result,
        not_measured="longer runs, larger models, faults that come together",
    )


if __name__ == "__main__":
    main()
