"""Loss against traffic: inner optimizers, codecs with and without error feedback, both ways.

Runs in virtual time at equal speeds and equal tokens: the global batch is fixed, each of four
learners takes its share of it. Every run is one line of a file, and one that is there is not run
again, so the command can be stopped at any time, and several may work on different cells.

    python benchmarks/traffic.py --cells 'dp|M=4' --seeds 1 2 3
"""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from typing import Any

import torch
from cells import Row, measured, parser
from evidence import keep
from quality import SEQUENCES, SIZE, interval
from settings import Cell

ESTIMATE = (
    "int8 and int4 within 0.3 % of bf16, int2 up and int4 down within 0.5 % (both as published for "
    "larger models), top-k 2 % far off with 25 rounds. Muon 3 to 5 % better than AdamW, "
    "data-parallel and decoupled; its gap to its own data-parallel 6 %, AdamW's 7.5 %. A run's own "
    "noise is 0.5 %"
)


def _cells() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for inner, rates in {"adamw": (4e-3, 8e-3, 1.6e-2), "muon": (8e-3, 1.6e-2, 3.2e-2)}.items():
        for rate in rates:
            cell = Cell(inner=inner, rate=rate)
            cells[f"dp {inner} {rate:g}"] = replace(cell, plain=True)
            cells[f"M=4 {inner} {rate:g}"] = cell
    wires = {
        "int8": ("int8", "int8", None),
        "int4": ("int4", "int4", None),
        "e3m0": ("fp4-e3m0", "fp4-e3m0", None),
        "int2": ("int2", "int2", None),
        "int2 down int4": ("int2", "int4", None),
        "topk down int4": ("topk", "int4", None),
        "topk down int2": ("topk", "int2", None),
        "topk": ("topk", "topk", None),
        "topk-40 down int4": ("topk-40", "int4", None),
        "topk-160 down int4": ("topk-160", "int4", None),
        "int4 without feedback": ("int4", "int4", False),
        "int2 without feedback": ("int2", "int2", False),
        "topk down int4 without feedback": ("topk", "int4", False),
    }
    for inner, rate in {"adamw": 8e-3, "muon": 1.6e-2}.items():
        for name, (up, down, feedback) in wires.items():
            sync = {"uplink_codec": up, "downlink_codec": down, "error_feedback": feedback}
            cells[f"M=4 {inner} {rate:g} {name}"] = Cell(inner=inner, rate=rate, sync=sync)
    return cells


CELLS = _cells()


def main() -> None:
    options = parser(600, "of every run", "traffic")
    options.add_argument("--cells", default=".", help="a regular expression that finds their names")
    arguments = options.parse_args()
    torch.set_num_threads(1)

    def measure(cell: str, seed: int) -> Row:
        return replace(CELLS[cell], steps=arguments.steps).measure(seed)

    names = [name for name in CELLS if re.search(arguments.cells, name)]
    rows = measured(arguments.kept, names, arguments.seeds, measure)
    folder = keep(
        arguments.name,
        estimate=ESTIMATE,
        config={"steps": arguments.steps, "seeds": arguments.seeds, "sequences": SEQUENCES, **SIZE},
        raw=[row for each in rows.values() for row in each],
        result={name: summary(name, rows) for name in rows},
        not_measured="larger models, longer runs at more than one seed, other texts",
    )
    print(folder)


def summary(name: str, rows: dict[str, list[Row]]) -> dict[str, Any]:
    """Mean loss, and the paired gaps to data-parallel and to the same system in bf16."""
    cell, losses = CELLS[name], [row["loss"] for row in rows[name]]
    found: dict[str, Any] = {"less": cell.less, "loss": statistics.mean(losses)}
    of = f"{cell.inner} {cell.rate:g}"
    for what, other in {"data-parallel": f"dp {of}", "bf16": f"M=4 {of}"}.items():
        if other in rows and other != name:
            pairs = zip(losses, rows[other], strict=True)
            gaps = [100 * (loss / row["loss"] - 1) for loss, row in pairs]
            found[f"gap_to_{what}_percent"] = interval(gaps)
    return found


if __name__ == "__main__":
    main()
