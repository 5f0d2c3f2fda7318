"""The processes of a run, and the two kinds of connection between them."""

from __future__ import annotations

from drawing import BLUE, GREEN, GREY, ORANGE, PALE_GREEN, Drawing


def draw() -> str:
    """The picture."""
    drawing = Drawing(860, 330, "Processes and planes")
    _learner(drawing)
    _shard(drawing, 40, "syncer shard 0", "coordinator: joins, begin, end")
    _shard(drawing, 188, "syncer shard 1", "its own clock, its own fragments")
    for y in (88, 236):
        drawing.line([(300, 130 if y == 88 else 196), (556, y)], colour=ORANGE, arrow=True)
        drawing.line(
            [(300, 152 if y == 88 else 218), (556, y + 26)], colour=BLUE, arrow=True, width=4
        )
    drawing.text(330, 72, "control: WebSocket", colour=ORANGE)
    drawing.text(330, 90, "a few hundred bytes a step", colour=GREY, size=13)
    drawing.text(330, 276, "data: HTTP PUT and GET", colour=BLUE)
    drawing.text(330, 294, "fragments, striped over connections", colour=GREY, size=13)
    return drawing.svg()


def _learner(drawing: Drawing) -> None:
    drawing.box(24, 64, 276, 214, radius=7)
    drawing.text(40, 90, "learner: your training process", bold=True)
    drawing.box(40, 106, 244, 58, fill="#ffffff")
    drawing.text(54, 130, "training loop")
    drawing.text(54, 150, "step(): apply, snapshot, report", colour=GREY, size=13)
    drawing.box(40, 182, 244, 78, fill="#ffffff")
    drawing.text(54, 206, "background thread")
    drawing.text(54, 226, "encodes, sends, fetches, decodes;", colour=GREY, size=13)
    drawing.text(54, 244, "only dials out, opens no port", colour=GREY, size=13)


def _shard(drawing: Drawing, top: float, title: str, text: str) -> None:
    drawing.box(560, top, 276, 102, stroke=GREEN, fill=PALE_GREEN, radius=7)
    drawing.text(576, top + 26, title, bold=True)
    drawing.text(576, top + 48, text, colour=GREY, size=13)
    drawing.text(576, top + 68, "protocol core: decides", colour=GREY, size=13)
    drawing.text(576, top + 88, "worker: verifies, merges, publishes", colour=GREY, size=13)
