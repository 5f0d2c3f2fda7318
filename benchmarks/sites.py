"""Loss with and without relays: a sum is encoded once more on its way to the shard.

Eight equal learners at two sites of four, in virtual time at equal tokens, with paired seeds. Every
run is one line of a file, and recorded runs are not repeated.

    python benchmarks/sites.py --seeds 1 2 3
"""

from __future__ import annotations

from typing import Any

from virtual import Cell, compare_with

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

if __name__ == "__main__":
    compare_with(
        "sites",
        CELLS,
        lambda name: f"{name.partition(',')[0]}, flat",
        steps=600,
        config={"learners": 8},
    )
