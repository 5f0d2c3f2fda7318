"""The chart of what every process did when: one lane for each learner and shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from decoupled_diloco.observe.charts import LETTER, Axis, Canvas, Chart, Point, round_numbers
from decoupled_diloco.observe.figures import LANES_MAX, colors_of
from decoupled_diloco.observe.run_data import FaultLog, LearnerLog
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shapes import rows_of, step_rates, time_name, time_unit
from decoupled_diloco.observe.shard_data import ShardLog
from decoupled_diloco.units import format_duration

ROUNDS_MAX = 1500
"""A shard's lane shows no more rounds than this one by one; of more, as many evenly chosen."""

ENDING_FAULTS = ("kill", "crash", "vanish")
"""Faults that end a process: its lane shows what follows from them."""

TOP = 26.0
"""Above the lanes stand the faults that strike more than one process."""

TIMELINE_KEYS = (
    ("c0", "steps (height: rate)"),
    ("joining", "joining"),
    ("waiting", "waiting"),
    ("down", "down"),
    ("cutoff", "cut off"),
    ("merged", "round merged"),
    ("abandoned", "round given up"),
    ("idle", "nothing to merge"),
)
"""What its colours and patterns mean."""

MARKS = {"cross": "ended", "back": "back", "fault": "other fault"}
"""What its marks mean."""


def timeline_chart(run: RunModel) -> Chart | None:
    """One lane per learner and shard; ``None``: there is neither."""
    learners = list(run.trained.values())[:LANES_MAX]
    members: list[LearnerLog | ShardLog] = [*learners, *list(run.shards.values())[:LANES_MAX]]
    if not members:
        return None
    lane_height = 28.0 if len(members) <= 24 else 16.0
    colors = colors_of(run)
    names = {member.name for member in members}
    fastest = max((1 / m for one in learners if (m := one.step_seconds_median)), default=0.0)
    befalls = [fault for fault in run.faults if fault.target not in names]
    first = TOP if befalls else 10.0
    bottom = first + lane_height * len(members)

    def draw(canvas: Canvas) -> None:
        letters = 10 if canvas.narrow else 15
        left = 10 + LETTER * min(letters, max(len(member.name) for member in members))
        x = Axis(0.0, run.duration or 1.0, left, canvas.width - 12)
        _draw_axis(canvas, x, first, bottom, run)
        _draw_befalls(canvas, x, bottom, befalls)
        for number, member in enumerate(members):
            top = first + lane_height * number + 3
            shown = member.name if len(member.name) <= letters else member.name[: letters - 1] + "…"
            canvas.text(left - 6, top + lane_height / 2 + 1, shown, "lane", "end")
            lane = _Lane(canvas, x, top, lane_height - 6)
            if isinstance(member, LearnerLog):
                _draw_learner(lane, run, member, fastest, colors[member.name])
            else:
                _draw_rounds(lane, member)
            _draw_absences(lane, run, member)

    told = f"{len(run.trained)} learners and {len(run.shards)} shards"
    faults = f"{len(run.outages)} outages" if run.outages else "no outage"
    label = (
        f"What every process did, and when: {told} over {format_duration(run.duration)}, {faults}."
    )
    return Chart(label, lambda _: bottom + 38, draw)


def _draw_axis(canvas: Canvas, x: Axis, top: float, bottom: float, run: RunModel) -> None:
    unit, name = time_unit(run.duration)
    for tick in round_numbers(0.0, run.duration / unit, 4 if canvas.narrow else 9):
        canvas.stroke([(x(tick * unit), top - 4), (x(tick * unit), bottom)], "grid")
        canvas.text(x(tick * unit), bottom + 16, f"{tick:g}", "tick", "middle")
    middle = (x.begin + x.end) / 2
    canvas.text(middle, bottom + 32, f"{time_name(run)} [{name}]", "name", "middle")


class _Lane(NamedTuple):
    canvas: Canvas
    x: Axis
    top: float
    height: float

    def rect(self, begin: float, end: float, css: str, title: str, height: float = 0.0) -> None:
        """From one instant to another, at least a pixel wide."""
        a, b = self.x(begin), self.x(end)
        self.canvas.rect(a, self.top, max(1.0, b - a), height or self.height, css, title)


def _draw_learner(
    lane: _Lane, run: RunModel, learner: LearnerLog, fastest: float, color: str
) -> None:
    """The rate of stepping as a height; what else it did as a pattern."""
    for span in run.account.learners[learner.name].spans:
        if span.doing in ("waiting", "joining"):
            seconds = format_duration(span.end - span.begin)
            lane.rect(span.begin, span.end, span.doing, f"{learner.name} {span.doing} {seconds}")
    bins = max(1, round((lane.x.end - lane.x.begin) / 3))
    edges = [run.duration * number / bins for number in range(bins + 1)]
    base = lane.top + lane.height
    outline: list[Point] = []
    for (begin, end), rate in zip(pairwise(edges), step_rates(learner, edges), strict=True):
        if rate:
            height = lane.height * min(1.0, rate / fastest if fastest else 1.0)
            outline += [(lane.x(begin), base - height), (lane.x(end), base - height)]
        elif outline:
            lane.canvas.area(_corners(outline), base, f"steps {color}")
            outline = []
    lane.canvas.area(_corners(outline), base, f"steps {color}")


def _corners(points: list[Point]) -> list[Point]:
    """The outline without points that lie in the middle of a level stretch."""
    return [
        point
        for index, point in enumerate(points)
        if index in (0, len(points) - 1)
        or abs(points[index - 1][1] - point[1]) > 0.05
        or abs(points[index + 1][1] - point[1]) > 0.05
    ]


def _draw_rounds(lane: _Lane, shard: ShardLog) -> None:
    """A short bar from each round's opening to its end; rounds that overlap lie in rows."""
    rounds = shard.rounds[:: max(1, -(-len(shard.rounds) // ROUNDS_MAX))]
    rows = rows_of(rounds)
    height = lane.height / (max(rows, default=0) + 1)
    for fate in ("idle", "merged", "abandoned"):
        bars = []
        for r, row in zip(rounds, rows, strict=True):
            if r.fate == fate:
                begin, end = lane.x(r.opened_at), lane.x(r.finished_at)
                top = lane.top + row * height + 0.5
                bars.append((begin, top, max(0.6, end - begin), height - 1))
        lane.canvas.rects(bars, fate)


def _draw_absences(lane: _Lane, run: RunModel, member: LearnerLog | ShardLog) -> None:
    """Cuts as thin bars, outages as wide ones, faults that a process lives through as marks."""
    for cut in member.cuts if isinstance(member, LearnerLog) else ():
        until = run.duration if cut.back_at is None else cut.back_at
        lane.rect(cut.cut_at, until, "cutoff", f"{member.name} cut off", 4.0)
    middle = lane.top + lane.height / 2
    for outage in member.outages:
        up_at = outage.restarted_at if outage.restarted_at is not None else run.duration
        title = f"{outage.who} {outage.how} at {outage.down_at:.1f} s"
        lane.rect(outage.down_at, up_at, "down", title)
        draw_mark(lane.canvas, "cross", lane.x(outage.down_at), middle)
        if outage.back_at is not None:
            draw_mark(lane.canvas, "back", lane.x(outage.back_at), middle, "back")
    for fault in run.faults:
        if fault.target == member.name and fault.kind not in ENDING_FAULTS:
            title = f"{fault.kind} {member.name} at {fault.begin:.1f} s"
            draw_mark(lane.canvas, "fault", lane.x(fault.begin), lane.top + 3, title)


def draw_mark(canvas: Canvas, css: str, x: float, y: float, title: str = "") -> None:
    """One of the ``MARKS`` around a point."""
    if css == "cross":
        canvas.stroke([(x - 4, y - 4), (x + 4, y + 4)], css, title)
        canvas.stroke([(x - 4, y + 4), (x + 4, y - 4)], css, title)
    elif css == "back":
        canvas.shape([(x - 3, y - 5), (x + 5, y), (x - 3, y + 5)], css, title)
    else:
        canvas.shape([(x - 5, y - 4), (x + 5, y - 4), (x, y + 4)], css, title)


def _draw_befalls(canvas: Canvas, x: Axis, bottom: float, faults: Sequence[FaultLog]) -> None:
    """Faults of more than one process: from when to when, with what they are above."""
    free_from = -math.inf
    for fault in faults:
        begin, end = x(fault.begin), x(min(fault.end, x.high))
        told = f"{fault.kind} {fault.target}"
        title = f"{told} at {fault.begin:.1f} s"
        if not math.isinf(fault.end):
            canvas.rect(begin, TOP, max(1.0, end - begin), bottom - TOP, "shade", title)
        canvas.stroke([(begin, TOP - 4), (begin, bottom)], "befalls", title)
        width = LETTER * len(told)
        at = min(begin, canvas.width - width)
        if at > free_from:
            canvas.text(at, TOP - 8, told, "tick")
            free_from = at + width + LETTER
