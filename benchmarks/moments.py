"""Loss with and without merged moments of the inner optimizer (`[sync.moments]`).

Four learners of equal speed, in virtual time at equal tokens, with paired seeds. Every run is one
line of a file, and recorded runs are not repeated.

    python benchmarks/moments.py --seeds 1 2 3
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from virtual import Cell, Row, compare, gap_percent, mean_of

MUON = {"merge": {"rule": "mean"}}
SETTINGS = {
    "muon, H = 24": Cell(inner="muon", sync=MUON),
    "muon, H = 8, carry, 1.0/0": Cell(
        inner="muon",
        sync={**MUON, "sync_every": 8, "apply": {"alignment": "carry"}},
        outer={"optimizer": "sgd", "lr": 1.0},
    ),
    "adamw, H = 24": Cell(),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "local moments": {},
    "merged": {"moments": {}},
    "every 4th": {"moments": {"every": 4}},
}
CELLS = {
    f"{setting}, {variant}": replace(cell, sync={**cell.sync, **more})
    for setting, cell in SETTINGS.items()
    for variant, more in VARIANTS.items()
}


def measure(cell: Cell, seed: int, steps: int) -> Row:
    return replace(cell, steps=steps).measure(seed)


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Return the losses, and the paired difference from moments that stay local."""
    own, local = rows[name], f"{name.rpartition(', ')[0]}, local moments"
    found: Row = {"loss": mean_of(own, "loss"), "losses": [row["loss"] for row in own]}
    if local in rows and local != name:
        found["gap_percent"] = gap_percent(own, rows[local])
    return found


if __name__ == "__main__":
    compare("moments", CELLS, measure, summary, steps=600, config={"learners": 4})
