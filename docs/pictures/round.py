"""One round of one fragment, in time: which learners take part, and that none of them waits."""

from __future__ import annotations

from drawing import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    ORANGE,
    PALE_GREEN,
    PALE_ORANGE,
    Drawing,
)

LANES = {"learner 0": 74, "learner 1": 144, "learner 2": 214}
STEPS = {"learner 0": (120, 82), "learner 1": (152, 88), "learner 2": (-20, 210)}
"""Where a learner's first step on the picture begins, and how long each takes."""

TICK, CLOSED, MERGED = 284, 366, 486
SHARD = 320
LEFT, RIGHT = 112, 836


def draw() -> str:
    """The picture."""
    drawing = Drawing(860, 400, "One round of one fragment")
    drawing.box(TICK, 46, CLOSED - TICK, 300, stroke="none", fill=PALE_ORANGE, radius=0)
    drawing.text((TICK + CLOSED) / 2, 36, "grace window", colour=ORANGE, anchor="middle", size=13)
    for name, y in LANES.items():
        _steps(drawing, name, y)
    _shard(drawing)
    _up(drawing, "learner 0", TICK, 398)
    _up(drawing, "learner 1", 328, 430)
    _down(drawing)
    drawing.text(
        24,
        384,
        "Steps follow each other without a gap: no learner waits for the round.",
        colour=GREY,
    )
    return drawing.svg()


def _steps(drawing: Drawing, name: str, y: float) -> None:
    drawing.text(24, y + 5, name, bold=True)
    first, length = STEPS[name]
    for begin in range(first, RIGHT, length):
        start, end = max(begin, LEFT), min(begin + length, RIGHT)
        drawing.box(start + 1, y - 13, end - start - 2, 26)
        if end - start > 70:
            drawing.text((start + end) / 2, y + 5, "step", colour=BLUE, anchor="middle", size=13)


def _shard(drawing: Drawing) -> None:
    drawing.text(24, SHARD + 5, "shard", bold=True)
    drawing.line([(96, SHARD), (RIGHT, SHARD)], colour=FAINT)
    drawing.dot(TICK, SHARD, ORANGE, 5)
    drawing.text(TICK - 8, SHARD - 8, "tick: the round opens", anchor="end", size=13)
    drawing.box(434, SHARD - 14, MERGED - 434, 28, stroke=GREEN, fill=PALE_GREEN)
    drawing.text(460, SHARD + 5, "merge", colour=GREEN, anchor="middle", size=13)
    drawing.text(MERGED + 8, SHARD + 22, "published to all learners", colour=GREEN, size=13)


def _up(drawing: Drawing, name: str, asked: float, arrives: float) -> None:
    """The report that makes a learner qualify, and its fragment on the way to the shard."""
    y = LANES[name] + 14
    drawing.line([(asked, y), (arrives, SHARD - 6)], colour=BLUE, arrow=True, width=1.8)
    drawing.dot(asked, y, BLUE)


def _down(drawing: Drawing) -> None:
    """The merged fragment on its way, and the boundary at which each learner takes it."""
    for name, arrives, applied in (
        ("learner 0", 512, 530),
        ("learner 1", 516, 592),
        ("learner 2", 520, 610),
    ):
        y = LANES[name]
        drawing.line([(MERGED, SHARD - 16), (arrives, y + 14)], colour=GREEN, arrow=True)
        drawing.dot(applied, y, GREEN, 6)
    drawing.text(620, 114, "● applied at the next boundary", colour=GREEN, size=13)
    drawing.text(358, 272, "fragments", colour=BLUE, anchor="end", size=13)
    drawing.text(620, 254, "learner 2 was not asked: its step", colour=GREY, size=13)
    drawing.text(620, 271, "ended after the window had closed", colour=GREY, size=13)
