"""Character error rate of the speech workload with four learners, and data-parallel.

Runs in virtual time at equal utterances, with paired seeds. The learners have all voices (IID), or
each one has its own voice (non-IID). Every run is one line of a file, and recorded runs are not
repeated.

    python benchmarks/speech_quality.py --seeds 1 2 3
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from settings_sweep import ALONE, FREQUENT
from virtual import LEARNERS, Cell, Row, compare, interval, mean_of

ALL, OWN = "all voices", "own voice"
PARALLEL, MUON_PARALLEL = "data-parallel", "Muon: data-parallel"
OPTIONS: dict[str, Any] = {"eval_utterances": 1000}
RATE = 8e-3

RUNS = {
    PARALLEL: Cell(plain=True),
    "four learners, H = 8": Cell(
        PARALLEL, sync={"fragments": 8, "sync_every": 8}, outer={"momentum": 0.0}
    ),
    MUON_PARALLEL: Cell(plain=True, inner="muon"),
    "Muon: four learners, as the recipe": Cell(
        MUON_PARALLEL,
        inner="muon",
        sync={**FREQUENT, "fragments": 8, "merge": {"rule": "mean"}},
        outer=ALONE,
    ),
}
CELLS = {
    f"{name}, {voices}": replace(
        cell,
        against=f"{cell.against}, {voices}" if cell.against else "",
        workload="speech",
        rate=RATE,
        options={**OPTIONS, "own_voices": voices == OWN},
    )
    for voices in (ALL, OWN)
    for name, cell in RUNS.items()
}


def measure(cell: Cell, seed: int, steps: int) -> Row:
    return replace(cell, steps=steps).measure(seed)


def summary(name: str, rows: dict[str, list[Row]]) -> Row:
    """Return loss and character errors in %, and their difference from data-parallel in points."""
    own, against = rows[name], CELLS[name].against
    percents = [100 * row["character_error_rate"] for row in own]
    found: Row = {"loss": mean_of(own, "loss"), "errors": interval(percents), "each": percents}
    if against in rows:
        others = [100 * row["character_error_rate"] for row in rows[against]]
        found["points"] = interval([a - b for a, b in zip(percents, others, strict=True)])
    return found


if __name__ == "__main__":
    compare(
        "speech",
        CELLS,
        measure,
        summary,
        steps=480,
        config={"learners": LEARNERS, "rate": RATE, **OPTIONS},
        size={},
    )
