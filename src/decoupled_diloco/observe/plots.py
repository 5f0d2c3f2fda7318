"""The plots of a run: evaluation loss, every learner's loss, and who did what when.

Colours are those of Okabe and Ito, which stay apart for colour-blind eyes; what matters is told by
shape or hatching as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from decoupled_diloco.observe.run_data import GAP_MEDIANS, LearnerLog, Outage, ShardLog
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.shapes import (
    averaged,
    learners_in_order,
    loss_limits,
    losses_by_life,
    rate_typical,
    rows_of,
    shards_in_order,
    smoothed,
    time_name,
    time_unit,
)

POINTS_MAX = 6000
"""All lines of a plot together have about this many points; more are averaged in groups."""

POINTS_MAX_OF_LINE = 1000

OUTAGE_LABELS_MAX = 4
"""More outages than this are shaded without their names; the timeline tells them apart."""

LANES_MAX = 24
"""The timeline shows no more learners than this."""

LANE_HALF = 0.36


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours."""

    ink: str
    faint: str
    grid: str
    page: str
    learners: tuple[str, ...]
    merged: str
    abandoned: str
    outage: str


LIGHT = Theme(
    ink="#1c2024",
    faint="#60646c",
    grid="#e0e2e6",
    page="#ffffff",
    learners=("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#7a5c00"),
    merged="#0a7d8c",
    abandoned="#D55E00",
    outage="#3a3f45",
)
Draw = Callable[[Axes, RunModel, Theme], None]


def save_png(run: RunModel, path: str | Path) -> None:
    """Writes the plots that the run has something for into one image on white.

    Raises:
        OSError: The file cannot be written.
    """
    plots: list[tuple[Draw, float]] = []
    if run.evaluations:
        plots.append((draw_evaluation, 2.6))
    if any(learner.losses or learner.losses_not_finite for learner in run.trained.values()):
        plots.append((draw_losses, 3.2))
    plots.append((draw_timeline, 1.2 + 0.42 * _lane_count(run)))
    heights = [height for _, height in plots]
    with matplotlib.rc_context(style_of(LIGHT)):
        figure = Figure(figsize=(10, sum(heights) + 1.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(plots), 1, sharex=True, squeeze=False, height_ratios=heights)
        axes: list[Axes] = list(grid[:, 0])
        for axis, (draw, _) in zip(axes, plots, strict=True):
            draw(axis, run, LIGHT)
        for axis in axes[:-1]:
            axis.set_xlabel("")
        figure.savefig(path, dpi=150, facecolor=LIGHT.page)


def draw_evaluation(axes: Axes, run: RunModel, theme: Theme) -> None:
    """The loss of the global weights on held-out data over wall-clock time."""
    unit, name = time_unit(run.duration)
    points = [(e.at / unit, e.loss) for e in run.evaluations if e.loss is not None]
    _frame(axes, run, "Evaluation loss of the global weights", name)
    axes.set_ylabel("mean loss per token")
    if not points:
        _say(axes, theme, "no evaluation was finite")
        return
    _shade_outages(axes, run, theme, named=True)
    at, loss = zip(*points, strict=True)
    size = 4 if len(points) <= 60 else 0
    axes.plot(at, loss, color=theme.ink, marker="o", markersize=size, linewidth=1.6)
    axes.annotate(
        f"{loss[-1]:.3f}",
        (at[-1], loss[-1]),
        xytext=(0, 7),
        textcoords="offset points",
        ha="center",
        fontweight="bold",
    )
    axes.margins(y=0.15)


def draw_losses(axes: Axes, run: RunModel, theme: Theme) -> None:
    """Every learner's training loss, smoothed, over the faint raw values."""
    unit, name = time_unit(run.duration)
    _frame(axes, run, "Training loss of each learner", name)
    axes.set_ylabel("loss")
    learners = [learner for learner in learners_in_order(run) if learner.losses]
    if not learners:
        _say(axes, theme, "no training loss was finite")
        return
    _shade_outages(axes, run, theme, named=False)
    smooth: list[float] = []
    most = _points_max(len(learners))
    for learner in learners:
        color = _color(run, learner, theme)
        label: str | None = learner.name
        for part in losses_by_life(learner):
            at = averaged([loss.at / unit for loss in part], most)
            raw = [loss.loss for loss in part]
            axes.plot(at, averaged(raw, most), color=color, alpha=0.22, linewidth=0.8)
            strong = averaged(smoothed(raw), most)
            axes.plot(at, strong, color=color, linewidth=1.7, label=label)
            label = None
            smooth += strong
    raw_of_all = [loss.loss for learner in learners for loss in learner.losses]
    axes.set_ylim(*loss_limits(raw_of_all, smooth))
    if len(learners) <= 12:
        axes.legend(loc="upper right", frameon=False)


def draw_timeline(axes: Axes, run: RunModel, theme: Theme) -> None:
    """One lane per learner and shard: steps, outages, rounds."""
    _, name = time_unit(run.duration)
    _frame(axes, run, "Who did what, when", name)
    learners, shards = learners_in_order(run)[:LANES_MAX], shards_in_order(run)
    members: list[LearnerLog | ShardLog] = [*learners, *shards]
    if not members:
        _say(axes, theme, "neither a learner nor a shard is on the tape")
        return
    fastest = max((rate_typical(learner) for learner in learners), default=0.0)
    for lane, learner in enumerate(learners):
        _draw_steps(axes, run, learner, theme, lane, fastest)
    for lane, shard in enumerate(shards, start=len(learners)):
        _draw_rounds(axes, run, shard, theme, lane)
    for lane, member in enumerate(members):
        for outage in member.outages:
            _draw_outage(axes, run, outage, theme, lane)
    axes.set_yticks(range(len(members)), [member.name for member in members])
    axes.set_ylim(len(members) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    if learners and shards:
        axes.axhline(len(learners) - 0.5, color=theme.grid, linewidth=1)
    _legend_below(axes, run, theme)


# ---- lanes of the timeline


def _draw_steps(
    axes: Axes,
    run: RunModel,
    learner: LearnerLog,
    theme: Theme,
    lane: int,
    fastest: float,
) -> None:
    """A bar from step to step; its height is the rate of stepping against the fastest learner's."""
    unit, _ = time_unit(run.duration)
    color = _color(run, learner, theme)
    limit = GAP_MEDIANS * (learner.step_seconds_median or 0.0)
    bottom = lane + LANE_HALF
    most = _points_max(len(run.learners))
    for life in learner.lives:
        group = max(1, math.ceil(len(life.steps_at) / most))
        at = life.steps_at[::group]
        heights = [
            0.0 if b - a > limit * group else min(1.0, group / ((b - a) * fastest))
            for a, b in pairwise(at)
            if b > a
        ]
        edges = [a / unit for a in at[:1]] + [b / unit for a, b in pairwise(at) if b > a]
        if heights:
            tops = [bottom - 2 * LANE_HALF * height for height in heights]
            axes.stairs(tops, edges, baseline=bottom, fill=True, color=color, alpha=0.8)


def _draw_rounds(axes: Axes, run: RunModel, shard: ShardLog, theme: Theme, lane: int) -> None:
    """A short bar from each round's opening to its end; rounds that overlap lie in rows."""
    unit, _ = time_unit(run.duration)
    rows = rows_of(shard.rounds)
    height = 2 * LANE_HALF / (max(rows, default=0) + 1)
    for fate, color, grow in (
        ("merged", theme.merged, 0.0),
        ("abandoned", theme.abandoned, 0.1),
        ("idle", theme.faint, 0.0),
    ):
        for row in range(max(rows, default=0) + 1):
            bars = [
                (r.opened_at / unit, max(r.finished_at - r.opened_at, 0.0) / unit)
                for r, in_row in zip(shard.rounds, rows, strict=True)
                if in_row == row and r.fate == fate
            ]
            top = lane - LANE_HALF + (row + 0.07) * height
            axes.broken_barh(
                bars,
                (top - grow, height * 0.86 + 2 * grow),
                facecolors=color,
                edgecolors=color,
                linewidth=1.0 if fate == "abandoned" else 0.4,
                rasterized=len(shard.rounds) > POINTS_MAX_OF_LINE,
            )


def _draw_outage(axes: Axes, run: RunModel, outage: Outage, theme: Theme, lane: int) -> None:
    unit, _ = time_unit(run.duration)
    until = run.duration if outage.back_at is None else outage.back_at
    begin, width = outage.down_at / unit, (until - outage.down_at) / unit
    axes.broken_barh(
        [(begin, width)],
        (lane - LANE_HALF, 2 * LANE_HALF),
        facecolors="none",
        edgecolors=theme.outage,
        hatch="/////",
        linewidth=0.8,
        zorder=3,
    )
    axes.plot([begin], [lane], marker="X", color=theme.abandoned, **_MARK, zorder=5)
    if outage.back_at is not None:
        axes.plot([until / unit], [lane], marker=">", color=theme.learners[2], **_MARK, zorder=5)


_MARK: dict[str, Any] = {"markersize": 8, "markeredgewidth": 0.6, "linestyle": "none"}


def _legend_below(axes: Axes, run: RunModel, theme: Theme) -> None:
    handles: list[Any] = []
    if run.learners:
        color = theme.faint
        handles.append(Patch(color=color, alpha=0.8, label="steps (height: rate)"))
    if run.rounds_merged:
        handles.append(Patch(color=theme.merged, label="round merged"))
    if run.rounds_abandoned:
        handles.append(Patch(color=theme.abandoned, label="round given up"))
    if any(r.fate == "idle" for shard in run.shards.values() for r in shard.rounds):
        handles.append(Patch(color=theme.faint, label="nothing to merge"))
    if run.outages:
        down = Patch(facecolor="none", edgecolor=theme.outage, hatch="/////", label="down")
        ended = Line2D([], [], marker="X", color=theme.abandoned, label="ended", **_MARK)
        back = Line2D([], [], marker=">", color=theme.learners[2], label="back", **_MARK)
        handles += [down, ended, back]
    columns = min(len(handles), 6)
    if handles:
        axes.figure.legend(
            handles=handles, loc="outside lower center", ncols=columns, frameon=False
        )


# ---- shared


def style_of(theme: Theme) -> Any:
    """The settings of matplotlib that all plots share."""
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "text.color": theme.ink,
        "axes.labelcolor": theme.faint,
        "axes.edgecolor": theme.grid,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.7,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
        "hatch.color": theme.outage,
        "hatch.linewidth": 0.8,
        "legend.fontsize": 9,
    }


def _frame(axes: Axes, run: RunModel, title: str, unit_name: str) -> None:
    unit, _ = time_unit(run.duration)
    axes.set_title(title)
    axes.set_xlabel(f"{time_name(run)} [{unit_name}]")
    axes.set_xlim(0, max(run.duration, 1e-9) / unit)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _say(axes: Axes, theme: Theme, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=theme.faint)
    axes.set_yticks([])


def _shade_outages(axes: Axes, run: RunModel, theme: Theme, *, named: bool) -> None:
    unit, _ = time_unit(run.duration)
    outages = run.outages
    for index, outage in enumerate(outages):
        until = run.duration if outage.back_at is None else outage.back_at
        axes.axvspan(
            outage.down_at / unit, until / unit, color=theme.faint, alpha=0.16, linewidth=0
        )
        if not named or len(outages) > OUTAGE_LABELS_MAX:
            continue
        late = outage.down_at > 0.7 * run.duration
        axes.text(
            (until if late else outage.down_at) / unit,
            0.98 - 0.08 * index,
            f" {outage.who} down ",
            transform=axes.get_xaxis_transform(),
            fontsize=8,
            color=theme.faint,
            va="top",
            ha="right" if late else "left",
        )


def _lane_count(run: RunModel) -> int:
    return max(2, min(len(run.learners), LANES_MAX) + len(run.shards))


def _color(run: RunModel, learner: LearnerLog, theme: Theme) -> str:
    names = [other.name for other in learners_in_order(run)]
    return theme.learners[names.index(learner.name) % len(theme.learners)]


def _points_max(lines: int) -> int:
    """How many points each of several lines may have."""
    return min(POINTS_MAX_OF_LINE, max(100, POINTS_MAX // max(1, lines)))
