"""The canvas of all pictures: SVG charts for pages that load nothing from other hosts.

A chart uses CSS classes, never colors; the page's style sheet maps them to light and dark colors.
Each chart is drawn twice, for a phone and for a wide window, and the style sheet shows one of them.
The letters therefore stay as large as those of the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

from markupsafe import Markup

WIDTHS = {"wide": 1040, "narrow": 400}
"""Widths of the two drawings, in units of about one pixel."""

LETTER = 7.0
"""Approximate width of a letter in a chart."""

LIGHT = {
    "page": "#ffffff", "card": "#f6f7f9", "ink": "#1a1e23", "faint": "#5b6169", "line": "#dfe2e6",
    "accent": "#0067a5", "warn": "#a8420a", "warn-page": "#fff4ea", "shade": "#0b0d1017",
    "edge": "#0b0d1030", "c0": "#0072b2", "c1": "#d08a00", "c2": "#009e73", "c3": "#c0649a",
    "c4": "#3f9fd8", "c5": "#7a5c00", "useful": "#1f8a5b", "discarded": "#e0a030",
    "waiting": "#9a6bc0", "down": "#cc4125", "joining": "#2f80c0", "other": "#a9b0b8",
    "merged": "#0a7d8c", "abandoned": "#d55e00", "idle": "#a9b0b8", "second": "#b36b00",
    "quorum": "#9aa3af", "grace": "#e0b93a", "upload": "#0072b2", "merge": "#009e73",
    "heat": "#0a7d8c", "none": "#eceef1",
}  # fmt: skip
DARK = {
    "page": "#101215", "card": "#181b1f", "ink": "#edeef0", "faint": "#a9afb7", "line": "#343a41",
    "accent": "#6cb4ea", "warn": "#ffb074", "warn-page": "#2b1d10", "shade": "#ffffff1c",
    "edge": "#ffffff38", "c0": "#56a8e0", "c1": "#e69f00", "c2": "#2fc79a", "c3": "#e29bc4",
    "c4": "#9bd4f5", "c5": "#d9c26a", "useful": "#2f9e6e", "discarded": "#d99a2b",
    "waiting": "#b98bd9", "down": "#f2705a", "joining": "#56a8e0", "other": "#6b727b",
    "merged": "#3fb8c6", "abandoned": "#ff8a3d", "idle": "#6b727b", "second": "#e69f00",
    "quorum": "#8a93a0", "grace": "#d9c26a", "upload": "#56a8e0", "merge": "#2fc79a",
    "heat": "#3fb8c6", "none": "#262b31",
}  # fmt: skip
"""Colors by name. Those of learners resemble Okabe and Ito's palette for color-blind readers."""

Point = tuple[float, float]
Place = tuple[float, float, float, float]
"""A rectangle: x, y, width, height."""


class Mark(NamedTuple):
    """One drawn element; ``title``: its tooltip."""

    kind: Literal["rect", "rects", "stroke", "shape", "dot", "text"]
    places: Sequence[tuple[float, ...]]  # for rectangles: `Place`, otherwise `Point`
    css: str
    title: str = ""
    text: str = ""
    anchor: str = "start"


class Canvas:
    """The drawn elements, in order; y grows downwards."""

    def __init__(self, width: float, height: float, *, narrow: bool = False) -> None:
        self.width, self.height, self.narrow = width, height, narrow
        self.marks: list[Mark] = []

    def rect(
        self, x: float, y: float, width: float, height: float, css: str, title: str = ""
    ) -> None:
        self.marks.append(Mark("rect", [(x, y, width, height)], css, title))

    def rects(self, rects: Sequence[Place], css: str) -> None:
        """Draw many rectangles of one class as a single element."""
        self.marks.append(Mark("rects", rects, css))

    def stroke(self, points: Sequence[Point], css: str, title: str = "") -> None:
        self.marks.append(Mark("stroke", points, css, title))

    def shape(self, points: Sequence[Point], css: str, title: str = "") -> None:
        """Draw a filled area within a closed line."""
        self.marks.append(Mark("shape", points, css, title))

    def dot(self, point: Point, css: str, title: str = "") -> None:
        self.marks.append(Mark("dot", [point], css, title))

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        """Draw a line of text; ``y`` is its baseline."""
        self.marks.append(Mark("text", [(x, y)], css, "", text, anchor))

    def line(self, points: Sequence[Point], css: str, title: str = "") -> None:
        """Draw a line of data; a single point becomes a dot."""
        if len(points) == 1:
            self.dot(points[0], css, title)
        elif points:
            self.stroke(points, f"line {css}", title)

    def area(self, points: Sequence[Point], base: float, css: str) -> None:
        """Fill the area between a line and the height ``base``."""
        if points:
            self.shape([(points[0][0], base), *points, (points[-1][0], base)], css)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, drawn on a separate canvas for each width."""

    label: str  # one sentence for screen readers
    height: Callable[[bool], float]  # given whether it is narrow
    draw: Callable[[Canvas], None]

    def drawn(self, width: str) -> Canvas:
        """Return the drawing for one of the `WIDTHS`."""
        narrow = width == "narrow"
        canvas = Canvas(WIDTHS[width], self.height(narrow), narrow=narrow)
        self.draw(canvas)
        return canvas

    def __html__(self) -> Markup:
        """Return both drawings, for wide windows and for phones."""
        head = Markup('<svg class="chart {}" viewBox="0 0 {} {}" role="img" aria-label="{}">')
        html = Markup("")
        for width in WIDTHS:
            canvas = self.drawn(width)
            html += head.format(width, _short(canvas.width), _short(canvas.height), self.label)
            html += Markup("").join(map(_element, canvas.marks)) + Markup("</svg>")
        return html


STANDALONE = """\
text{font:12px system-ui,sans-serif;fill:#444}.name{font-weight:600}
.grid{stroke:#ddd}.line{fill:none;stroke-width:2}.stroke{fill:none}
.a{stroke:#1f6fb4;fill:#1f6fb4}.b{stroke:#c2571a;fill:#c2571a}.c{stroke:#2c8a4b;fill:#2c8a4b}
.line.a,.line.b,.line.c{fill:none}.limit{stroke:#b3261e;stroke-dasharray:5 4}
text.a,text.b,text.c{stroke:none}
"""
"""The style of a chart in a file of its own: lines a, b and c, and a dashed limit."""


def standalone(chart: Chart) -> str:
    """Return a chart as the text of an SVG file, for a wide window."""
    canvas = chart.drawn("wide")
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="{1}" viewBox="0 0 {0} {1}" '
        'role="img" aria-label="{2}"><style>{3}</style>'
        '<rect width="100%" height="100%" fill="#fff"/>'
    ).format(_short(canvas.width), _short(canvas.height), chart.label, STANDALONE)
    return str(head + Markup("").join(map(_element, canvas.marks)) + Markup("</svg>\n"))


def _element(mark: Mark) -> Markup:
    """Return a mark as an SVG element; many rectangles become one element."""
    shown = [tuple(map(_short, place)) for place in mark.places]
    css, points = mark.css, [" ".join(place) for place in shown]
    if mark.kind == "rect":
        x, y, width, height = shown[0]
        tag, values = "rect", {"x": x, "y": y, "width": width, "height": height}
    elif mark.kind == "rects":
        paths = [f"M{x} {y}h{w}v{h}h{_short(-float(w))}z" for x, y, w, h in shown]
        tag, values = "path", {"d": "".join(paths)}
    elif mark.kind == "stroke":
        tag, values = "polyline", {"points": " ".join(",".join(place) for place in shown)}
    elif mark.kind == "shape":
        tag, values = "path", {"d": f"M{'L'.join(points)}z"}
    elif mark.kind == "dot":
        css = f"dot {css}"
        tag, values = "circle", {"cx": shown[0][0], "cy": shown[0][1], "r": "3"}
    else:
        tag, values = "text", {"x": shown[0][0], "y": shown[0][1], "text-anchor": mark.anchor}
    attributes = Markup("").join(
        Markup(' {}="{}"').format(name, value) for name, value in {**values, "class": css}.items()
    )
    inner = Markup("<title>{}</title>").format(mark.title) if mark.title else Markup("")
    inner += mark.text
    ending = Markup(">{}</{}>").format(inner, tag) if inner else Markup("/>")
    return Markup("<{}{}{}").format(tag, attributes, ending) if shown else Markup("")


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear map from values to places on the canvas."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.begin + (value - self.low) / span * (self.end - self.begin)


@dataclass(frozen=True, slots=True)
class Frame:
    """The plotting area, with its two axes."""

    x: Axis
    y: Axis

    def points(self, values: Iterable[Point]) -> list[Point]:
        return [(self.x(a), self.y(b)) for a, b in values]


def framed(
    canvas: Canvas,
    x: tuple[float, float, str],
    y: tuple[float, float, str],
    show_x: Callable[[float], str] = "{:g}".format,
    show_y: Callable[[float], str] = "{:g}".format,
) -> Frame:
    """Draw the grid, ticks and names of two axes, each given as (low, high, name)."""
    left, bottom, top = 44.0, canvas.height - 36, 22.0
    frame = Frame(Axis(*x[:2], left, canvas.width - 12), Axis(*y[:2], bottom, top))
    for tick in round_numbers(*y[:2], 6):
        at = frame.y(tick)
        canvas.stroke([(left, at), (canvas.width - 12, at)], "grid")
        canvas.text(left - 6, at + 4, show_y(tick), "tick", "end")
    for tick in round_numbers(*x[:2], 4 if canvas.narrow else 9):
        at = frame.x(tick)
        canvas.stroke([(at, bottom), (at, bottom + 4)], "grid")
        canvas.text(at, bottom + 17, show_x(tick), "tick", "middle")
    canvas.text((left + canvas.width - 12) / 2, canvas.height - 4, x[2], "name", "middle")
    canvas.text(2, 12, y[2], "name")
    return frame


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Return about ``most`` round numbers between two limits: 1, 2 or 5 times a power of ten.

    >>> round_numbers(0.0, 251.7, 6)
    [0.0, 50.0, 100.0, 150.0, 200.0, 250.0]
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def picture(caption: str, rows: Sequence[str]) -> Markup:
    """Return a gray picture from the rows of a `GrayPicture`, in the color of the text."""
    paths = Markup("")
    for level in "123456789":
        runs = ""
        for y, row in enumerate(rows):
            x = 0
            for pixel, run in groupby(row):
                width = len(tuple(run))
                if pixel == level:
                    runs += f"M{x} {y}h{width}v1h-{width}z"
                x += width
        if runs:
            paths += Markup('<path d="{}" fill-opacity="{:.2f}"/>').format(runs, int(level) / 9)
    columns = max(map(len, rows), default=0)
    return Markup(
        '<svg class="picture" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>'
    ).format(columns, len(rows), caption, paths)


def stacked_bar(parts: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """Return a horizontal bar of parts; each has a class, a share (0 to 1) and a title."""
    rect = Markup('<rect x="{:.2f}" width="{:.2f}" height="10" class="{}"><title>{}</title></rect>')
    at, rects = 0.0, Markup("")
    for css, share, title in parts:
        if share > 0:
            rects += rect.format(1000 * at, 1000 * share, css, title)
        at += share
    head = Markup(
        '<svg class="bar" viewBox="0 0 1000 10" preserveAspectRatio="none" role="img" '
        'aria-label="{}">'
    ).format(label)
    return head + rects + Markup("</svg>")


def _short(value: float) -> str:
    """Format a coordinate to a tenth of a pixel.

    >>> _short(3.0), _short(-0.04), _short(12.345)
    ('3', '0', '12.3')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
