"""A few SVG shapes in the site's colours, on a ground of their own: readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

INK, GREY, FAINT = "#1f2328", "#57606a", "#d0d7de"
BLUE, PALE_BLUE = "#0969da", "#ddf4ff"
GREEN, PALE_GREEN = "#1a7f37", "#dafbe1"
ORANGE, PALE_ORANGE = "#bc4c00", "#fff1e5"
PURPLE = "#8250df"

Point = tuple[float, float]


class Drawing:
    """An SVG picture; shapes are drawn in the order of the calls."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="14">',
            f"<title>{escape(title)}</title>",
            "<defs>",
            *(_arrow_head(colour) for colour in (GREY, BLUE, GREEN, ORANGE)),
            "</defs>",
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        ]

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = INK,
        size: int = 14,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text whose baseline is at y."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" fill="{colour}" font-size="{size}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        stroke: str = BLUE,
        fill: str = PALE_BLUE,
        radius: float = 5,
        opacity: float = 1.0,
    ) -> None:
        """A rectangle with round corners."""
        self._parts.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
            f'rx="{_n(radius)}" stroke="{stroke}" fill="{fill}" opacity="{_n(opacity)}"/>'
        )

    def line(
        self,
        points: Iterable[Point],
        *,
        colour: str = GREY,
        width: float = 1.4,
        arrow: bool = False,
        dashed: bool = False,
    ) -> None:
        """Straight lines from point to point, with an arrow's head at the end."""
        more = f' marker-end="url(#to-{colour[1:]})"' if arrow else ""
        more += ' stroke-dasharray="5 4"' if dashed else ""
        joined = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" '
            f'stroke-width="{_n(width)}"{more}/>'
        )

    def dot(self, x: float, y: float, colour: str = INK, radius: float = 4) -> None:
        """A filled circle."""
        self._parts.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{colour}"/>')

    def svg(self) -> str:
        """The picture."""
        return "\n".join([*self._parts, "</svg>", ""])


def _arrow_head(colour: str) -> str:
    return (
        f'<marker id="to-{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{colour}"/></marker>'
    )


def _n(value: float) -> str:
    """A number with one decimal at most, so that the same picture is the same file everywhere."""
    return f"{value:.1f}".removesuffix(".0")
