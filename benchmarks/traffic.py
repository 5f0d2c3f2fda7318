"""Loss against traffic: inner optimizers, and codecs with and without error feedback.

Runs are in virtual time at equal speeds and equal tokens. The global batch is fixed, and each of
four learners takes its share. Every run is one line of a file, and recorded runs are not repeated.
So the command can be stopped at any time, and several can work on different cells.

    python benchmarks/traffic.py --cells 'dp|M=4' --seeds 1 2 3
"""

from __future__ import annotations

from dataclasses import replace

from virtual import RATES, SEQUENCES, Cell, Row, compare, gap_percent, mean_of


def _cells() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for inner, rates in {"adamw": (4e-3, 8e-3, 1.6e-2), "muon": (8e-3, 1.6e-2, 3.2e-2)}.items():
        for rate in rates:
            cell = Cell(inner=inner, rate=rate)
            cells[f"dp {inner} {rate:g}"] = replace(cell, plain=True)
            cells[f"M=4 {inner} {rate:g}"] = cell
    wires = {
        "int8": ("int8", "int8", True),
        "int4": ("int4", "int4", True),
        "e3m0": ("fp4-e3m0", "fp4-e3m0", True),
        "int2": ("int2", "int2", True),
        "int2 down int4": ("int2", "int4", True),
        "topk down int4": ("topk", "int4", True),
        "topk down int2": ("topk", "int2", True),
        "topk": ("topk", "topk", True),
        "topk-40 down int4": ("topk-40", "int4", True),
        "topk-160 down int4": ("topk-160", "int4", True),
        "int4 without feedback": ("int4", "int4", False),
        "int2 without feedback": ("int2", "int2", False),
        "topk down int4 without feedback": ("topk", "int4", False),
    }
    for inner, rate in RATES.items():
        for name, (up, down, feedback) in wires.items():
            without = {} if feedback else {"error_feedback": False}
            sync = {"codec": {"uplink": up, "downlink": down, **without}}
            cells[f"M=4 {inner} {rate:g} {name}"] = Cell(inner=inner, rate=rate, sync=sync)
    return cells


CELLS = _cells()


def measure(cell: Cell, seed: int, steps: int) -> Row:
    return replace(cell, steps=steps).measure(seed)


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Return the mean loss, and the paired gaps to data-parallel and to the same system in bf16."""
    cell = CELLS[name]
    found: Row = {"less": cell.less, "loss": mean_of(rows[name], "loss")}
    of = f"{cell.inner} {cell.rate:g}"
    for what, other in {"data-parallel": f"dp {of}", "bf16": f"M=4 {of}"}.items():
        if other in rows and other != name:
            found[f"gap_to_{what}_percent"] = gap_percent(rows[name], rows[other])
    return found


if __name__ == "__main__":
    compare("traffic", CELLS, measure, summary, steps=600, config={"sequences": SEQUENCES})
