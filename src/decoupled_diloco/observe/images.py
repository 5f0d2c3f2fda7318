"""The charts of a run as one image, drawn by the same functions as on its page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon, Rectangle

from decoupled_diloco.observe import figures
from decoupled_diloco.observe.charts import LIGHT, WIDTHS, Canvas, Chart, Mark
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.timeline import MARKS, TIMELINE_KEYS, draw_mark, timeline_chart

UNITS_PER_INCH = 100.0
POINT = 72.0 / UNITS_PER_INCH
"""A unit of a chart in points."""

HEADING, KEYS, MARGIN = 30.0, 24.0, 14.0
"""Height of a chart's heading and of its keys, and what is free around everything."""

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
    learners = list(figures.colors_of(run).items())
    names = [(css, name) for name, css in learners] if len(learners) <= figures.LEGEND_MAX else []
    plots = [
        (
            "Evaluation loss of the global weights",
            figures.evaluation_chart([("", run)], "time"),
            (),
        ),
        ("Training loss of each learner", figures.learner_losses_chart(run, "time"), names),
        ("What every process did, and when", timeline_chart(run), (*TIMELINE_KEYS, *MARKS.items())),
    ]
    save_charts([(title, chart, keys) for title, chart, keys in plots if chart is not None], path)


def save_charts(plots: Sequence[tuple[str, Chart, Sequence[Key]]], path: str | Path) -> None:
    """Writes charts with headings and keys, one below the other, as an image."""
    drawn = [(title, chart.drawn("wide"), keys) for title, chart, keys in plots]
    width = WIDTHS["wide"] + 2 * MARGIN
    heights = [HEADING + canvas.height + (KEYS if keys else 0.0) for _, canvas, keys in drawn]
    height = max(sum(heights), HEADING) + 2 * MARGIN
    with matplotlib.rc_context({"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}):
        figure = Figure(figsize=(width / UNITS_PER_INCH, height / UNITS_PER_INCH))
        FigureCanvasAgg(figure)
        axes: Axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(-MARGIN, width - MARGIN)
        axes.set_ylim(height - MARGIN, -MARGIN)
        axes.axis("off")
        if not plots:
            _paint(axes, 0.0, _heading("neither a learner nor a shard is on the tape", ""))
        top = 0.0
        for (title, canvas, keys), own in zip(drawn, heights, strict=True):
            _paint(axes, top, _heading(title, "lane value"))
            _paint(axes, top + HEADING, canvas)
            _paint(axes, top + own - KEYS, _keys(keys))
            top += own
        figure.savefig(path, dpi=150, facecolor=LIGHT["page"])


def _heading(title: str, css: str) -> Canvas:
    canvas = Canvas(WIDTHS["wide"], HEADING)
    canvas.text(0, 18, title, css)
    return canvas


def _keys(keys: Sequence[Key]) -> Canvas:
    canvas, at = Canvas(WIDTHS["wide"], KEYS), 44.0
    for css, name in keys:
        if css in MARKS:
            draw_mark(canvas, css, at + 6, 12)
        else:
            canvas.rect(at, 6, 12, 12, css)
        canvas.text(at + 17, 16, name, "tick")
        at += 30 + 6.2 * len(name)
    return canvas


def _paint(axes: Axes, top: float, canvas: Canvas) -> None:
    """Puts what is drawn on a canvas on the image, from a height of it downwards."""
    for number, mark in enumerate(canvas.marks, start=1):
        order = 1 + number / 1000  # what is drawn later lies above
        points = [(x, top + y) for x, y, *_ in mark.places]
        x, y = points[0] if points else (0.0, top)
        match mark.kind:
            case "rect":
                axes.add_patch(Rectangle((x, y), *mark.places[0][2:], **_filled(mark.css, order)))
            case "rects":
                corners = [
                    [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
                    for (x, y), (_, _, w, h) in zip(points, mark.places, strict=True)
                ]
                many = PolyCollection(corners, **_filled(mark.css, order))
                axes.add_collection(many, autolim=False)
            case "stroke":
                axes.plot(*zip(*points, strict=True), zorder=order, **_lined(mark.css))
            case "shape":
                axes.add_patch(Polygon(points, closed=True, **_filled(mark.css, order)))
            case "dot":
                axes.add_patch(Circle((x, y), 3.0, **_filled(mark.css, order)))
            case "text":
                axes.text(x, y, mark.text, zorder=order, **_written(mark))


def _lined(css: str) -> dict[str, Any]:
    classes = css.split()
    return {
        "color": _color(css),
        "alpha": min((_OPACITY.get(name, 1.0) for name in classes), default=1.0),
        "linewidth": POINT * min(_WIDTH[name] for name in classes if name in _WIDTH),
        "linestyle": (0, (3, 3)) if "befalls" in classes else "-",
    }


def _written(mark: Mark) -> dict[str, Any]:
    return {
        "color": _color(mark.css),
        "fontsize": (13 if "lane value" in mark.css else 12) * POINT,
        "fontweight": "bold" if "value" in mark.css.split() else "normal",
        "ha": {"start": "left", "middle": "center", "end": "right"}[mark.anchor],
        "va": "baseline",
    }


def _color(css: str) -> str:
    names = [_NAMED.get(name, name) for name in reversed(css.split())]  # the last one says most
    return next((LIGHT[name] for name in names if name in LIGHT), LIGHT["ink"])


def _filled(css: str, order: float) -> dict[str, Any]:
    hatch = next((_HATCH[name] for name in css.split() if name in _HATCH), None)
    look = {"linewidth": 0.0, "zorder": order}
    if hatch is not None:
        return look | {"facecolor": "none", "edgecolor": _color(css), "hatch": hatch}
    opacity = min(_OPACITY.get(name, 1.0) for name in css.split())
    return look | {"facecolor": _color(css)} | ({"alpha": opacity} if opacity < 1 else {})
