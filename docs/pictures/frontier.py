"""Loss against traffic, from the folder that `benchmarks/settings.py longer` has kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from drawing import BLUE, FAINT, GREEN, GREY, Drawing

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "longer" / "result.json"
COLOURS = {"adamw": BLUE, "muon": GREEN}
NAMES = {"adamw": "AdamW inside", "muon": "Muon inside"}
LEFT, TOP, WIDTH, HEIGHT = 70.0, 50.0, 700.0, 270.0
LESS_MAX = 4000.0
TICKS = (1, 10, 48, 186, 723, 2168)
GAP_MAX = 20.0
"""What is further off has no place in the picture."""


def draw() -> str:
    """The picture."""
    result: dict[str, Any] = json.loads(RESULT.read_text())["result"]
    result = {name: row for name, row in result.items() if _gap(row) < GAP_MAX}
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
    for inner, colour in COLOURS.items():
        points = sorted(
            (row["less"], row["loss"], name)
            for name, row in result.items()
            if name.startswith(inner)
        )
        drawing.line([at(less, loss) for less, loss, _ in points], colour=colour)
        for less, loss, name in points:
            (x, y), label = at(less, loss), _label(name)
            drawing.dot(x, y, colour)
            if not label:
                words = f"{NAMES[inner]}: data-parallel"
                above = -34 if inner == "adamw" else 16
                drawing.text(x + 12, y + above, words, colour=colour, bold=True)
            else:
                below = 20 if label in ("int4", "int2, H = 48") else -10
                drawing.text(x, y + below, label, colour=colour, size=12, anchor="middle")
    return drawing.svg()


def _gap(row: dict[str, Any]) -> float:
    """Per cent over its own data-parallel training."""
    return float(row.get("gap_percent", {"mean": 0.0})["mean"])


def _label(name: str) -> str:
    """The codec; nothing for data-parallel."""
    codec = name.partition(": ")[2]
    return "" if codec == "data-parallel" else codec.partition(", 1 / 0")[0]
