"""Loss with and without secure sums: contributions are rounded to fixed point.

Eight equal learners, in virtual time at equal tokens, with paired seeds. Every run is one line of a
file, and recorded runs are not repeated.

    python benchmarks/secure_loss.py --seeds 1 2 3
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from virtual import Cell, Row, compare, gap_percent, mean_of

PLAIN = "single contributions, {rule}"
CELLS = {
    name: Cell(learners=8, sync={"merge": {"rule": rule}}, privacy=privacy)
    for rule in ("rda", "mean")
    for name, privacy in (
        (PLAIN.format(rule=rule), dict[str, Any]()),
        (f"secure sums, 24 bits, {rule}", {"secure_sums": True}),
        (f"secure sums, 16 bits, {rule}", {"secure_sums": True, "bits": 16}),
    )
}


def measure(cell: Cell, seed: int, steps: int) -> Row:
    return replace(cell, steps=steps).measure(seed)


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Return the losses, and the paired difference from single contributions."""
    own, plain = rows[name], PLAIN.format(rule=name.rpartition(" ")[2])
    found: Row = {"loss": mean_of(own, "loss"), "losses": [row["loss"] for row in own]}
    if plain in rows and plain != name:
        found["gap_percent"] = gap_percent(own, rows[plain])
    return found


if __name__ == "__main__":
    compare("secure_loss", CELLS, measure, summary, steps=600, config={"learners": 8})
