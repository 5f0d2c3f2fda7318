"""Loss with and without relays: a sum is encoded once more on its way to the shard.

Eight equal learners at two sites of four, in virtual time at equal tokens, with paired seeds. Every
run is one line of a file, and recorded runs are not repeated.

    python benchmarks/sites.py --seeds 1 2 3
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from virtual import Cell, Row, compare, gap_percent, mean_of

SITES: tuple[dict[str, Any], ...] = (
    {"name": "site-a", "learners": [0, 1, 2, 3]},
    {"name": "site-b", "learners": [4, 5, 6, 7]},
)
CODECS = ("fp32", "bf16", "int4")
CELLS = {
    f"{codec}, {name}": Cell(
        learners=8,
        sites=sites,
        sync={"codec": {"uplink": codec, "downlink": codec}},
    )
    for codec in CODECS
    for name, sites in (("flat", ()), ("two sites", SITES))
}


def measure(cell: Cell, seed: int, steps: int) -> Row:
    return replace(cell, steps=steps).measure(seed)


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Return the losses, and with relays the paired difference from the flat run."""
    own, flat = rows[name], f"{name.partition(',')[0]}, flat"
    found: Row = {"loss": mean_of(own, "loss"), "losses": [row["loss"] for row in own]}
    if flat in rows and flat != name:
        found["gap_percent"] = gap_percent(own, rows[flat])
    return found


if __name__ == "__main__":
    compare("sites", CELLS, measure, summary, steps=600, config={"learners": 8})
