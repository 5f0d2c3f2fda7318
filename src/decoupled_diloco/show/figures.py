"""The charts of a run: losses, participation, parts of a round, timeline of its processes."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

import numpy as np

from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.facts import (
    FaultLog,
    LearnerLog,
    LossPoint,
    RoundLog,
    ShardLog,
    SiteLog,
)
from decoupled_diloco.run_model.phrases import many, natural
from decoupled_diloco.show.charts import (
    LETTER,
    Axis,
    Canvas,
    Chart,
    Frame,
    Place,
    Point,
    framed,
    round_numbers,
)
from decoupled_diloco.show.tables import ROUND_PARTS, round_parts
from decoupled_diloco.units import format_count, format_duration

Over = Literal["time", "step", "tokens"]
"""Horizontal axis of a loss chart."""

COLORS = 6
"""Number of learner colors, ``c0`` to ``c5``; further learners repeat them."""

LANES_MAX = 64
"""Maximum number of learners, and of shards, with a lane in a chart."""

LEGEND_MAX = 12
"""Maximum number of learners in the legend of the loss chart."""

RAW_LEARNERS_MAX = 6
"""Maximum number of learners whose single steps are drawn behind the smoothed lines."""

ROUNDS_MAX = 1500
"""Maximum number of rounds in a shard's lane; of more, an evenly spaced selection is drawn."""

ENDING_FAULTS = ("kill", "crash", "vanish")
"""Faults that end a process; its lane shows the resulting outage instead."""

TOP = 26.0
"""Space above the lanes for faults that affect more than one process."""

TIMELINE_KEYS = (
    ("c0", "steps (height: rate)"),
    ("joining", "joining"),
    ("waiting", "waiting"),
    ("down", "down"),
    ("cutoff", "cut off"),
    ("merged", "round merged"),
    ("abandoned", "round abandoned"),
    ("idle", "nothing to merge"),
)
"""Meaning of the timeline's colors and patterns."""

RELAY_KEYS = (("heat1", "relay connected"),)
"""The same in a run with relays."""

MARKS = {"cross": "ended", "back": "back", "fault": "other fault"}
"""Meaning of the timeline's marks."""

SMOOTHING_STEPS_MIN = 12

SMOOTHING_SHARE = 1 / 60

SMOOTHING_SHARE_MAX = 1 / 6
"""Width of the smoothing window for a learner's loss.

The smoothed loss at a step is the value of a straight line fitted to the losses around it:
`SMOOTHING_SHARE` of all steps on each side, or `SMOOTHING_STEPS_MIN` steps if that is more. Except
at both ends, this is their mean. A short run uses at most `SMOOTHING_SHARE_MAX` of its steps,
because one line through all of them would be meaningless."""


def colors_of(run: RunModel) -> dict[str, str]:
    """Return the color class of each learner by name, in natural order."""
    return {name: f"c{number % COLORS}" for number, name in enumerate(run.trained)}


@dataclass(frozen=True, slots=True)
class LossAxis:
    """Maps an instant and a global step to the horizontal axis of a loss chart."""

    over: Over
    unit: float
    label: str
    high: float
    tokens_at: tuple[tuple[float, ...], tuple[int, ...]]

    def __call__(self, at: float, global_step: int) -> float:
        """Return the position, in the axis's unit."""
        if self.over == "time":
            return at / self.unit
        if self.over == "step":
            return float(global_step)
        instants, totals = self.tokens_at
        index = bisect.bisect_right(instants, at)
        return float(totals[index - 1]) if index else 0.0

    def show(self, value: float) -> str:
        return format_count(value) if self.over == "tokens" else f"{value:g}"


def place_over(run: RunModel, over: Over) -> LossAxis:
    """Return the axis of loss charts: wall-clock time, global step or the run's tokens."""
    unit, name = time_unit(run.duration)
    learners = run.learners.values()
    steps = sorted(
        step
        for learner in learners
        for life in learner.lives
        for step in zip(life.steps_at, life.step_tokens, strict=False)
    )
    tokens_at = (tuple(at for at, _ in steps), tuple(accumulate(tokens for _, tokens in steps)))
    # A learner's step can be ahead of the shards' count.
    losses = (loss.global_step for learner in learners for loss in learner.losses)
    last_step = max((run.global_step, *losses, *(e.global_step for e in run.evaluations)))
    label, high = {
        "time": (f"{time_name(run)} [{name}]", run.duration / unit),
        "step": ("global step", float(last_step)),
        "tokens": ("tokens, all learners together", float(run.tokens)),
    }[over]
    return LossAxis(over, unit if over == "time" else 1.0, label, high or 1.0, tokens_at)


def _widest(places: Iterable[LossAxis]) -> LossAxis:
    """Return the axis on which the data of all runs fit."""
    return max(places, key=lambda place: place.high * place.unit)


def evaluation_chart(runs: Sequence[tuple[str, RunModel]], over: Over) -> Chart | None:
    """Return the losses of the global weights of one or two runs; ``None`` if there are none."""
    lines = []
    for name, run in runs:
        place = place_over(run, over)
        losses = [(e, e.loss) for e in run.evaluations if e.loss is not None]
        if losses:
            points = [(place(e.at, e.global_step), loss) for e, loss in losses]
            lines.append((name, place, points))
    if not lines:
        return None
    every = [loss for _, _, points in lines for _, loss in points]
    limits = loss_limits(every, every)
    widest = _widest(place for _, place, _ in lines)

    def draw(canvas: Canvas) -> None:
        frame = _loss_frame(canvas, widest, limits)
        if len(runs) == 1 and over == "time":
            _shade_outages(canvas, frame, runs[0][1])
        ends = []
        for (name, place, own), css in zip(lines, ("ink", "second"), strict=False):
            values = [(x * place.unit / widest.unit, loss) for x, loss in own]
            points = frame.points(values)
            canvas.line(points, css)
            for point, (x, loss) in zip(points, values, strict=True) if len(own) <= 80 else ():
                prefix = f"{name}: " if len(runs) > 1 else ""
                canvas.dot(point, css, f"{prefix}{loss:.4f} at {widest.show(x)}")
            ends.append((*points[-1], f"{own[-1][1]:.3f}", css))
        _label_ends(canvas, ends, frame.y.begin)

    summary = "; ".join(
        f"{name + ' ' if len(runs) > 1 else ''}from {points[0][1]:.4f} to {points[-1][1]:.4f} "
        f"in {len(points)} evaluations"
        for name, _, points in lines
    )
    return Chart(f"Loss of the global weights over {widest.label}: {summary}.", _loss_height, draw)


def _label_ends(
    canvas: Canvas, ends: Sequence[tuple[float, float, str, str]], bottom: float
) -> None:
    """Label the ends of lines from above; of two, the lower one from below if there is room."""
    ordered = sorted(ends, key=lambda end: end[1])
    lowest = ordered[-1][1]
    below = lowest + 18 if lowest + 22 <= bottom else lowest - 9
    for number, (x, y, text, css) in enumerate(ordered):
        above = y - 9 if len(ordered) == 1 else min(y - 9, below - 16)
        canvas.text(x - 2, below if number else above, text, f"value {css}", "end")


def learner_losses_chart(run: RunModel, over: Over) -> Chart | None:
    """Return every learner's training loss; ``None`` if there is none."""
    learners = [learner for learner in run.trained.values() if learner.losses]
    if not learners:
        return None
    place = place_over(run, over)
    lines = [
        (learner.name, *_line(_points(place, part)))
        for learner in learners
        for part in losses_by_life(learner)
    ]
    raw = [loss.loss for learner in learners for loss in learner.losses]
    limits = loss_limits(raw, [value for *_, line in lines for value in line])
    colors = colors_of(run)

    def draw(canvas: Canvas) -> None:
        frame = _loss_frame(canvas, place, limits)
        if over == "time":
            _shade_outages(canvas, frame, run)
        most = _points_of_line(canvas, len(learners))
        if len(learners) <= RAW_LEARNERS_MAX and not canvas.narrow:
            for name, xs, values, _ in lines:
                canvas.line(_thinned(frame, xs, values, 2 * most), f"raw {colors[name]}")
        for name, xs, _, line in lines:
            canvas.line(_thinned(frame, xs, line, most), colors[name], name)

    ends = ", ".join(f"{name} {line[-1]:.3f}" for name, *_, line in lines)
    label = f"Training loss of each learner over {place.label}; smoothed final values: {ends}."
    return Chart(label, _loss_height, draw)


def mean_losses_chart(runs: Sequence[tuple[str, RunModel]], over: Over) -> Chart | None:
    """Return the training losses of several runs, the learners of each smoothed into one line."""
    lines = []
    for name, run in runs:
        place = place_over(run, over)
        points = [p for one in run.learners.values() for p in _points(place, one.losses)]
        if points:
            xs, _, line = _line(sorted(points))
            lines.append((name, place, xs, line))
    if not lines:
        return None
    values = [value for *_, line in lines for value in line]
    limits = loss_limits(values, values)
    widest = _widest(place for _, place, *_ in lines)

    def draw(canvas: Canvas) -> None:
        frame = _loss_frame(canvas, widest, limits)
        most = _points_of_line(canvas, len(lines))
        for (name, place, xs, line), css in zip(lines, ("ink", "second"), strict=False):
            factor = place.unit / widest.unit
            canvas.line(_thinned(frame, xs, line, most, factor), css, name)

    ends = ", ".join(f"{name} {line[-1]:.3f}" for name, _, _, line in lines)
    label = f"Training loss over {widest.label}; smoothed final values: {ends}."
    return Chart(label, _loss_height, draw)


def _points(place: LossAxis, losses: Iterable[LossPoint]) -> list[Point]:
    return [(place(loss.at, loss.global_step), loss.loss) for loss in losses]


def _line(points: Sequence[Point]) -> tuple[list[float], list[float], list[float]]:
    """Return the positions on the axis, the losses, and the smoothed losses."""
    values = [loss for _, loss in points]
    return [x for x, _ in points], values, smoothed(values)


def _loss_height(narrow: bool) -> float:
    return 250 if narrow else 300


def _points_of_line(canvas: Canvas, lines: int) -> int:
    """Return the points per line; together, all lines must keep the page small."""
    return max(40, min(320, (1600 if canvas.narrow else 3200) // lines))


def _loss_frame(canvas: Canvas, place: LossAxis, limits: tuple[float, float]) -> Frame:
    return framed(
        canvas, (0.0, place.high, place.label), (*limits, "mean loss per token"), place.show
    )


def _thinned(
    frame: Frame, xs: Sequence[float], values: Sequence[float], most: int, factor: float = 1.0
) -> list[Point]:
    """Return at most ``most`` points; values beyond the axis are moved to its edge."""
    low, high = frame.y.low, frame.y.high
    thin = zip(averaged(xs, most), averaged(values, most), strict=True)
    return frame.points((x * factor, min(high, max(low, y))) for x, y in thin)


def _shade_outages(canvas: Canvas, frame: Frame, run: RunModel) -> None:
    unit, _ = time_unit(run.duration)
    top, bottom = frame.y.end, frame.y.begin
    for outage in run.outages:
        until = run.duration if outage.back_at is None else outage.back_at
        begin, end = frame.x(outage.down_at / unit), frame.x(until / unit)
        title = f"{outage.process} down: {outage.how}"
        canvas.rect(begin, top, max(1.0, end - begin), bottom - top, "shade", title)


def participation_chart(run: RunModel) -> Chart | None:
    """Return each learner's participation over the merged rounds; ``None`` without rounds."""
    rounds = _merged_in_order(run)
    learners = list(run.trained.values())[:LANES_MAX]
    if not rounds or not learners:
        return None
    height = 22.0 if len(learners) <= 16 else 12.0
    folded = [{participant.learner for participant in r.folded} for r in rounds]

    def draw(canvas: Canvas) -> None:
        letters = 10 if canvas.narrow else 15
        left = 10 + LETTER * min(letters, max(len(learner.name) for learner in learners))
        bins = min(len(rounds), 40 if canvas.narrow else 120)
        x = Axis(0.0, float(len(rounds)), left, canvas.width - 12)
        edges = [round(len(rounds) * number / bins) for number in range(bins + 1)]
        for lane, learner in enumerate(learners):
            top = 4 + height * lane
            canvas.text(left - 6, top + height / 2 + 4, learner.name[:letters], "lane", "end")
            levels: dict[int, list[Place]] = {}
            for a, b in pairwise(edges):
                share = sum(learner.name in names for names in folded[a:b]) / (b - a)
                place = (x(a) + 0.5, top + 1, max(0.5, x(b) - x(a) - 1), height - 2)
                levels.setdefault(level_of(share), []).append(place)
            for level, places in sorted(levels.items()):
                canvas.rects(places, f"heat{level}")
        bottom = 4 + height * len(learners)
        for tick in round_numbers(0.0, float(len(rounds)), 4 if canvas.narrow else 9):
            canvas.text(x(tick), bottom + 15, f"{tick:g}", "tick", "middle")
        middle = (left + canvas.width - 12) / 2
        canvas.text(middle, bottom + 31, "merged rounds, in order", "name", "middle")

    shares = ", ".join(f"{a.name} {100 * (run.participation_of(a) or 0):.0f} %" for a in learners)
    label = f"Share of merged rounds in which each learner took part: {shares}."
    return Chart(label, lambda _: 4 + height * len(learners) + 36, draw)


def level_of(share: float) -> int:
    """Return a share as one of five levels: none, less than half, half or more, most, all.

    >>> [level_of(share) for share in (0.0, 0.2, 0.5, 0.9, 1.0)]
    [0, 1, 2, 3, 4]
    """
    return 4 if share >= 1 else 3 if share >= 0.8 else 2 if share >= 0.5 else 1 if share else 0


def round_parts_chart(run: RunModel) -> Chart | None:
    """Return the parts of merged rounds' time over the run; ``None`` if no round was merged."""
    rounds = _merged_in_order(run)
    if not rounds:
        return None
    means = [statistics.fmean(part) for part in zip(*map(round_parts, rounds), strict=True)]

    def draw(canvas: Canvas) -> None:
        bins = 36 if canvas.narrow else 90
        stacks = _mean_parts(rounds, run.duration, bins)
        high = max((sum(parts) for parts in stacks if parts), default=0.0) or 1.0
        factor, unit = (1000.0, "ms") if high < 1 else (1.0, "s")
        seconds, name = time_unit(run.duration)
        x_axis = (0.0, run.duration / seconds or 1.0, f"{time_name(run)} [{name}]")
        frame = framed(canvas, x_axis, (0.0, 1.05 * high * factor, f"mean round [{unit}]"))
        width = (frame.x.end - frame.x.begin) / bins
        for part, (css, _) in enumerate(ROUND_PARTS):
            bars = []
            for number, parts in enumerate(stacks):
                if parts:
                    top = frame.y(sum(parts[: part + 1]) * factor)
                    base = frame.y(sum(parts[:part]) * factor)
                    left = frame.x.begin + number * width
                    bars.append((left + 0.5, top, max(0.5, width - 1), base - top))
            canvas.rects(bars, css)

    names = [name for name, _ in ROUND_PARTS]
    parts = ", ".join(f"{n} {format_duration(m)}" for n, m in zip(names, means, strict=True))
    label = f"Mean parts of {len(rounds)} merged rounds over the run: {parts}."
    return Chart(label, lambda narrow: 230 if narrow else 260, draw)


def _mean_parts(rounds: Sequence[RoundLog], duration: float, bins: int) -> list[list[float]]:
    """Return the mean of each part over the rounds that ended in each of equal time intervals."""
    ended: list[list[tuple[float, ...]]] = [[] for _ in range(bins)]
    for r in rounds:
        number = int(bins * r.finished_at / (duration or 1.0))
        ended[min(bins - 1, number)].append(round_parts(r))
    return [list(map(statistics.fmean, zip(*parts, strict=True))) for parts in ended]


def _merged_in_order(run: RunModel) -> list[RoundLog]:
    return sorted((r for r in run.rounds if r.merged), key=lambda r: r.finished_at)


def timeline_chart(run: RunModel) -> Chart | None:
    """Return one lane per learner, shard and site; ``None`` without learners and shards."""
    learners = list(run.trained.values())[:LANES_MAX]
    members: list[LearnerLog | ShardLog] = [*learners, *list(run.shards.values())[:LANES_MAX]]
    if not members:
        return None
    lane_height = 28.0 if len(members) + len(run.sites) <= 24 else 16.0
    colors = colors_of(run)
    sites = [(name, run.sites[name]) for name in sorted(run.sites, key=natural)[:LANES_MAX]]
    lanes = [*(member.name for member in members), *(f"relay-{name}" for name, _ in sites)]
    names = {member.name for member in members}
    fastest = max((1 / m for one in learners if (m := one.step_seconds_median)), default=0.0)
    shared = [fault for fault in run.faults if fault.target not in names]
    first = TOP if shared else 10.0
    bottom = first + lane_height * len(lanes)

    def draw(canvas: Canvas) -> None:
        letters = 10 if canvas.narrow else 15
        left = 10 + LETTER * min(letters, max(map(len, lanes)))
        x = Axis(0.0, run.duration or 1.0, left, canvas.width - 12)
        _draw_axis(canvas, x, first, bottom, run)
        _draw_shared_faults(canvas, x, bottom, shared)
        for number, name in enumerate(lanes):
            top = first + lane_height * number + 3
            shown = name if len(name) <= letters else name[: letters - 1] + "…"
            canvas.text(left - 6, top + lane_height / 2 + 1, shown, "lane", "end")
            lane = _Lane(canvas, x, top, lane_height - 6)
            if number >= len(members):
                _draw_site(lane, run, *sites[number - len(members)])
                continue
            member = members[number]
            if isinstance(member, LearnerLog):
                _draw_learner(lane, run, member, fastest, colors[member.name])
            else:
                _draw_rounds(lane, member)
            _draw_absences(lane, run, member)

    counts = f"{len(run.trained)} learners and {len(run.shards)} shards"
    if run.sites:
        counts = counts.replace(" and", ",") + f" and {many(len(run.sites), 'relay')}"
    faults = f"{len(run.outages)} outages" if run.outages else "no outage"
    label = f"Activity of {counts} over {format_duration(run.duration)}, {faults}."
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
        """Draw from one instant to another, at least one pixel wide."""
        a, b = self.x(begin), self.x(end)
        self.canvas.rect(a, self.top, max(1.0, b - a), height or self.height, css, title)


def _draw_learner(
    lane: _Lane, run: RunModel, learner: LearnerLog, fastest: float, color: str
) -> None:
    """Draw the step rate as a height, and other activities as patterns."""
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
    """Return the outline without points in the middle of a level segment."""
    return [
        point
        for index, point in enumerate(points)
        if index in (0, len(points) - 1)
        or abs(points[index - 1][1] - point[1]) > 0.05
        or abs(points[index + 1][1] - point[1]) > 0.05
    ]


def _draw_rounds(lane: _Lane, shard: ShardLog) -> None:
    """Draw a short bar for each round; concurrent rounds are in separate rows."""
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


def _draw_site(lane: _Lane, run: RunModel, name: str, site: SiteLog) -> None:
    """Draw when a relay was connected, and a thin bar for each of its sums."""
    for begin, end in site.connected:
        until = min(end, run.duration)
        title = f"relay of {name} connected {format_duration(until - begin)}"
        lane.rect(begin, until, "heat1", title)
    shown = site.sums_at[:: max(1, -(-len(site.sums_at) // ROUNDS_MAX))]
    lane.canvas.rects([(lane.x(at), lane.top + 3, 0.6, lane.height - 6) for at in shown], "merged")
    for at, ended in run.ends.get(f"relay-{name}", []):
        if ended.code != 0 and not run.orders.get(f"relay-{name}"):
            draw_mark(lane.canvas, "cross", lane.x(at), lane.top + lane.height / 2)


def _draw_absences(lane: _Lane, run: RunModel, member: LearnerLog | ShardLog) -> None:
    """Draw disconnections as thin bars, outages as wide ones, other faults as marks."""
    for cut in member.cuts if isinstance(member, LearnerLog) else ():
        until = run.duration if cut.back_at is None else cut.back_at
        lane.rect(cut.cut_at, until, "cutoff", f"{member.name} cut off", 4.0)
    middle = lane.top + lane.height / 2
    for outage in member.outages:
        up_at = outage.restarted_at if outage.restarted_at is not None else run.duration
        title = f"{outage.process} {outage.how} at {outage.down_at:.1f} s"
        lane.rect(outage.down_at, up_at, "down", title)
        draw_mark(lane.canvas, "cross", lane.x(outage.down_at), middle)
        if outage.back_at is not None:
            draw_mark(lane.canvas, "back", lane.x(outage.back_at), middle, "back")
    for fault in run.faults:
        if fault.target == member.name and fault.kind not in ENDING_FAULTS:
            title = f"{fault.kind} {member.name} at {fault.begin:.1f} s"
            draw_mark(lane.canvas, "fault", lane.x(fault.begin), lane.top + 3, title)


def draw_mark(canvas: Canvas, css: str, x: float, y: float, title: str = "") -> None:
    """Draw one of the ``MARKS`` around a point."""
    if css == "cross":
        canvas.stroke([(x - 4, y - 4), (x + 4, y + 4)], css, title)
        canvas.stroke([(x - 4, y + 4), (x + 4, y - 4)], css, title)
    elif css == "back":
        canvas.shape([(x - 3, y - 5), (x + 5, y), (x - 3, y + 5)], css, title)
    else:
        canvas.shape([(x - 5, y - 4), (x + 5, y - 4), (x, y + 4)], css, title)


def _draw_shared_faults(canvas: Canvas, x: Axis, bottom: float, faults: Sequence[FaultLog]) -> None:
    """Draw the faults that affect several processes: their time, with a label above."""
    free_from = -math.inf
    for fault in faults:
        begin, end = x(fault.begin), x(min(fault.end, x.high))
        label = f"{fault.kind} {fault.target}"
        title = f"{label} at {fault.begin:.1f} s"
        if not math.isinf(fault.end):
            canvas.rect(begin, TOP, max(1.0, end - begin), bottom - TOP, "shade", title)
        canvas.stroke([(begin, TOP - 4), (begin, bottom)], "befalls", title)
        width = LETTER * len(label)
        at = min(begin, canvas.width - width)
        if at > free_from:
            canvas.text(at, TOP - 8, label, "tick")
            free_from = at + width + LETTER


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit for an axis of this many seconds, and its name.

    >>> time_unit(250.0), time_unit(3600.0)
    ((1.0, 's'), (60.0, 'min'))
    """
    if seconds < 300:
        return (1.0, "s")
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")


def time_name(run: RunModel) -> str:
    return "virtual time" if run.virtual else "wall-clock time"


def losses_by_life(learner: LearnerLog) -> Iterator[list[LossPoint]]:
    """Yield the losses of each incarnation, so that no line is drawn across an outage."""
    ends = [life.started_at for life in learner.lives[1:]] + [math.inf]
    rest = list(learner.losses)
    for end in ends:
        part = [loss for loss in rest if loss.at < end]
        rest = rest[len(part) :]
        if part:
            yield part


def smoothed(values: Sequence[float]) -> list[float]:
    """Fit local straight lines by least squares; unlike trailing means, they do not lag."""
    x, y = np.arange(len(values), dtype=float), np.array(values)
    index = np.arange(len(values))
    least = min(SMOOTHING_STEPS_MIN, int(SMOOTHING_SHARE_MAX * len(values)))
    reach = max(least, int(SMOOTHING_SHARE * len(values)))
    first = np.maximum(0, index - reach)
    last = np.minimum(len(values), index + reach + 1)
    count = last - first

    def mean(terms: np.ndarray) -> np.ndarray:
        sums = np.concatenate([[0.0], np.cumsum(terms)])
        means: np.ndarray = (sums[last] - sums[first]) / count
        return means

    variance = mean(x * x) - mean(x) ** 2
    covariance = mean(x * y) - mean(x) * mean(y)
    slope = np.where(variance > 1e-6, covariance / np.maximum(variance, 1e-6), 0.0)
    return [float(value) for value in mean(y) + slope * (x - mean(x))]


def averaged(values: Sequence[float], most: int) -> list[float]:
    """Return at most ``most`` values: means of equal groups."""
    group = math.ceil(len(values) / most)
    if group <= 1:
        return list(values)
    return [float(np.mean(values[i : i + group])) for i in range(0, len(values), group)]


def loss_limits(raw: Sequence[float], lines: Sequence[float]) -> tuple[float, float]:
    """Return the limits of a loss axis; a few raw outliers must not flatten all lines."""
    low, high = (float(value) for value in np.percentile(np.array(raw), [0.5, 99.5]))
    low, high = min(low, *lines), max(high, *lines)
    margin = 0.06 * (high - low) or 0.1
    return (low - margin, high + margin)


def step_rates(learner: LearnerLog, edges: Sequence[float]) -> list[float]:
    """Return the steps per second between each two of these instants."""
    at: list[float] = []
    done: list[int] = []
    for life in learner.lives:
        if life.steps_at:
            begun = life.steps_at[0] - (learner.step_seconds_median or 0.0)
            before = done[-1] if done else 0
            at += [max([begun, life.ready_at or begun, *at[-1:]]), *life.steps_at]
            done += range(before, before + len(life.steps_at) + 1)
    if not at:
        return [0.0] * (len(edges) - 1)
    counts = np.interp(np.array(edges), np.array(at), np.array(done))
    return [
        float(b - a) / (until - since) if until > since else 0.0
        for (a, b), (since, until) in zip(pairwise(counts), pairwise(edges), strict=True)
    ]


def rows_of(rounds: Sequence[RoundLog]) -> list[int]:
    """Return for each round the first row that is free when it opens.

    There are at most four rows, and each has at least one round in fifty. The closing sweep, which
    opens all its rounds at once, must not make all other bars thin.
    """
    free_at = [-math.inf] * 4
    rows = [0] * len(rounds)
    for index in sorted(range(len(rounds)), key=lambda i: rounds[i].opened_at):
        opened = rounds[index].opened_at
        row = next((i for i, at in enumerate(free_at) if at <= opened), 3)
        rows[index], free_at[row] = row, rounds[index].finished_at
    most = sorted(rows)[int(0.98 * len(rows))] if rows else 0
    return [min(row, most) for row in rows]
