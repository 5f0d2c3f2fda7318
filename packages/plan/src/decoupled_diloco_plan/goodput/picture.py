"""Figures of a study: goodput over chips, and the first hours of one run.

They are readable in black and white: markers, dashes and hatching carry the information.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from decoupled_diloco.units import format_count
from decoupled_diloco_plan.goodput.chip_learner import (
    DOWNSCALE,
    LOST,
    RESTART,
    RUN,
    SHORT,
    UPSCALE,
    Integers,
)
from decoupled_diloco_plan.goodput.chip_time import runs_of, working
from decoupled_diloco_plan.goodput.cluster_settings import SECOND, Cluster
from decoupled_diloco_plan.goodput.study import Row
from decoupled_diloco_plan.goodput.systems import simulate
from decoupled_diloco_plan.output import save_picture

STYLES = {
    "data-parallel": ("#60646c", ":", "v"),
    "elastic": ("#D55E00", "--", "s"),
    "barrier": ("#009E73", "-.", "D"),
    "decoupled": ("#0072B2", "-", "o"),
}
"""Color, dashes and marker of each system."""

SHADES = ("#0072B2", "#56B4E9", "#004166", "#7fb6d9")
MARKERS = "o^P*Xdh<>p"

WAITING = -1
KINDS = {
    WAITING: ("waits", "#ffffff", "||||"),
    RUN: ("steps", "#cfd8e3", ""),
    DOWNSCALE: ("downscale", "#1c2024", ""),
    UPSCALE: ("upscale", "#E69F00", "////"),
    RESTART: ("restart", "#1c2024", ""),
    LOST: ("lost work", "#CC79A7", "xx"),
    SHORT: ("too few slices", "#ffffff", "..."),
}
"""Name, color and hatching of each learner activity."""

LANES_MAX = 32


def plot_goodput(rows: Sequence[Row], path: Path) -> None:
    """Plot goodput over chips, one line per system and number of learners."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.cluster.system, row.cluster.learners), []).append(row)
    seen: dict[str, int] = {}
    any_published = False
    for (system, learners), line in lines.items():
        any_published |= _line(axes, system, learners, line, seen.setdefault(system, 0))
        seen[system] += 1
    _over_chips(axes, sorted({row.cluster.chips for row in rows}))
    handles, _ = axes.get_legend_handles_labels()
    if any_published:
        handles.append(Line2D([], [], color="black", marker="x", linestyle="", label="published"))
    axes.legend(handles=handles, loc="lower left", frameon=False)
    save_picture(figure, path)


def _line(axes: Axes, system: str, learners: int, line: Sequence[Row], index: int) -> bool:
    """Draw one line; return whether it has published figures."""
    colour, dashes, marker = STYLES[system]
    if system == "decoupled":
        colour, marker = SHADES[index % len(SHADES)], MARKERS[index % len(MARKERS)]
    ordered = sorted(line, key=lambda row: row.cluster.chips)
    chips = [row.cluster.chips for row in ordered]
    alone = ordered[0].cluster.alone
    axes.errorbar(
        chips,
        [row.goodput for row in ordered],
        yerr=[row.interval or 0.0 for row in ordered],
        color=colour,
        linestyle=dashes,
        marker=marker,
        fillstyle="none" if index % 2 else "full",
        markersize=6,
        label=system if alone else f"{system}, M={learners}",
    )
    shown = [(r.cluster.chips, r.published) for r in ordered if r.published is not None]
    if shown:
        x, y = zip(*shown, strict=True)
        axes.plot(x, y, "kx", markersize=9, zorder=5)
    return bool(shown)


def _over_chips(axes: Axes, chips: Sequence[int]) -> None:
    axes.set_xscale("log")
    if len(chips) <= 10:
        axes.xaxis.set_major_locator(FixedLocator(list(chips)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    axes.set_xlabel("chips")
    axes.set_ylabel("goodput (% of allocated chip-time)")
    axes.set_ylim(0, 101)
    axes.grid(color="#e0e2e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plot_timeline(cluster: Cluster, hours: float, seed: int, path: Path) -> None:
    """Plot the first hours of one run: each learner's activity, and the share of stepping chips."""
    lives, steps = _watched(cluster, hours, seed)
    begin = min(int(life[:, 0].min()) for life in lives if len(life))
    lanes = min(len(lives), LANES_MAX)
    figure = Figure(figsize=(10, 2.6 + 0.32 * lanes), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1 + 0.32 * lanes, 1.6])
    unit, name = (3600.0, "hours") if hours > 2 else (60.0, "minutes")
    kinds: set[int] = set()
    for lane in range(lanes):
        kinds |= _lane(above, lane, _by_kind(lives[lane], steps[lane]), begin, unit)
    above.set_ylim(lanes - 0.5, -0.5)
    above.set_yticks(range(lanes), [f"learner {m}" for m in range(lanes)])
    above.set_title(_title(cluster, lanes, len(lives)), loc="left", fontsize=11)
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="#60646c", label=label)
        for kind, (label, colour, hatch) in KINDS.items()
        if kind in kinds
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
    _stepping(
        below,
        [_chips(*each) for each in zip(lives, steps, strict=True)],
        begin,
        unit,
        cluster.chips,
    )
    below.set_xlabel(f"time ({name})")
    below.set_xlim(0, hours * 3600 / unit)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)


def _title(cluster: Cluster, lanes: int, learners: int) -> str:
    some = f", {lanes} of {learners} learners" if lanes < learners else ""
    return f"{cluster.system}, {format_count(cluster.chips)} chips{some}"


def _watched(cluster: Cluster, hours: float, seed: int) -> tuple[list[Integers], list[Integers]]:
    """Return each learner's spans, and the intervals in which it steps, shape (n, 2)."""
    spans: list[list[Integers]] = []
    waits: list[list[Integers]] = []

    def watch(lived: list[Integers], waited: list[Integers]) -> None:
        spans.append(lived)
        waits.append(waited)

    simulate(cluster, hours * 3600, seed, watch=watch)
    lives = [np.concatenate(each) for each in zip(*spans, strict=True)]
    waited = [np.concatenate(each) for each in zip(*waits, strict=True)]
    return lives, [working(runs_of(life), wait) for life, wait in zip(lives, waited, strict=True)]


def _by_kind(life: Integers, steps: Integers) -> dict[int, Integers]:
    """Return the intervals of each kind that occurs; a run without steps counts as waiting."""
    kinds = {kind: life[life[:, 2] == kind, :2] for kind in KINDS}
    kinds[WAITING], kinds[RUN] = working(runs_of(life), steps), steps
    return {kind: intervals for kind, intervals in kinds.items() if len(intervals)}


def _chips(life: Integers, steps: Integers) -> Integers:
    """Return the intervals in which one learner steps, with its chips, shape (n, 3)."""
    index = np.searchsorted(life[:, 0], steps[:, 0], side="right") - 1
    return np.column_stack([steps, life[index, 3]])


def _lane(axes: Axes, lane: int, kinds: dict[int, Integers], begin: int, unit: float) -> set[int]:
    """Draw the activity of one learner; return the kinds that occur."""
    for kind, intervals in kinds.items():
        _, colour, hatch = KINDS[kind]
        at = (intervals[:, 0] - begin) / SECOND / unit
        lengths = (intervals[:, 1] - intervals[:, 0]) / SECOND / unit
        axes.broken_barh(
            list(zip(at, lengths, strict=True)),
            (lane - 0.38, 0.76),
            facecolor=colour,
            hatch=hatch,
            edgecolor="#60646c" if hatch else colour,
            linewidth=0.3,
        )
    return set(kinds)


def _stepping(axes: Axes, steps: Sequence[Integers], begin: int, unit: float, chips: int) -> None:
    """Draw the share of the chips that step, over time."""
    runs = np.concatenate(steps)
    at = np.concatenate([runs[:, 0], runs[:, 1]])
    change = np.concatenate([runs[:, 2], -runs[:, 2]])
    before_end = at < at.max()
    at, change = at[before_end], change[before_end]
    order = np.argsort(at, kind="stable")
    axes.step(
        (at[order] - begin) / SECOND / unit,
        100 * np.cumsum(change[order]) / chips,
        where="post",
        color="#1c2024",
        linewidth=0.9,
    )
    axes.set_ylabel("stepping\nchips (%)")
    axes.set_ylim(bottom=0)
    axes.grid(color="#e0e2e6", linewidth=0.8)
