"""Byte ranges: sets of received bytes, and their representation in HTTP headers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from decoupled_diloco.errors import ProtocolError

_LISTED = re.compile(r"([0-9]{1,15})-([0-9]{1,15})")

Range = tuple[int, int]
"""Half open: the bytes from start up to, but not including, stop."""

_CONTENT_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class RangeSet:
    """A set of bytes, as sorted disjoint ranges.

    >>> got = RangeSet()
    >>> got.add(0, 10); got.add(20, 30); got.add(10, 15)
    >>> got.ranges, got.nbytes, got.missing(5, 40)
    ([(0, 15), (20, 30)], 25, [(15, 20), (30, 40)])
    """

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self.ranges: list[Range] = []
        for start, stop in ranges:
            self.add(start, stop)

    @property
    def nbytes(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def add(self, start: int, stop: int) -> None:
        """Add the bytes from start to stop, and merge ranges that touch."""
        if stop <= start:
            return
        apart = [r for r in self.ranges if r[1] < start or r[0] > stop]
        touching = [r for r in self.ranges if not (r[1] < start or r[0] > stop)]
        merged = (min([start, *(r[0] for r in touching)]), max([stop, *(r[1] for r in touching)]))
        self.ranges = sorted([*apart, merged])

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether any byte from start to stop is in the set."""
        return any(max(start, r[0]) < min(stop, r[1]) for r in self.ranges)

    def missing(self, start: int, stop: int) -> list[Range]:
        """Return the ranges between start and stop that are not in the set."""
        gaps, position = [], start
        for left, right in self.ranges:
            if right <= position or left >= stop:
                continue
            if left > position:
                gaps.append((position, left))
            position = max(position, right)
        if position < stop:
            gaps.append((position, stop))
        return gaps


class Window:
    """A part of a payload, indexed by offsets in the whole payload.

    >>> part = Window(memoryview(bytearray(b"cd")), first=2, total=6)
    >>> len(part), part.end, bytes(part[3:4])
    (6, 4, b'd')

    Args:
        view: The bytes of the part.
        first: Offset of the part in the whole payload.
        total: Size of the whole payload; default: it ends with the part.
    """

    def __init__(self, view: memoryview, first: int = 0, total: int | None = None) -> None:
        self.view = view.cast("B")
        self.first = first
        self.end = first + len(self.view)
        self.total = self.end if total is None else total
        assert 0 <= first <= self.end <= self.total, f"{first} to {self.end} of {self.total}"

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, part: slice) -> memoryview:
        return self.view[part.start - self.first : part.stop - self.first]

    def __setitem__(self, part: slice, piece: bytes | memoryview) -> None:
        self.view[part.start - self.first : part.stop - self.first] = piece


def write_content_range(start: int, stop: int, total: int) -> str:
    """Return the `Content-Range` of a half-open range."""
    return f"bytes {start}-{stop - 1}/{total}"


def read_content_range(text: str) -> tuple[int, int, int] | None:
    """Return (start, stop, total), or None if the header is not a plain byte range."""
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        return None
    first, last, total = (int(group) for group in match.groups())
    return (first, last + 1, total) if first <= last < total else None


def write_range(start: int, stop: int) -> str:
    """Return the `Range` header of a half-open range."""
    return f"bytes={start}-{stop - 1}"


def read_range(text: str) -> Range | None:
    """Return (start, stop) of a single explicit range, the only kind that is served."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2])
    return (first, last + 1) if first <= last else None


def write_list(ranges: Iterable[Range]) -> str:
    """Return half-open ranges as text.

    >>> read_list(write_list([(0, 4), (8, 9)]))
    [(0, 4), (8, 9)]
    """
    return ",".join(f"{start}-{stop}" for start, stop in ranges)


def read_list(text: str) -> list[Range]:
    """Parse the ranges that `write_list` wrote.

    Raises:
        ProtocolError: The text is not such a list.
    """
    found = [_LISTED.fullmatch(part) for part in text.split(",") if part]
    if not all(found):
        raise ProtocolError(f"{text[:100]!r} is not a valid list of byte ranges")
    return [(int(each[1]), int(each[2])) for each in found if each]


CHUNK_BYTES = 4 << 20
"""A tenth of a second at 300 Mbit/s: small against a stall, large against a round trip."""


def chunk_sizes(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Return the sizes of a payload's chunks, in order.

    >>> chunk_sizes(10, 4), chunk_sizes(8, 4), chunk_sizes(0, 4)
    ((4, 4, 2), (4, 4), ())
    """
    whole, rest = divmod(nbytes, chunk_bytes)
    return (chunk_bytes,) * whole + ((rest,) if rest else ())
