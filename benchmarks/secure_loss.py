"""Loss with and without secure sums: contributions are rounded to fixed point.

Eight equal learners, in virtual time at equal tokens, with paired seeds. Every run is one line of a
file, and recorded runs are not repeated.

    python benchmarks/secure_loss.py --seeds 1 2 3
"""

from __future__ import annotations

from typing import Any

from virtual import Cell, compare_with

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

if __name__ == "__main__":
    compare_with(
        "secure_loss",
        CELLS,
        lambda name: PLAIN.format(rule=name.rpartition(" ")[2]),
        steps=600,
        config={"learners": 8},
    )
