"""Loss at equal tokens: Decoupled DiLoCo, Streaming DiLoCo, data-parallel, one learner alone.

The global batch B is fixed, and each of M learners takes B/M. All take the same number of steps, in
virtual time at equal speeds, with paired seeds. First the inner learning rate is tuned for each
system on a seed that is not used afterwards.

    python benchmarks/quality.py --steps 600 --seeds 1 2 3
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
from evidence import keep, options
from virtual import LEARNERS, SEQUENCES, SIZE, Cell, gap_percent

from decoupled_diloco.config.toml_files import RECIPES, read_run_tables

STREAMING = read_run_tables(RECIPES.files()["streaming-diloco"])
SYNCHRONOUS = {
    **{key: STREAMING["sync"][key] for key in ("grace_margin", "wait", "apply", "merge")},
    "quorum": LEARNERS,
}
STREAMING_OUTER = {key: STREAMING["outer"][key] for key in ("lr", "momentum")}
DATA_PARALLEL, DECOUPLED = "data-parallel (= one learner at batch B)", "decoupled M=4"
SYSTEMS = {
    DATA_PARALLEL: Cell(plain=True),
    DECOUPLED: Cell(),
    "decoupled M=4, mean": Cell(sync={"merge": {"rule": "mean"}}),
    "streaming M=4, outer 0.4/0.9": Cell(sync=SYNCHRONOUS, outer=STREAMING_OUTER),
    "streaming M=4, outer 0.7/0.5": Cell(sync=SYNCHRONOUS),
    "decoupled M=1 at batch B": Cell(learners=1),
    "one learner alone at batch B/M": Cell(plain=True, parts=1),
}
RATE_OF = {"decoupled M=4, mean": DECOUPLED, "decoupled M=1 at batch B": DATA_PARALLEL}
"""Systems that use the tuned inner rate of another system."""


def main() -> None:
    arguments = options(steps=600, seeds=[1, 2, 3], rates=[4e-3, 8e-3, 1.6e-2], name="quality")
    torch.set_num_threads(1)
    raw: list[dict[str, Any]] = []

    def measure(name: str, rate: float, seed: int) -> dict[str, Any]:
        row = replace(SYSTEMS[name], rate=rate, steps=arguments.steps).measure(seed)
        found = {"loss": row["loss"], "seconds": row["seconds"]}
        raw.append({"system": name, "rate": rate, "seed": seed, **found})
        print(raw[-1], flush=True)
        return row

    def tuned(name: str) -> float:
        return min(arguments.rates, key=lambda rate: measure(name, rate, 0)["loss"])

    best = {name: tuned(name) for name in SYSTEMS if name not in RATE_OF}
    best |= {name: best[other] for name, other in RATE_OF.items()}
    rows = {n: [measure(n, best[n], seed) for seed in arguments.seeds] for n in SYSTEMS}
    result = {
        name: {
            "inner_rate": best[name],
            "loss": [row["loss"] for row in own],
            "mean_loss": statistics.mean(row["loss"] for row in own),
            "gap_to_data_parallel_percent": gap_percent(own, rows[DATA_PARALLEL]),
            "gap_of_decoupled_percent": gap_percent(rows[DECOUPLED], own),
        }
        for name, own in rows.items()
    }
    config = {**vars(arguments), **SIZE, "sequences": SEQUENCES, "learners": LEARNERS}
    print(keep(arguments.name, of="quality", config=config, raw=raw, result=result))


if __name__ == "__main__":
    main()
