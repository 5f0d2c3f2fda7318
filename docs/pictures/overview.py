"""The system at a glance: every learner exchanges fragments with every shard, and none waits."""

from __future__ import annotations

from drawing import BLUE, GREEN, GREY, ORANGE, PALE_BLUE, PALE_GREEN, PALE_ORANGE, Drawing

LEARNERS = (
    "learner 0: one GPU, its own steps",
    "learner 1: another cloud, faster",
    "learner 2: gone; the others go on",
    "learner 3: far away, half the speed",
)
GONE = 2
SHARDS = ("syncer shard 0 (CPU)", "syncer shard 1 (CPU)")
FRAGMENTS = ("merges fragments 0, 2, 4 …", "merges fragments 1, 3, 5 …")

LEARNER_RIGHT, SHARD_LEFT = 300.0, 570.0


def draw() -> str:
    """The picture."""
    drawing = Drawing(860, 320, "Every learner exchanges fragments with every shard")
    up, down = "up: what training changed, one fragment at a time", "down: the merged fragments"
    drawing.text(430, 28, up, colour=GREY, size=13, anchor="middle")
    drawing.text(
        430, 306, f"{down}; no learner waits for them", colour=GREY, size=13, anchor="middle"
    )
    for learner in range(len(LEARNERS)):
        for shard in range(len(SHARDS)):
            _link(drawing, learner, shard)
    for learner, words in enumerate(LEARNERS):
        _learner(drawing, learner, words)
    for shard, words in enumerate(SHARDS):
        _shard(drawing, shard, words)
    return drawing.svg()


def _learner(drawing: Drawing, number: int, words: str) -> None:
    stroke, fill = (ORANGE, PALE_ORANGE) if number == GONE else (BLUE, PALE_BLUE)
    y = _learner_y(number)
    drawing.box(24, y - 22, LEARNER_RIGHT - 24, 44, stroke=stroke, fill=fill, radius=7)
    drawing.text(42, y + 5, words)


def _shard(drawing: Drawing, number: int, words: str) -> None:
    y = _shard_y(number)
    drawing.box(SHARD_LEFT, y - 34, 266, 68, stroke=GREEN, fill=PALE_GREEN, radius=7)
    drawing.text(SHARD_LEFT + 18, y - 6, words, bold=True)
    drawing.text(SHARD_LEFT + 18, y + 16, FRAGMENTS[number], colour=GREY, size=13)


def _link(drawing: Drawing, learner: int, shard: int) -> None:
    """A line with an arrow's head at both ends."""
    begin = (LEARNER_RIGHT + 4, _learner_y(learner) + 8 * shard - 4)
    end = (SHARD_LEFT - 4, _shard_y(shard) + 12 * learner - 18)
    middle = ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2)
    for point in (begin, end):
        drawing.line([middle, point], arrow=True, dashed=learner == GONE)


def _learner_y(number: int) -> float:
    return 70 + 60 * number


def _shard_y(number: int) -> float:
    return 104 + 112 * number
