"""Human-readable quantities: bytes, rates, durations and counts, formatted and parsed."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB


def format_bytes(count: float) -> str:
    """Return a number of bytes with a binary prefix.

    >>> format_bytes(1536)
    '1.5 KiB'
    """
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Return a number with a decimal prefix.

    >>> format_count(1_234_567)
    '1.23M'
    """
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def format_duration(seconds: float) -> str:
    """Return seconds as text with the two largest units that matter.

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


def format_rate(bytes_per_second: float) -> str:
    """Return a bandwidth in bits per second, the unit in which links are sold.

    >>> format_rate(2.5e8), format_rate(1.25e4)
    ('2 Gbit/s', '100 kbit/s')
    """
    bits = 8 * bytes_per_second
    if bits == float("inf"):
        return "unlimited"
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits:.3g} bit/s"


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(?:(bit|B)(?:/s)?|(bps))")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_rate(text: str) -> float:
    """Return a bandwidth in bytes per second.

    Args:
        text: A number above 0 and the unit bit/s or B/s, with an optional k, M, G or T.

    Raises:
        ValueError: The text does not have that form, or the bandwidth is 0.

    >>> parse_rate("10Mbit/s"), parse_rate("1.5 MB/s"), parse_rate("2Gbit")
    (1250000.0, 1500000.0, 250000000.0)
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"{text!r} is not a valid bandwidth: write a number above 0 and a unit, such as "
            "'10Mbit/s' or '1.5 MB/s'"
        )
    return float(match[1]) * _PREFIXES[match[2]] / (1.0 if match[3] == "B" else 8.0)


_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(us|µs|ms|s|min|h|d)?")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Return a duration in seconds.

    Args:
        text: A number, 0 or more, and a unit: us, ms, s, min, h or d. The default unit is s.

    Raises:
        ValueError: The text does not have that form.

    >>> parse_duration("50ms"), parse_duration("1.5 h"), parse_duration("0.8")
    (0.05, 5400.0, 0.8)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not a valid duration: write a number, 0 or more, and a unit, such as "
            "'50ms' or '0.8s'"
        )
    return float(match[1]) * _SECONDS[match[2] or "s"]


_COUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kMGBT]?)")
_THOUSANDS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def parse_count(text: str) -> float:
    """Return a count.

    Args:
        text: A number, 0 or more, with an optional k, M, B (or G) or T.

    Raises:
        ValueError: The text does not have that form.

    >>> parse_count("12e9"), parse_count("12B"), parse_count("1.5T")
    (12000000000.0, 12000000000.0, 1500000000000.0)
    """
    match = _COUNT.fullmatch(text.strip().replace("_", ""))
    if match is None:
        raise ValueError(
            f"{text!r} is not a valid count: write a number, 0 or more, such as '12e9', '12B' or "
            "'4M'"
        )
    return float(match[1]) * _THOUSANDS[match[2]]
