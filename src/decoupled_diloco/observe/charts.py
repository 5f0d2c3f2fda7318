"""Charts that are drawn once, for pages that fetch nothing and run no script, and for images.

A chart names classes, never colours: the page's style gives them for light and for dark, and
`decoupled_diloco.observe.images` the light ones. On a page each chart is drawn twice, for a phone
and for a wide window; the style shows one, so that letters stay as large as those of the page.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTHS = {"wide": 1040, "narrow": 400}
"""Widths of the two drawings, in units that are about one pixel."""

LETTER = 7.0
"""About the width of a letter of a chart."""

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
"""Colours by name; those of learners are near Okabe's and Ito's, for colour-blind eyes."""

Point = tuple[float, float]


class Canvas(ABC):
    """Something that is drawn on; y grows downwards. ``title``: what shows under a pointer."""

    def __init__(self, width: float, height: float, *, narrow: bool = False) -> None:
        self.width, self.height, self.narrow = width, height, narrow

    @abstractmethod
    def rect(
        self, x: float, y: float, width: float, height: float, css: str, title: str = ""
    ) -> None: ...

    @abstractmethod
    def rects(self, rects: Iterable[tuple[float, float, float, float]], css: str) -> None:
        """Many rectangles (x, y, width, height) of one kind."""

    @abstractmethod
    def stroke(self, points: Sequence[Point], css: str, title: str = "") -> None: ...

    @abstractmethod
    def shape(self, points: Sequence[Point], css: str, title: str = "") -> None:
        """What lies within a closed line."""

    @abstractmethod
    def dot(self, point: Point, css: str, title: str = "") -> None: ...

    @abstractmethod
    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        """A line of text; ``y`` is its baseline."""

    def line(self, points: Sequence[Point], css: str, title: str = "") -> None:
        """A line of data; a single point is a dot."""
        if len(points) == 1:
            self.dot(points[0], css, title)
        elif points:
            self.stroke(points, f"line {css}", title)

    def area(self, points: Sequence[Point], base: float, css: str) -> None:
        """What lies between a line and the height ``base``."""
        if points:
            self.shape([(points[0][0], base), *points, (points[-1][0], base)], css)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart that can be drawn on any canvas.

    Attributes:
        label: What it shows, in a sentence, for those who do not see it.
        height: Its height, given whether it is narrow.
        draw: Draws it.
    """

    label: str
    height: Callable[[bool], float]
    draw: Callable[[Canvas], None]

    def __html__(self) -> Markup:
        """For wide windows and for phones."""
        drawings = []
        for name, width in WIDTHS.items():
            canvas = SvgCanvas(width, self.height(name == "narrow"), narrow=name == "narrow")
            self.draw(canvas)
            drawings.append(canvas.svg(self.label, name))
        return Markup("").join(drawings)


class SvgCanvas(Canvas):
    """An SVG picture that is being drawn, as text."""

    def __init__(self, width: float, height: float, *, narrow: bool = False) -> None:
        super().__init__(width, height, narrow=narrow)
        self._parts: list[Markup] = []

    def _add(self, element: str, text: str = "", title: str = "", **attributes: object) -> None:
        """One element; of attribute names ``_`` becomes ``-``, and ``css`` is the class."""
        told = Markup("")
        for key, value in attributes.items():
            name = "class" if key == "css" else key.replace("_", "-")
            shown = _short(value) if isinstance(value, float) else value
            told += Markup(' {}="{}"').format(name, shown)
        inner = Markup("<title>{}</title>").format(title) if title else Markup("")
        inner += text
        ending = Markup(">{}</{}>").format(inner, element) if inner else Markup("/>")
        self._parts.append(Markup("<{}{}{}").format(element, told, ending))

    def rect(
        self, x: float, y: float, width: float, height: float, css: str, title: str = ""
    ) -> None:
        self._add("rect", title=title, x=x, y=y, width=width, height=height, css=css)

    def rects(self, rects: Iterable[tuple[float, float, float, float]], css: str) -> None:
        path = "".join(
            f"M{_short(x)} {_short(y)}h{_short(w)}v{_short(h)}h{_short(-w)}z"
            for x, y, w, h in rects
        )
        if path:
            self._add("path", d=path, css=css)

    def stroke(self, points: Sequence[Point], css: str, title: str = "") -> None:
        path = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
        self._add("polyline", title=title, points=path, css=css)

    def shape(self, points: Sequence[Point], css: str, title: str = "") -> None:
        path = "L".join(f"{_short(x)} {_short(y)}" for x, y in points)
        self._add("path", title=title, d=f"M{path}z", css=css)

    def dot(self, point: Point, css: str, title: str = "") -> None:
        self._add("circle", title=title, cx=point[0], cy=point[1], r=3.0, css=f"dot {css}")

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        self._add("text", text, x=x, y=y, text_anchor=anchor, css=css)

    def svg(self, label: str, css: str) -> Markup:
        head = Markup('<svg class="chart {}" viewBox="0 0 {} {}" role="img" aria-label="{}">')
        opened = head.format(css, _short(self.width), _short(self.height), label)
        return opened + Markup("").join(self._parts) + Markup("</svg>")


@dataclass(frozen=True, slots=True)
class Axis:
    """From numbers to places on the canvas."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.begin + (value - self.low) / span * (self.end - self.begin)


@dataclass(frozen=True, slots=True)
class Frame:
    """The plotting area: two axes, with their grid drawn."""

    x: Axis
    y: Axis

    def points(self, values: Iterable[Point]) -> list[Point]:
        return [(self.x(a), self.y(b)) for a, b in values]


def framed(
    canvas: Canvas,
    x: tuple[float, float, str],
    y: tuple[float, float, str],
    show_x: Callable[[float], str] = "{:g}".format,
) -> Frame:
    """Draws grid, numbers and names of two axes (low, high, name)."""
    left, bottom, top = 44.0, canvas.height - 36, 22.0
    frame = Frame(Axis(*x[:2], left, canvas.width - 12), Axis(*y[:2], bottom, top))
    for tick in round_numbers(*y[:2], 6):
        at = frame.y(tick)
        canvas.stroke([(left, at), (canvas.width - 12, at)], "grid")
        canvas.text(left - 6, at + 4, f"{tick:g}", "tick", "end")
    for tick in round_numbers(*x[:2], 4 if canvas.narrow else 9):
        at = frame.x(tick)
        canvas.stroke([(at, bottom), (at, bottom + 4)], "grid")
        canvas.text(at, bottom + 17, show_x(tick), "tick", "middle")
    canvas.text((left + canvas.width - 12) / 2, canvas.height - 4, x[2], "name", "middle")
    canvas.text(2, 12, y[2], "name")
    return frame


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two numbers, at most about ``most``.

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


def stacked_bar(parts: Sequence[tuple[str, float, str]], label: str) -> Markup:
    """A bar as wide as its place, cut by shares.

    Args:
        parts: Class, share between 0 and 1, and a title, from the left.
        label: What it shows, in a sentence.
    """
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
    """A number of a picture, to a tenth of a pixel.

    >>> _short(3.0), _short(-0.04), _short(12.345)
    ('3', '0', '12.3')
    """
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text
