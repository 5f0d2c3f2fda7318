"""Loss against traffic, from the folder that `benchmarks/settings_sweep.py longer` has kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from drawing import BLUE, FAINT, GREEN, GREY, PURPLE, Drawing

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "longer" / "result.json"
SERIES = {
    "adamw: ": ("AdamW inside", BLUE),
    "muon: ": ("Muon inside", PURPLE),
    "muon: mean, ": ("Muon inside, a plain mean", GREEN),
}
"""By how the names of their cells begin, the longest that fits."""

LEFT, TOP, WIDTH, HEIGHT = 70.0, 50.0, 700.0, 270.0
LESS_MAX = 4000.0
TICKS = (1, 10, 48, 186, 723, 2168)
GAP_MAX = 20.0
"""What is further off has no place in the picture."""


def draw() -> str:
    """The picture."""
    result: dict[str, Any] = json.loads(RESULT.read_text())["result"]
    result = {name: row for name, row in result.items() if _shown(name, row)}
    for name, row in result.items():  # not all have all seeds: what counts is the paired gap
        base = result[f"{name.partition(':')[0]}: data-parallel"]["loss"]
        row["loss"] = base * (1 + _gap(row) / 100)
    losses = [row["loss"] for row in result.values()]
    low, high = min(losses) - 0.05, max(losses) + 0.02

    def at(less: float, loss: float) -> tuple[float, float]:
        across = math.log(less) / math.log(LESS_MAX)
        return LEFT + across * WIDTH, TOP + HEIGHT * (high - loss) / (high - low)

    drawing = Drawing(860, 390, "Loss against traffic")
    drawing.line([(LEFT, TOP), (LEFT, TOP + HEIGHT), (LEFT + WIDTH, TOP + HEIGHT)], colour=FAINT)
    for less in TICKS:
        x, y = at(less, low)
        drawing.line([(x, y), (x, y + 5)], colour=FAINT)
        drawing.text(x, y + 22, f"{less:,}x", colour=GREY, anchor="middle")
    words = "times fewer bytes than gradients in fp32 at every step"
    drawing.text(LEFT + WIDTH, TOP + HEIGHT + 46, words, colour=GREY, anchor="end")
    drawing.text(LEFT, TOP - 16, "held-out loss, nats a byte", colour=GREY)
    for tenth in range(math.ceil(20 * low), math.floor(20 * high) + 1):
        _, y = at(1, tenth / 20)
        drawing.text(LEFT - 10, y + 5, f"{tenth / 20:.2f}", colour=GREY, anchor="end")
    for row, (begin, (words, colour)) in enumerate(SERIES.items()):
        ends = LEFT + WIDTH, TOP + HEIGHT - 54 + 20 * row
        drawing.text(*ends, words, colour=colour, anchor="end", bold=True)
        points = sorted(
            (found["less"], found["loss"], name)
            for name, found in result.items()
            if _series(name) == begin or name == f"{begin.partition(':')[0]}: data-parallel"
        )
        drawing.line([at(less, loss) for less, loss, _ in points], colour=colour)
        for less, loss, name in points:
            (x, y), label = at(less, loss), _label(name)
            drawing.dot(x, y, colour)
            below = 18 if begin == "muon: mean, " else -10
            if label != "data-parallel":
                drawing.text(x, y + below, label, colour=colour, size=12, anchor="middle")
            elif begin != "muon: mean, ":  # it is Muon's
                drawing.text(x + 10, y + 22, label, colour=colour, size=12)
    return drawing.svg()


def _shown(name: str, row: dict[str, Any]) -> bool:
    """Not what only tried to make the gap smaller."""
    tried = name.endswith((" / 0", "adamw: mean", "inner rate", "from 0 to 0.9"))
    return _gap(row) < GAP_MAX and not tried and "M = " not in name


def _gap(row: dict[str, Any]) -> float:
    """Per cent over its own data-parallel training."""
    return float(row.get("gap_percent", {"mean": 0.0})["mean"])


def _series(name: str) -> str:
    """How the names of its line begin."""
    return max((each for each in SERIES if f"{name}, ".startswith(each)), key=len)


def _label(name: str) -> str:
    """The codec."""
    codec = f"{name}, "[len(_series(name)) :].removesuffix(", ").partition(", 1 / 0")[0]
    return codec or "bf16"
