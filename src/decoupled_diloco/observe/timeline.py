"""The chart of who did what when: one lane for each learner and shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from decoupled_diloco.observe.charts import LETTER, Axis, Canvas, Chart, round_numbers
from decoupled_diloco.observe.figures import colors_of
from decoupled_diloco.observe.run_data import FaultLog, LearnerLog
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shapes import (
    rate_typical,
    rows_of,
    step_rates,
    time_name,
    time_unit,
)
from decoupled_diloco.observe.shard_data import ShardLog
from decoupled_diloco.units import format_duration

LANES_MAX = 64
"""No more learners and shards than this are shown, each."""

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
    shards = list(run.shards.values())[:LANES_MAX]
    members: list[LearnerLog | ShardLog] = [*learners, *shards]
    if not members:
        return None
    lane_height = 28.0 if len(members) <= 24 else 16.0
    colors = colors_of(run)
    names = {member.name for member in members}
    befalls = [fault for fault in run.faults if fault.target not in names]
    first = TOP if befalls else 10.0
    bottom = first + lane_height * len(members)

    def draw(canvas: Canvas) -> None:
        letters = 10 if canvas.narrow else 15
        left = 10 + LETTER * min(letters, max(len(member.name) for member in members))
        x = Axis(0.0, run.duration or 1.0, left, canvas.width - 12)
        _draw_axis(canvas, x, (first, bottom), run)
        _draw_befalls(canvas, x, bottom, befalls)
        fastest = max(map(rate_typical, learners), default=0.0)
        for lane, member in enumerate(members):
            top = first + lane_height * lane + 3
            shown = member.name if len(member.name) <= letters else member.name[: letters - 1] + "…"
            canvas.text(left - 6, top + lane_height / 2 + 1, shown, "lane", "end")
            at = _Lane(canvas, x, top, lane_height - 6)
            if isinstance(member, LearnerLog):
                _draw_learner(at, run, member, fastest, colors[member.name])
                _draw_cuts(at, member, run.duration)
            else:
                _draw_rounds(at, member)
            _draw_outages(at, run, member)
            _draw_faults(at, run, member.name)

    told = f"{len(run.trained)} learners and {len(run.shards)} shards"
    faults = f"{len(run.outages)} outages" if run.outages else "no outage"
    label = f"Who did what, when: {told} over {format_duration(run.duration)}, {faults}."
    return Chart(label, lambda _: bottom + 38, draw)


def _draw_axis(canvas: Canvas, x: Axis, reach: tuple[float, float], run: RunModel) -> None:
    top, bottom = reach
    unit, name = time_unit(run.duration)
    for tick in round_numbers(0.0, run.duration / unit, 4 if canvas.narrow else 9):
        canvas.stroke([(x(tick * unit), top - 4), (x(tick * unit), bottom)], "grid")
        canvas.text(x(tick * unit), bottom + 16, f"{tick:g}", "tick", "middle")
    middle = (x.begin + x.end) / 2
    canvas.text(middle, bottom + 32, f"{time_name(run)} [{name}]", "name", "middle")


@dataclass(frozen=True, slots=True)
class _Lane:
    canvas: Canvas
    x: Axis
    top: float
    height: float

    def rect(self, begin: float, end: float, css: str, title: str) -> None:
        """From one instant to another, at least a pixel wide."""
        a, b = self.x(begin), self.x(end)
        self.canvas.rect(a, self.top, max(1.0, b - a), self.height, css, title)


def _draw_learner(
    lane: _Lane,
    run: RunModel,
    learner: LearnerLog,
    fastest: float,
    color: str,
) -> None:
    """The rate of stepping as a height; what else it did as a pattern."""
    own = run.account.learners[learner.name]
    for span in own.spans:
        if span.doing in ("waiting", "joining"):
            seconds = format_duration(span.end - span.begin)
            lane.rect(span.begin, span.end, span.doing, f"{learner.name} {span.doing} {seconds}")
    bins = max(1, round((lane.x.end - lane.x.begin) / 3))
    edges = [run.duration * number / bins for number in range(bins + 1)]
    base = lane.top + lane.height
    outline: list[tuple[float, float]] = []
    for (begin, end), rate in zip(pairwise(edges), step_rates(learner, edges), strict=True):
        if rate:
            height = lane.height * min(1.0, rate / fastest if fastest else 1.0)
            outline += [(lane.x(begin), base - height), (lane.x(end), base - height)]
        elif outline:
            lane.canvas.area(_corners(outline), base, f"steps {color}")
            outline = []
    lane.canvas.area(_corners(outline), base, f"steps {color}")


def _corners(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
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
    step = max(1, -(-len(shard.rounds) // ROUNDS_MAX))
    rounds = shard.rounds[::step]
    rows = rows_of(rounds)
    height = lane.height / (max(rows, default=0) + 1)
    for fate in ("idle", "merged", "abandoned"):
        bars = [
            (
                lane.x(r.opened_at),
                lane.top + row * height + 0.5,
                max(0.6, lane.x(r.finished_at) - lane.x(r.opened_at)),
                height - 1,
            )
            for r, row in zip(rounds, rows, strict=True)
            if r.fate == fate
        ]
        lane.canvas.rects(bars, fate)


def _draw_outages(lane: _Lane, run: RunModel, member: LearnerLog | ShardLog) -> None:
    middle = lane.top + lane.height / 2
    for outage in member.outages:
        up_at = outage.restarted_at if outage.restarted_at is not None else run.duration
        title = f"{outage.who} {outage.how} at {outage.down_at:.1f} s"
        lane.rect(outage.down_at, up_at, "down", title)
        x = lane.x(outage.down_at)
        draw_mark(lane.canvas, "cross", x, middle)
        if outage.back_at is not None:
            draw_mark(lane.canvas, "back", lane.x(outage.back_at), middle, "back")


def draw_mark(canvas: Canvas, css: str, x: float, y: float, title: str = "") -> None:
    """One of the ``MARKS`` around a point."""
    if css == "cross":
        canvas.stroke([(x - 4, y - 4), (x + 4, y + 4)], css, title)
        canvas.stroke([(x - 4, y + 4), (x + 4, y - 4)], css, title)
    elif css == "back":
        canvas.shape([(x - 3, y - 5), (x + 5, y), (x - 3, y + 5)], css, title)
    else:
        canvas.shape([(x - 5, y - 4), (x + 5, y - 4), (x, y + 4)], css, title)


def _draw_cuts(lane: _Lane, learner: LearnerLog, until: float) -> None:
    """A thin bar while no shard heard of it."""
    for cut in learner.cuts:
        begin, end = lane.x(cut.cut_at), lane.x(until if cut.back_at is None else cut.back_at)
        lane.canvas.rect(
            begin, lane.top, max(1.0, end - begin), 4.0, "cutoff", f"{learner.name} cut off"
        )


def _draw_faults(lane: _Lane, run: RunModel, name: str) -> None:
    """Faults of a process that it lives through; others are outages."""
    for fault in run.faults:
        at = fault.begin
        if fault.target == name and fault.kind not in ENDING_FAULTS:
            title = f"{fault.kind} {name} at {at:.1f} s"
            draw_mark(lane.canvas, "fault", lane.x(at), lane.top + 3, title)


def _draw_befalls(canvas: Canvas, x: Axis, bottom: float, faults: Sequence[FaultLog]) -> None:
    """Faults of more than one process: from when to when, with what they are above."""
    free_from = -math.inf
    for fault in faults:
        begin, end = x(fault.begin), x(min(fault.end, x.high))
        title = f"{fault.kind} {fault.target} at {fault.begin:.1f} s"
        if not math.isinf(fault.end):
            canvas.rect(begin, TOP, max(1.0, end - begin), bottom - TOP, "shade", title)
        canvas.stroke([(begin, TOP - 4), (begin, bottom)], "befalls", title)
        told = f"{fault.kind} {fault.target}"
        width = LETTER * len(told)
        at = min(begin, canvas.width - width)
        if at > free_from:
            canvas.text(at, TOP - 8, told, "tick")
            free_from = at + width + LETTER
