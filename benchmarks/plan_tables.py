"""`ddiloco plan` on the published tables and on the paper's four regions.

It creates `results/plan`: every listed cell of the published tables beside the result of the method
"published", the headline case (12B over four regions at 2 to 5 Gbit/s), and their plots.

    python benchmarks/plan_tables.py
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from evidence import RESULTS, keep, options

from decoupled_diloco_plan.bandwidth import compare, published_tables
from decoupled_diloco_plan.bandwidth.case import Model
from decoupled_diloco_plan.bandwidth.network import Link, Network, equal_sites
from decoupled_diloco_plan.bandwidth.plan_options import PlanOptions
from decoupled_diloco_plan.bandwidth.plots import save_curves
from decoupled_diloco_plan.bandwidth.published_tables import utilization
from decoupled_diloco_plan.bandwidth.search import propose

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from unit.plan.published_cells import CELLS, MODELS

PARAMS, LAYERS, REGIONS, LATENCY = 12e9, 51, 4, 0.03
GBIT = (2.0, 3.0, 5.0)
AIM = PlanOptions(utilization=0.95, up="bf16", down="bf16")
STEP_SECONDS = (1.0, 2.0, 4.0)
ASSUMED = (
    "12B parameters in 51 layers. Four regions have one learner each, and communication within a "
    "region costs no time. Each region has a separate link with the same rate up and down and 30 "
    "ms to the core of the network, and payloads fill 88 % of it. Data-parallel reduces bf16 "
    "gradients in a ring over the regions in each step, overlapped with the backward pass as far "
    "as possible. Decoupled sends bf16 in both directions, its shards are divided among the "
    "regions, and `propose` chooses H and τ for 95 %. The step time is not published, so it is "
    "varied"
)


def grid_index(gbit: float) -> int:
    grid = published_tables.GRID_GBIT
    return min(range(len(grid)), key=lambda i: abs(math.log(grid[i] / gbit)))


def cells() -> list[dict[str, Any]]:
    found = []
    for (name, system, period), aims in CELLS.items():
        rows = published_tables.rows(Model(*MODELS[name]), period, [system])
        for row, aim in zip(rows, aims, strict=True):
            assert row.gbit_per_second is not None
            found.append(
                {
                    "model": name,
                    "system": system,
                    "period": row.period,
                    "utilization": row.utilization,
                    "predicted": row.gbit_per_second,
                    "published": aim,
                    "grid_steps_off": grid_index(row.gbit_per_second) - grid_index(aim),
                }
            )
    return found


def region_links(gbit: float) -> Network:
    rate = gbit * 1e9 / 8
    return Network(equal_sites(REGIONS, REGIONS, Link(rate, rate, LATENCY)))


def headline() -> list[dict[str, Any]]:
    found = []
    for step in STEP_SECONDS:
        for gbit in GBIT:
            proposal = propose(Model(PARAMS, LAYERS, step), region_links(gbit), AIM)
            by_name = {s.system: s for s in compare.compare_systems(proposal.case)}
            single, ours = by_name["data-parallel"], by_name[compare.DECOUPLED]
            o = proposal.case.options
            found.append(
                {
                    "step_seconds": step,
                    "gbit": gbit,
                    "data_parallel": single.utilization,
                    "diloco": by_name["diloco"].utilization,
                    "streaming": by_name["streaming"].utilization,
                    "decoupled": ours.utilization,
                    "period": o.period,
                    "overlap": o.overlap,
                    "discarded": proposal.prediction.discarded,
                    "times_faster": single.step_seconds / ours.step_seconds,
                    "reached": proposal.reached,
                }
            )
    return found


def draw(folder: Path) -> None:
    """Draw the 10B model's rows as lines, and the headline's systems."""
    params, layers, step = MODELS["10B"]
    lines = {}
    for name, system in published_tables.SYSTEMS.items():
        schedule = published_tables.schedule_of(system, layers, 100 if system.periodic else 1)
        volume = published_tables.VOLUMES["streaming-diloco"]
        each = volume * params * system.bits / layers / 1e9
        lines[name] = [
            (gbit * 1e9 / 8, utilization(schedule, step, each / gbit))
            for gbit in published_tables.GRID_GBIT
        ]
    title = "The published tables' simulation: 10B, a step of 0.8 s, H=100"
    save_curves(lines, folder / "published.png", title=title)
    found = propose(Model(PARAMS, LAYERS, 2.0), region_links(3.0), AIM)
    save_curves(
        compare.curves(found.case),
        folder / "headline.png",
        title=f"12B over four regions, a step of 2 s, H={found.case.options.period}",
        given=3e9 / 8,
        error_of=compare.DECOUPLED,
    )


def main() -> None:
    options()
    rebuilt, regions = cells(), headline()
    exact = sum(cell["grid_steps_off"] == 0 for cell in rebuilt)
    near = sum(abs(cell["grid_steps_off"]) <= 1 for cell in rebuilt)
    keep(
        "plan",
        config={"volumes": published_tables.VOLUMES, "assumed": ASSUMED},
        raw={"cells": rebuilt},
        result={
            "cells": len(rebuilt),
            "exact": exact,
            "within a grid step": near,
            "rows": rebuilt,
            "headline": regions,
            "assumed": ASSUMED,
        },
    )
    draw(RESULTS / "plan")
    print(f"{exact} of {len(rebuilt)} cells exact, {near} within a grid step")
    for row in regions:
        print(row)


if __name__ == "__main__":
    main()
