"""Plot of utilization over bandwidth; lines differ by dash and marker, not only by color."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from decoupled_diloco_plan.bandwidth import measured
from decoupled_diloco_plan.bandwidth.compare import gbit
from decoupled_diloco_plan.output import save_picture

Points = Sequence[tuple[float, float]]

INK, FAINT, GRID = "#1c2024", "#60646c", "#e0e2e6"
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": GRID,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "legend.fontsize": 9,
}
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v")
COLORS = ("#000000", "#D55E00", "#009E73", "#0072B2", "#7a5c00")


def save_curves(
    curves: Mapping[str, Points],
    path: Path,
    *,
    title: str,
    given: float | None = None,
    error_of: str | None = None,
) -> None:
    """Write the plot on a white background; the file's suffix selects the format.

    Points are (bandwidth in bytes per second, utilization). `given` marks a bandwidth. The line
    `error_of` gets the measured error as a band.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.6), layout="constrained")
        axes = figure.subplots()
        for number, (name, points) in enumerate(curves.items()):
            _draw(axes, name, points, number, banded=name == error_of)
        if given is not None:
            axes.axvline(gbit(given), color="#60646c", linewidth=1.0)
            axes.annotate(
                "given",
                (gbit(given), 1.02),
                xycoords=("data", "axes fraction"),
                ha="center",
                color="#60646c",
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(0, 1.03)
        axes.set_xlabel("bandwidth of a site's link, Gbit/s")
        axes.set_ylabel("utilization, % of the time")
        axes.set_title(title, pad=18)
        axes.legend(handlelength=3.6, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        save_picture(figure, path)


def _draw(axes: Axes, name: str, points: Points, number: int, *, banded: bool) -> None:
    bandwidth = [gbit(rate) for rate, _ in points]
    share = [value for _, value in points]
    color = COLORS[number % len(COLORS)]
    axes.plot(
        bandwidth,
        share,
        linestyle=LINES[number % len(LINES)],
        marker=MARKERS[number % len(MARKERS)],
        markevery=(number, 5),
        markersize=4.5,
        color=color,
        label=f"{name}\n(band: measured error)" if banded else name,
    )
    if banded:
        error = measured.UTILIZATION_ERRORS["never"]
        low = [max(0.0, value - error) for value in share]
        high = [min(1.0, value + error) for value in share]
        axes.fill_between(bandwidth, low, high, color=color, alpha=0.15, linewidth=0)
