"""Spans of a run's processes, the elements of a trace, with stable ids.

The same tape always gives the same ids, wherever it is read. A trace id depends on the incarnation
of the shard that ran the round. A span id depends on its trace and its subject. A collector that
receives a run twice therefore has every span once.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from decoupled_diloco.tape.records import Record

KEPT_MAX = 20_000
"""Entries of each table of items that wait for another process's tape; the oldest are dropped."""

NS_MAX = 2**63 - 1
"""Largest instant of a clock; a record with a later one is corrupted."""

NANOSECONDS = 1_000_000_000

Kind = Literal["internal", "client", "server", "producer", "consumer"]
Attribute = str | bool | int | float
Attributes = dict[str, Attribute]

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Process:
    """One incarnation of a process: ``shard-0``, ``learner-3`` and so on.

    ``run``: the run's name; ``started``: seconds since 1970 at which it began; ``release``: the
    program's version.
    """

    name: str
    run: str
    started: float
    release: str = ""

    @property
    def instance(self) -> str:
        """A name that no other incarnation has.

        >>> Process("shard-0", "quickstart", 1.5).instance
        'shard-0@1970-01-01T00:00:01.500000Z'
        """
        at = datetime.fromtimestamp(min(max(self.started, 0.0), 2.5e11), UTC)
        return f"{self.name}@{at.strftime('%Y-%m-%dT%H:%M:%S.%fZ')}"

    @classmethod
    def of(cls, record: Record) -> Process:
        """Return the incarnation that begins with a start record."""
        header = record.data.get("header")
        settings = header.get("settings") if isinstance(header, dict) else None
        run = settings.get("run") if isinstance(settings, dict) else None
        name = str(run.get("name", "")) if isinstance(run, dict) else ""
        return cls(record.process, name, record.wall, str(record.data.get("version", "")))


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event in a span, at nanoseconds since 1970."""

    name: str
    at: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """A related span."""

    trace: int
    span: int


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one process. Instants are nanoseconds since 1970.

    ``trace``: 128 bits; ``id`` and ``parent``: 64 bits, no parent for a trace's root. ``error``:
    why it failed; empty if it did not.
    """

    trace: int
    id: int
    parent: int | None
    name: str
    process: Process
    start: int
    end: int
    kind: Kind = "internal"
    attributes: Attributes = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    link: Link | None = None
    error: str = ""


def trace_id(shard: Process, fragment: int, round: int) -> int:
    """Return the id of the trace of one fragment's round: 128 bits, never 0."""
    return _hash(16, shard.run, shard.instance, fragment, round)


def span_id(trace: int, *about: object) -> int:
    """Return the id of a span about a subject in its trace: 64 bits, never 0."""
    return _hash(8, trace, *about)


def _hash(nbytes: int, *parts: Any) -> int:
    # Unlike hash(), this is the same in every process. OpenTelemetry reserves the id 0.
    text = "\0".join(map(str, parts)).encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=nbytes).digest()) or 1


def ns_of(wall: float) -> int:
    """Convert seconds since 1970 to nanoseconds, rounded to the microsecond of wall clocks.

    Raises:
        ValueError: The value is outside the range of a clock.
    """
    if not 0.0 <= wall < NS_MAX / NANOSECONDS:
        raise ValueError(f"{wall} s since 1970 is not a valid time")
    return round(wall * 1e6) * 1000


class Kept(OrderedDict[_K, _V]):
    """A table of the newest ``KEPT_MAX`` entries."""

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        if len(self) > KEPT_MAX:
            self.popitem(last=False)
