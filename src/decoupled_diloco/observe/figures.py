"""The charts of a report: losses, participation, how rounds went."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from decoupled_diloco.observe import shapes
from decoupled_diloco.observe.charts import (
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
from decoupled_diloco.observe.run_data import LossPoint
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shard_data import RoundLog
from decoupled_diloco.units import format_count, format_duration

Over = Literal["time", "step", "tokens"]
"""What a loss is drawn over."""

COLORS = 6
"""So many learners have colours of their own, ``c0`` to ``c5``; then they begin again."""

LANES_MAX = 64
"""No more learners than this, and no more shards, have a lane in a chart."""

LEGEND_MAX = 12
"""More learners than this are not named beside the plot of their losses."""

RAW_LEARNERS_MAX = 6
"""Single steps are drawn behind the smoothed lines of so many learners."""

ROUND_PARTS = (
    ("quorum", "until the quorum was there"),
    ("grace", "grace window, beyond the quorum"),
    ("upload", "uploads that were still under way then"),
    ("merge", "merging and publishing"),
)
"""The parts of a round's time, one after the other."""


def colors_of(run: RunModel) -> dict[str, str]:
    """The class of each learner's colour, by its name, in the order in which people count."""
    return {name: f"c{number % COLORS}" for number, name in enumerate(run.trained)}


@dataclass(frozen=True, slots=True)
class LossAxis:
    """Puts an instant and a global step on the axis that a loss is drawn over."""

    over: Over
    unit: float
    label: str
    high: float
    tokens_at: tuple[tuple[float, ...], tuple[int, ...]]

    def __call__(self, at: float, global_step: int) -> float:
        """Where it is, in the axis's unit."""
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
    """The axis that losses are drawn over: wall-clock time, global step or the run's tokens."""
    unit, name = shapes.time_unit(run.duration)
    learners = run.learners.values()
    steps = sorted(
        step
        for learner in learners
        for life in learner.lives
        for step in zip(life.steps_at, life.step_tokens, strict=False)
    )
    tokens_at = (tuple(at for at, _ in steps), tuple(accumulate(tokens for _, tokens in steps)))
    # A learner's step can be ahead of what the shards have counted.
    losses = (loss.global_step for learner in learners for loss in learner.losses)
    last_step = max((run.global_step, *losses, *(e.global_step for e in run.evaluations)))
    label, high = {
        "time": (f"{shapes.time_name(run)} [{name}]", run.duration / unit),
        "step": ("global step", float(last_step)),
        "tokens": ("tokens, all learners together", float(run.tokens)),
    }[over]
    return LossAxis(over, unit if over == "time" else 1.0, label, high or 1.0, tokens_at)


def _widest(places: Iterable[LossAxis]) -> LossAxis:
    """Of several runs' axes the one that they all fit on."""
    return max(places, key=lambda place: place.high * place.unit)


def evaluation_chart(runs: Sequence[tuple[str, RunModel]], over: Over) -> Chart | None:
    """Losses of global weights on held-out data, of one run or two; ``None``: there are none."""
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
    limits = shapes.loss_limits(every, every)
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
                whose = f"{name}: " if len(runs) > 1 else ""
                canvas.dot(point, css, f"{whose}{loss:.4f} at {widest.show(x)}")
            ends.append((*points[-1], f"{own[-1][1]:.3f}", css))
        _label_ends(canvas, ends, frame.y.begin)

    told = "; ".join(
        f"{name + ' ' if len(runs) > 1 else ''}from {points[0][1]:.4f} to {points[-1][1]:.4f} "
        f"in {len(points)} evaluations"
        for name, _, points in lines
    )
    return Chart(f"Loss of the global weights over {widest.label}: {told}.", _loss_height, draw)


def _label_ends(
    canvas: Canvas, ends: Sequence[tuple[float, float, str, str]], bottom: float
) -> None:
    """Writes above a line's end where it ends; of two, below the lower one if there is room."""
    ordered = sorted(ends, key=lambda end: end[1])
    lowest = ordered[-1][1]
    below = lowest + 18 if lowest + 22 <= bottom else lowest - 9
    for number, (x, y, text, css) in enumerate(ordered):
        above = y - 9 if len(ordered) == 1 else min(y - 9, below - 16)
        canvas.text(x - 2, below if number else above, text, f"value {css}", "end")


def learner_losses_chart(run: RunModel, over: Over) -> Chart | None:
    """Every learner's training loss; ``None``: there is none."""
    learners = [learner for learner in run.trained.values() if learner.losses]
    if not learners:
        return None
    place = place_over(run, over)
    lines = [
        (learner.name, *_line(_points(place, part)))
        for learner in learners
        for part in shapes.losses_by_life(learner)
    ]
    raw = [loss.loss for learner in learners for loss in learner.losses]
    limits = shapes.loss_limits(raw, [value for *_, line in lines for value in line])
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
    label = f"Training loss of each learner over {place.label}; smoothed, at the end: {ends}."
    return Chart(label, _loss_height, draw)


def mean_losses_chart(runs: Sequence[tuple[str, RunModel]], over: Over) -> Chart | None:
    """Training losses of several runs, each run's learners smoothed into one line."""
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
    limits = shapes.loss_limits(values, values)
    widest = _widest(place for _, place, *_ in lines)

    def draw(canvas: Canvas) -> None:
        frame = _loss_frame(canvas, widest, limits)
        most = _points_of_line(canvas, len(lines))
        for (name, place, xs, line), css in zip(lines, ("ink", "second"), strict=False):
            factor = place.unit / widest.unit
            canvas.line(_thinned(frame, xs, line, most, factor), css, name)

    told = ", ".join(f"{name} {line[-1]:.3f}" for name, _, _, line in lines)
    label = f"Training loss over {widest.label}, smoothed; at the end: {told}."
    return Chart(label, _loss_height, draw)


def _points(place: LossAxis, losses: Iterable[LossPoint]) -> list[Point]:
    return [(place(loss.at, loss.global_step), loss.loss) for loss in losses]


def _line(points: Sequence[Point]) -> tuple[list[float], list[float], list[float]]:
    """Places on the axis, the losses there, and these smoothed."""
    values = [loss for _, loss in points]
    return [x for x, _ in points], values, shapes.smoothed(values)


def _loss_height(narrow: bool) -> float:
    return 250 if narrow else 300


def _points_of_line(canvas: Canvas, lines: int) -> int:
    """All lines together have so many points that the page stays small."""
    return max(40, min(320, (1600 if canvas.narrow else 3200) // lines))


def _loss_frame(canvas: Canvas, place: LossAxis, limits: tuple[float, float]) -> Frame:
    return framed(
        canvas, (0.0, place.high, place.label), (*limits, "mean loss per token"), place.show
    )


def _thinned(
    frame: Frame, xs: Sequence[float], values: Sequence[float], most: int, factor: float = 1.0
) -> list[Point]:
    """Places of at most so many points; what is beyond the axis is at its edge."""
    low, high = frame.y.low, frame.y.high
    thin = zip(shapes.averaged(xs, most), shapes.averaged(values, most), strict=True)
    return frame.points((x * factor, min(high, max(low, y))) for x, y in thin)


def _shade_outages(canvas: Canvas, frame: Frame, run: RunModel) -> None:
    unit, _ = shapes.time_unit(run.duration)
    top, bottom = frame.y.end, frame.y.begin
    for outage in run.outages:
        until = run.duration if outage.back_at is None else outage.back_at
        begin, end = frame.x(outage.down_at / unit), frame.x(until / unit)
        title = f"{outage.who} down: {outage.how}"
        canvas.rect(begin, top, max(1.0, end - begin), bottom - top, "shade", title)


def participation_chart(run: RunModel) -> Chart | None:
    """Which share of each stretch of merged rounds every learner was in; ``None``: no round."""
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

    told = ", ".join(f"{a.name} {100 * (run.participation_of(a) or 0):.0f} %" for a in learners)
    label = f"Share of merged rounds that each learner took part in: {told}."
    return Chart(label, lambda _: 4 + height * len(learners) + 36, draw)


def level_of(share: float) -> int:
    """A share as one of five levels: none, less than half, half or more, most, all.

    >>> [level_of(share) for share in (0.0, 0.2, 0.5, 0.9, 1.0)]
    [0, 1, 2, 3, 4]
    """
    return 4 if share >= 1 else 3 if share >= 0.8 else 2 if share >= 0.5 else 1 if share else 0


def round_parts(r: RoundLog) -> tuple[float, float, float, float]:
    """Seconds of a merged round: to the quorum, grace beyond it, uploads left then, merging."""
    result, end, ends = r.outcome, r.outcome.finished_seconds, [0.0]
    for mark in (result.quorum_seconds, result.closed_seconds, result.uploaded_seconds, end):
        ends.append(ends[-1] if mark is None else min(end, max(ends[-1], mark)))
    quorum, grace, upload, merge = (until - since for since, until in pairwise(ends))
    return quorum, grace, upload, merge


def round_parts_chart(run: RunModel) -> Chart | None:
    """What the time of merged rounds went to, over the run; ``None``: no round was merged."""
    rounds = _merged_in_order(run)
    if not rounds:
        return None
    means = [statistics.fmean(part) for part in zip(*map(round_parts, rounds), strict=True)]

    def draw(canvas: Canvas) -> None:
        bins = 36 if canvas.narrow else 90
        stacks = _mean_parts(rounds, run.duration, bins)
        high = max((sum(parts) for parts in stacks if parts), default=0.0) or 1.0
        factor, unit = (1000.0, "ms") if high < 1 else (1.0, "s")
        seconds, name = shapes.time_unit(run.duration)
        x_axis = (0.0, run.duration / seconds or 1.0, f"{shapes.time_name(run)} [{name}]")
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
    told = ", ".join(f"{n} {format_duration(m)}" for n, m in zip(names, means, strict=True))
    label = f"Mean parts of {len(rounds)} merged rounds over the run: {told}."
    return Chart(label, lambda narrow: 230 if narrow else 260, draw)


def _mean_parts(rounds: Sequence[RoundLog], duration: float, bins: int) -> list[list[float]]:
    """The mean of each part over the rounds that ended in each of equal stretches of time."""
    ended: list[list[tuple[float, ...]]] = [[] for _ in range(bins)]
    for r in rounds:
        number = int(bins * r.finished_at / (duration or 1.0))
        ended[min(bins - 1, number)].append(round_parts(r))
    return [list(map(statistics.fmean, zip(*parts, strict=True))) for parts in ended]


def _merged_in_order(run: RunModel) -> list[RoundLog]:
    return sorted((r for r in run.rounds if r.merged), key=lambda r: r.finished_at)
