"""Loss with and without faults, at equal tokens, on virtual machines, with paired seeds.

Four learners, one step per second. With faults, each learner is killed about every 100 seconds and
is away for 20 (exponential). A shard is killed about every 200 seconds and is away for 5. Both runs
end after the same number of tokens, so the loss shows the cost of the faults.

    python benchmarks/loss_under_faults.py --seeds 1 2 3
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from evidence import keep, options
from virtual import gap_percent, mean_of

from decoupled_diloco.tape import TapeReader
from decoupled_diloco_lab.simulate.scenario import load_scenario
from decoupled_diloco_lab.simulate.simulation import Simulation

LEARNERS = 4
TOKENS_PER_STEP = 8 * 128

SCENARIO = """
seed = {seed}
run = "quickstart"
set = [
    "faults=",
    "run.learners=4",
    "run.max_steps=",
    "run.max_tokens={tokens}",
    "run.seed={seed}",
    "sync.fragments=24",
    "sync.sync_every=24",
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


def simulate(seed: int, steps: int, faults: str) -> dict[str, Any]:
    tokens = steps * LEARNERS * TOKENS_PER_STEP
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        file, folder = Path(place) / "scenario.toml", Path(place) / "run"
        file.write_text(SCENARIO.format(seed=seed, tokens=tokens, steps=steps) + faults)
        (folder / "tape").mkdir(parents=True)
        simulation = Simulation(load_scenario(file), folder)
        while simulation.advance():
            pass
        simulation.finish()
        virtual_seconds = simulation.system.now
        simulation.close()
        records = list(TapeReader(folder))
    return {
        "seed": seed,
        "faults": sum(r.type == "FaultInjected" for r in records),
        "loss": [r.data["loss"] for r in records if r.type == "Evaluated"][-1],
        "virtual_seconds": virtual_seconds,
        "seconds": time.monotonic() - started,
    }


def main() -> None:
    arguments = options(steps=400, seeds=[1, 2, 3])
    torch.set_num_threads(1)
    raw = []
    for seed in arguments.seeds:
        cases = {"without": "", "with": FAULTS}
        raw.append({case: simulate(seed, arguments.steps, text) for case, text in cases.items()})
        print(json.dumps(raw[-1]), flush=True)
    without, struck = ([pair[case] for pair in raw] for case in ("without", "with"))
    result = {
        "without": mean_of(without, "loss"),
        "with": mean_of(struck, "loss"),
        "gap_percent": gap_percent(struck, without),
        "gaps_percent": [100 * (p["with"]["loss"] / p["without"]["loss"] - 1) for p in raw],
        "faults": [row["faults"] for row in struck],
        "virtual_seconds": {
            "without": mean_of(without, "virtual_seconds"),
            "with": mean_of(struck, "virtual_seconds"),
        },
    }
    config = {"steps": arguments.steps, "scenario": SCENARIO, "faults": FAULTS}
    keep("loss_under_faults", config=config, raw=raw, result=result)


if __name__ == "__main__":
    main()
