"""A shard's clock: the K-th largest run step of the live learners, by the protocol core."""

from __future__ import annotations

from collections.abc import Callable

from drawing import BLUE, FAINT, GREEN, GREY, ORANGE, PURPLE, Drawing, Point

from decoupled_diloco.protocol.clock import kth_largest

SPEEDS = {"learner 0": 1.0, "learner 1": 0.8, "learner 2": 0.35}
"""Steps in a unit of time."""

CLOCK = "#aceebb"
COLOURS = {"learner 0": BLUE, "learner 1": PURPLE, "learner 2": ORANGE}
LATEST = 24
LEFT, TOP, WIDTH, HEIGHT = 60.0, 40.0, 500.0, 230.0


def draw() -> str:
    """The picture."""
    drawing = Drawing(860, 330, "The clock of a shard")
    drawing.line([(LEFT, TOP), (LEFT, TOP + HEIGHT), (LEFT + WIDTH, TOP + HEIGHT)], colour=FAINT)
    drawing.text(LEFT + WIDTH, TOP + HEIGHT + 22, "time", colour=GREY, anchor="end")
    drawing.text(LEFT - 10, TOP + 4, "step", colour=GREY, anchor="end")
    for quorum in (1, 2):
        drawing.line(_stairs(lambda t, k=quorum: _clock(t, k)), colour=CLOCK, width=10)
    for name, speed in SPEEDS.items():
        drawing.line(_stairs(lambda t, v=speed: int(t * v)), colour=COLOURS[name], width=2)
        x, y = _at(LATEST, int(LATEST * speed))
        drawing.text(x + 10, y + 5, name, colour=COLOURS[name])
    for quorum in (1, 2):
        x, y = _at(LATEST, _clock(LATEST, quorum))
        drawing.text(x + 84, y + 5, f"and the clock with K = {quorum}", colour=GREEN, bold=True)
    drawing.text(
        LEFT, 314, "Learner 2 is slow: it holds up no clock but that of K = 3.", colour=GREY
    )
    return drawing.svg()


def _stairs(step_at: Callable[[float], int]) -> list[Point]:
    """The corners of a count that rises by whole steps."""
    corners = [_at(0, step_at(0))]
    for time, before in ((n / 20, (n - 1) / 20) for n in range(1, LATEST * 20 + 1)):
        if step_at(time) != step_at(before):
            corners += [_at(time, step_at(before)), _at(time, step_at(time))]
    return [*corners, _at(LATEST, step_at(LATEST))]


def _clock(time: float, quorum: int) -> int:
    return kth_largest([int(time * speed) for speed in SPEEDS.values()], quorum) or 0


def _at(time: float, step: int) -> Point:
    return LEFT + time / LATEST * WIDTH, TOP + HEIGHT * (1 - step / LATEST)
