"""The charts of a run as one image, drawn by the same functions as on its page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon, Rectangle

from decoupled_diloco.observe.charts import LIGHT, WIDTHS, Canvas, Chart, Point
from decoupled_diloco.observe.figures import colors_of, evaluation_chart, learner_losses_chart
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.timeline import MARKS, TIMELINE_KEYS, draw_mark, timeline_chart

UNITS_PER_INCH = 100.0
POINT = 72.0 / UNITS_PER_INCH
"""A unit of a chart in points."""

HEADING, KEYS, MARGIN = 30.0, 24.0, 14.0
"""Height of a chart's heading and of its keys, and what is free around everything."""

LEGEND_MAX = 12
"""More learners than this are not named."""

_NAMED = {"grid": "line", "cutoff": "warn", "fault": "down", "befalls": "down", "cross": "down"}
_NAMED |= {"back": "useful", "heat0": "none", "tick": "faint", "name": "faint", "lane": "ink"}
_NAMED |= {f"heat{level}": "heat" for level in range(1, 5)}
_OPACITY = {"raw": 0.22, "steps": 0.85, "heat1": 0.25, "heat2": 0.5, "heat3": 0.75}
_WIDTH = {"grid": 1.0, "raw": 1.0, "line": 1.8, "befalls": 1.2, "cross": 2.4}
_HATCH = {"waiting": "...", "joining": "||||", "down": "/////"}

Key = tuple[str, str]


def save_png(run: RunModel, path: str | Path) -> None:
    """Writes the plots that the run has something for into one image on white.

    Raises:
        OSError: The file cannot be written.
    """
    learners = list(colors_of(run).items())
    names = [(css, name) for name, css in learners] if len(learners) <= LEGEND_MAX else []
    plots = [
        ("Evaluation loss of the global weights", evaluation_chart([("", run)], "time"), ()),
        ("Training loss of each learner", learner_losses_chart(run, "time"), names),
        ("Who did what, when", timeline_chart(run), (*TIMELINE_KEYS, *MARKS.items())),
    ]
    save_charts([(title, chart, keys) for title, chart, keys in plots if chart is not None], path)


def save_charts(plots: Sequence[tuple[str, Chart, Sequence[Key]]], path: str | Path) -> None:
    """Writes charts with headings and keys, one below the other, as an image."""
    width = WIDTHS["wide"] + 2 * MARGIN
    heights = [HEADING + chart.height(False) + (KEYS if keys else 0.0) for _, chart, keys in plots]
    height = max(sum(heights), HEADING) + 2 * MARGIN
    with matplotlib.rc_context({"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}):
        figure = Figure(figsize=(width / UNITS_PER_INCH, height / UNITS_PER_INCH))
        FigureCanvasAgg(figure)
        axes: Axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(-MARGIN, width - MARGIN)
        axes.set_ylim(height - MARGIN, -MARGIN)
        axes.axis("off")
        if not plots:
            ImageCanvas(axes, 0.0, HEADING).text(
                0, 18, "neither a learner nor a shard is on the tape"
            )
        top = 0.0
        for (title, chart, keys), own in zip(plots, heights, strict=True):
            ImageCanvas(axes, top, HEADING).text(0, 18, title, "lane value")
            chart.draw(ImageCanvas(axes, top + HEADING, chart.height(False)))
            _draw_keys(ImageCanvas(axes, top + own - KEYS, KEYS), keys)
            top += own
        figure.savefig(path, dpi=150, facecolor=LIGHT["page"])


def _draw_keys(canvas: Canvas, keys: Sequence[Key]) -> None:
    at = 44.0
    for css, name in keys:
        if css in MARKS:
            draw_mark(canvas, css, at + 6, 12)
        else:
            canvas.rect(at, 6, 12, 12, css)
        canvas.text(at + 17, 16, name, "tick")
        at += 30 + 5.9 * len(name)


class ImageCanvas(Canvas):
    """A part of an image, from a height of it downwards."""

    def __init__(self, axes: Axes, top: float, height: float) -> None:
        super().__init__(WIDTHS["wide"], height)
        self._axes, self._top = axes, top
        self._order = 1.0

    def rect(
        self, x: float, y: float, width: float, height: float, css: str, title: str = ""
    ) -> None:
        self._add(Rectangle((x, self._top + y), width, height, **_filled(css)))

    def rects(self, rects: Iterable[tuple[float, float, float, float]], css: str) -> None:
        corners = [
            [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
            for x, top, w, h in rects
            for y in [self._top + top]
        ]
        self._axes.add_collection(
            PolyCollection(corners, **_filled(css), zorder=self._next()), autolim=False
        )

    def stroke(self, points: Sequence[Point], css: str, title: str = "") -> None:
        classes = css.split()
        x, y = zip(*points, strict=True)
        self._axes.plot(
            x,
            [self._top + each for each in y],
            color=_color(css),
            alpha=min((_OPACITY.get(name, 1.0) for name in classes), default=1.0),
            linewidth=POINT * min(_WIDTH[name] for name in classes if name in _WIDTH),
            linestyle=(0, (3, 3)) if "befalls" in classes else "-",
            zorder=self._next(),
        )

    def shape(self, points: Sequence[Point], css: str, title: str = "") -> None:
        self._add(Polygon([(x, self._top + y) for x, y in points], closed=True, **_filled(css)))

    def dot(self, point: Point, css: str, title: str = "") -> None:
        self._add(Circle((point[0], self._top + point[1]), 3.0, **_filled(css)))

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        self._axes.text(
            x,
            self._top + y,
            text,
            color=_color(css),
            fontsize=(13 if "lane value" in css else 12) * POINT,
            fontweight="bold" if "value" in css.split() else "normal",
            ha={"start": "left", "middle": "center", "end": "right"}[anchor],
            va="baseline",
            zorder=self._next(),
        )

    def _add(self, patch: Any) -> None:
        patch.set_zorder(self._next())
        self._axes.add_patch(patch)

    def _next(self) -> float:
        self._order += 0.001  # what is drawn later lies above
        return self._order


def _color(css: str) -> str:
    names = [_NAMED.get(name, name) for name in reversed(css.split())]  # the last one says most
    return next((LIGHT[name] for name in names if name in LIGHT), LIGHT["ink"])


def _filled(css: str) -> dict[str, Any]:
    """How a surface of a class is filled."""
    hatch = next((_HATCH[name] for name in css.split() if name in _HATCH), None)
    if hatch is not None:
        return {"facecolor": "none", "edgecolor": _color(css), "hatch": hatch, "linewidth": 0.0}
    opacity = min(_OPACITY.get(name, 1.0) for name in css.split())
    color = _color(css)
    return {"facecolor": color, "linewidth": 0.0} | ({"alpha": opacity} if opacity < 1 else {})
