"""What a trace is made of: spans of the processes of a run, with names that never change.

The same tape gives the same ids, however often and from wherever it is read: a trace's comes from
the life of the shard that held the round, a span's from its trace and what it is about. So a
collector that is sent a run twice has every span once.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from decoupled_diloco.observe.records import Record

KEPT_MAX = 20_000
"""Entries of each table of what waits for another process's tape; the oldest are forgotten."""

NS_MAX = 2**63 - 1
"""Later than that no clock shows: such a record is spoilt."""

NANOSECONDS = 1_000_000_000

Kind = Literal["internal", "client", "server", "producer", "consumer"]
Attribute = str | bool | int | float
Attributes = dict[str, Attribute]

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Process:
    """One life of a process: ``shard-0``, ``learner-3`` and so on.

    ``run``: the run's name; ``started``: seconds since 1970 at which it began; ``release``: of the
    program.
    """

    name: str
    run: str
    started: float
    release: str = ""

    @property
    def instance(self) -> str:
        """A name that no other life has.

        >>> Process("shard-0", "quickstart", 1.5).instance
        'shard-0@1970-01-01T00:00:01.500000Z'
        """
        at = datetime.fromtimestamp(min(max(self.started, 0.0), 2.5e11), UTC)
        return f"{self.name}@{at.strftime('%Y-%m-%dT%H:%M:%S.%fZ')}"

    @classmethod
    def of(cls, record: Record) -> Process:
        """The life that begins with a start record."""
        header = record.data.get("header")
        settings = header.get("settings") if isinstance(header, dict) else None
        run = settings.get("run") if isinstance(settings, dict) else None
        name = str(run.get("name", "")) if isinstance(run, dict) else ""
        return cls(record.who, name, record.wall, str(record.data.get("version", "")))


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened in a span, at nanoseconds since 1970."""

    name: str
    at: int
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that has to do with this one."""

    trace: int
    span: int


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one process. Instants are nanoseconds since 1970.

    ``trace``: 128 bits; ``id`` and ``parent``: 64 bits, no parent for a trace's root. ``error``:
    why it failed; empty: it did not.
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
    """Of a round of one fragment: 128 bits, never 0."""
    return _hash(16, shard.run, shard.instance, fragment, round)


def span_id(trace: int, *about: object) -> int:
    """Of what a span is about, in its trace: 64 bits, never 0."""
    return _hash(8, trace, *about)


def _hash(nbytes: int, *parts: Any) -> int:
    text = "\0".join(map(str, parts)).encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=nbytes).digest()) or 1


def ns_of(wall: float) -> int:
    """Nanoseconds of seconds since 1970, to the microsecond, which is what a wall clock holds.

    Raises:
        ValueError: No clock shows this.
    """
    if not 0.0 <= wall < NS_MAX / NANOSECONDS:
        raise ValueError(f"no clock shows {wall} s since 1970")
    return round(wall * 1e6) * 1000


class Kept(OrderedDict[_K, _V]):
    """A table of the newest ``KEPT_MAX`` entries."""

    def __setitem__(self, key: _K, value: _V) -> None:
        super().__setitem__(key, value)
        if len(self) > KEPT_MAX:
            self.popitem(last=False)
