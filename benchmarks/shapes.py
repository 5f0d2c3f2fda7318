"""What the tables of all benchmarks are written with."""

from __future__ import annotations

import statistics


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(value: dict[str, float], digits: int = 2) -> str:
    return f"{value['median']:.{digits}f} ({value['min']:.{digits}f} to {value['max']:.{digits}f})"


def few(values: list[float], digits: int, unit: str) -> str:
    """The median of a few values, and the smallest and largest if there are several."""
    if not values:
        return ""
    shown = f"{statistics.median(values):,.{digits}f}"
    if len(values) > 1:
        shown += f" ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
    return shown + unit


def percent(interval: dict[str, float] | None) -> str:
    """A mean in per cent with its interval; nothing where there is none."""
    if interval is None:
        return ""
    if "low" not in interval:
        return f"{interval['mean']:+.2f} %"
    return f"{interval['mean']:+.2f} % [{interval['low']:+.2f}, {interval['high']:+.2f}]"
