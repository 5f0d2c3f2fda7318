"""What taking a merged fragment does to one parameter: the real code, on a model with one weight.

A learner trains, its fragment is sent at one step, and the merged one comes two steps later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from drawing import BLUE, FAINT, GREEN, GREY, ORANGE, Drawing, Point

from decoupled_diloco.config import OuterSettings, RunConfig, RunSettings, SyncSettings
from decoupled_diloco.config.method import plan_of, public_text, read_public
from decoupled_diloco.learner.exchange import LearnerTensors, Mode
from decoupled_diloco.learner.parameter_store import ModuleStore
from decoupled_diloco.protocol.messages import Asking

STEPS, SENT, TAKEN = 12, 5, 7
HIGHEST = 1.25
MERGED = 0.25
"""The merged value. The other learners went the other way, so it is below what this one had."""

PANELS: tuple[tuple[Mode, str, str], ...] = (
    ("overwrite", "overwrite", "the steps since sending are lost"),
    ("carry", "carry", "the steps since sending are put on top"),
    ("blend", "blend, α = 0.5", "half of its own, half of the merged"),
    ("rebase", "rebase", "it sent nothing; all its steps are kept"),
)


@dataclass(frozen=True)
class Path:
    """The parameter before and after each boundary."""

    points: tuple[Point, ...]
    before: Point
    after: Point


def trained(mode: Mode) -> Path:
    """The way of one weight through `LearnerTensors`."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1, bias=False)
    tensors = _tensors(model)
    points, before, after = [(0.0, model.weight.item())], (0.0, 0.0), (0.0, 0.0)
    for step in range(1, STEPS + 1):
        with torch.no_grad():
            model.weight += 0.14 * (1.15 - model.weight)  # An inner step towards its own optimum.
        points.append((step, model.weight.item()))
        if step == SENT and mode != "rebase":
            tensors.snapshot(0)
            tensors.capture(0, Asking(1, 1))
        if step == TAKEN:
            before = points[-1]
            tensors.stage(0, torch.tensor([MERGED]))
            tensors.apply(0, mode)
            after = (step, model.weight.item())
            points.append(after)
    return Path(tuple(points), before, after)


def _tensors(model: torch.nn.Module) -> LearnerTensors:
    store = ModuleStore(model)
    config = RunConfig(
        run=RunSettings(max_steps=1), sync=SyncSettings(fragments=1), outer=OuterSettings()
    )
    tensors = LearnerTensors(plan_of(store.layout, read_public(public_text(config))), store)
    tensors.stage(0, torch.tensor([0.0]))
    tensors.apply(0, "overwrite")
    return tensors


def draw() -> str:
    """The picture."""
    drawing = Drawing(860, 560, "What taking a merged fragment does")
    for number, (mode, title, text) in enumerate(PANELS):
        left, top = 24 + 418 * (number % 2), 24 + 262 * (number // 2)
        drawing.text(left + 6, top + 14, title, bold=True, size=15)
        drawing.text(left + 6, top + 34, text, colour=GREY, size=13)
        _panel(drawing, trained(mode), left + 34, top + 48, sent=mode != "rebase")
    return drawing.svg()


def _panel(drawing: Drawing, path: Path, left: float, top: float, *, sent: bool) -> None:
    width, height = 340, 158

    def at(point: Point) -> Point:
        return left + point[0] / STEPS * width, top + height * (1 - point[1] / HIGHEST)

    drawing.line([(left, top), (left, top + height), (left + width, top + height)], colour=FAINT)
    drawing.text(left + width, top + height + 18, "steps", colour=GREY, anchor="end", size=13)
    drawing.text(left - 8, top + 12, "θ", colour=GREY, anchor="end", size=13)
    drawing.line([at((0, MERGED)), at((STEPS, MERGED))], colour=GREEN, dashed=True)
    drawing.text(left + width, at((0, MERGED))[1] + 16, "Θ̂ merged", colour=GREEN, anchor="end")
    drawing.line([at(point) for point in path.points], colour=BLUE, width=2.4)
    _mark(drawing, at, path, sent)


def _mark(drawing: Drawing, at: Callable[[Point], Point], path: Path, sent: bool) -> None:
    if sent:
        x, y = at(path.points[SENT])
        drawing.dot(x, y, BLUE)
        drawing.text(x - 8, y - 6, "sent", colour=BLUE, anchor="end", size=13)
    drawing.dot(*at(path.after), ORANGE, 5)
    x, y = at(path.before)
    drawing.text(x + 8, y - 4, "taken", colour=ORANGE, size=13)
