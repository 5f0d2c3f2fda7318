"""Records of the event tape, their lines, and the versions in a start record."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.messages import (
    CoordinatorEffect,
    CoordinatorEvent,
    LearnerEffect,
    LearnerEvent,
    LeaseEffect,
    LeaseEvent,
    RelayEffect,
    RelayEvent,
    SyncerEffect,
    SyncerEvent,
)
from decoupled_diloco.storage.files import NOT_JSON
from decoupled_diloco.tape.samples import Sample

SCHEMA = 4
"""Version of the record format. A program reads no other version."""

FOLDER_NAME = "tape"
MERGED_NAME = "tape.jsonl"

SECONDS_MAX = 1e12
"""Limit on wall-clock seconds, thirty thousand years after 1970: a line beyond it is corrupted."""

PROBLEMS_MAX = 10_000
"""Maximum number of torn lines that are reported individually."""

Kind = Literal["start", "event", "effect", "sample"]
_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
Event = SyncerEvent | LearnerEvent | CoordinatorEvent | LeaseEvent | RelayEvent
Effect = SyncerEffect | LearnerEffect | CoordinatorEffect | LeaseEffect | RelayEffect

_CLASSES: dict[str, tuple[type[Any], ...]] = {
    "event": get_args(Event),
    "effect": get_args(Effect),
    "sample": get_args(Sample),
}

to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
"""Encode a value as compact JSON; raises ValueError for numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a tape.

    Attributes:
        at: Seconds of the writing process's own clock.
        process: Name of the process: ``learner-0``, ``shard-1``, ``coordinator``, ``launcher``, ….
        seq: Number of the record within its incarnation, from 0.
        kind: Kind of the record.
        type: Name of the dataclass; ``start`` for start records.
        data: Its fields as plain JSON values.
        cause: For an effect, the ``seq`` of the event that caused it.
        wall: Seconds since the Unix epoch, from ``at`` and the latest start record.
        life: The process's incarnation, from 0: the number of start records before its own.
    """

    at: float
    process: str
    seq: int
    kind: Kind
    type: str
    data: Mapping[str, Any]
    cause: int | None
    wall: float
    life: int

    @property
    def typed(self) -> dict[str, Any]:
        """The fields and the type in one dictionary, as in messages."""
        return {"type": self.type, **self.data}

    def value(self) -> Event | Effect | Sample:
        """Return the event, effect or sample as its dataclass.

        Raises:
            ProtocolError: The fields do not match the dataclass; the message contains the field.
        """
        assert self.kind != "start", "a start record has no dataclass"
        value: Event | Effect | Sample = wire.decode(self.typed, _CLASSES[self.kind])
        return value


class Parser:
    """Parses the lines of one file into records; tracks clocks and incarnations of its process."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self._path = path
        self._problems = problems
        self._number = 0
        self._clocks: dict[str, tuple[float, int]] = {}

    def parse(self, line: bytes) -> Record | None:
        """Parse the next line; for a torn line, record a problem and return ``None``.

        Raises:
            StorageError: The line has another schema.
        """
        self._number += 1
        if not line.strip():
            return None
        try:
            fields = json.loads(line.decode("utf-8", "surrogatepass"))
            version = fields["v"]
            if type(version) is not int:
                raise ValueError("the schema is not an integer")
            if version == SCHEMA:
                return self._record(fields)
        except (ArithmeticError, *NOT_JSON):
            self._note(
                f"{self._path}: line {self._number} is torn and was skipped "
                f"({len(line)} bytes{_shown(line[:40])})"
            )
            return None
        raise StorageError(
            f"{self._path} is an event tape with schema {version}, but this version reads only "
            f"schema {SCHEMA}: read it with the decoupled-diloco version that wrote it"
        )

    def _note(self, problem: str) -> None:
        """Add a problem; the number is limited so that torn lines cannot fill the memory."""
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(problem)
        elif len(self._problems) == PROBLEMS_MAX:
            self._problems.append(f"{self._path}: further problems are not listed")

    def _record(self, fields: dict[str, Any]) -> Record:
        at, process = float(fields["at"]), str(fields["process"])
        name, data = str(fields["type"]), dict(fields["data"])
        if fields["kind"] == "start":
            life = self._clocks[process][1] + 1 if process in self._clocks else 0
            self._clocks[process] = (float(data["wall"]) - float(data["monotonic"]), life)
        if process not in self._clocks:
            self._clocks[process] = (0.0, 0)
            self._note(
                f"{self._path}: {process} has no start record, so its times are from its own clock"
            )
        offset, life = self._clocks[process]
        if not abs(at) + abs(offset) < SECONDS_MAX:
            raise ValueError("the time is out of range")
        kind, seq, cause = _KINDS[fields["kind"]], int(fields["seq"]), fields.get("cause")
        return Record(at, process, seq, kind, name, data, cause, at + offset, life)


def _shown(line: bytes) -> str:
    """Return the start of a line for a message, or that it is not text."""
    text = line.decode(errors="replace")
    return f": {text!r}" if text.isprintable() and "\ufffd" not in text else ", not text"


def format_record(record: Record) -> str:
    fields: dict[str, Any] = {"v": SCHEMA, "at": record.at, "process": record.process}
    fields |= {name: getattr(record, name) for name in ("seq", "kind", "type", "data")}
    if record.cause is not None:
        fields["cause"] = record.cause
    return to_json(fields) + "\n"


def plain_numbers(value: Any) -> Any:
    """Return the JSON value with every number that is not finite replaced by ``None``."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and the numeric libraries, for a start record.

    >>> sorted(versions())
    ['numpy', 'python', 'torch']
    """
    libraries = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {"python": platform.python_version(), **libraries}


def versions_of_bits() -> dict[str, str]:
    """Return the versions that affect results bit by bit, without Python's patch release."""
    major_minor = ".".join(platform.python_version_tuple()[:2])
    return versions() | {"python": major_minor}
