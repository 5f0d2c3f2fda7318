"""Loss with and without merged moments of the inner optimizer (`[sync.moments]`).

Four learners of equal speed, in virtual time at equal tokens, with paired seeds. Every run is one
line of a file, and recorded runs are not repeated.

    python benchmarks/moments.py --seeds 1 2 3
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from virtual import Cell, compare_with

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

if __name__ == "__main__":
    compare_with(
        "moments",
        CELLS,
        lambda name: f"{name.rpartition(', ')[0]}, local moments",
        steps=600,
        config={"learners": 4},
    )
