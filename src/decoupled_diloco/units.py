"""Quantities for people: bytes, rates, durations and counts in at most seven characters."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB


def format_bytes(count: float) -> str:
    """Bytes with a binary prefix.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """A plain number with a decimal prefix.

    >>> format_count(1_234_567)
    '1.23M'
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def format_duration(seconds: float) -> str:
    """Seconds as the largest two units that matter.

    >>> format_duration(0.0123), format_duration(75), format_duration(7384)
    ('12.3 ms', '1 min 15 s', '2 h 3 min')
    """
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMG]?)(bit|B)/s")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def parse_rate(text: str) -> float:
    """A bandwidth in bytes a second, from a number with a unit: bit/s or B/s, with k, M or G.

    Raises:
        ValueError: it is not of that form, or zero.

    >>> parse_rate("10Mbit/s"), parse_rate("1.5 MB/s")
    (1250000.0, 1500000.0)
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"{text!r} is no bandwidth: write a number above 0 and a unit, such as '10Mbit/s' or "
            "'1.5 MB/s'"
        )
    return float(match[1]) * _PREFIXES[match[2]] / (8.0 if match[3] == "bit" else 1.0)
