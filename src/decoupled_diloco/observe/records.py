"""Records of the event tape, and how they are written as lines and parsed again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe.samples import Sample
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.effects import CoordinatorEffect, LearnerEffect, SyncerEffect
from decoupled_diloco.protocol.events import CoordinatorEvent, LearnerEvent, SyncerEvent
from decoupled_diloco.protocol.shard_lease import LeaseEffect, LeaseEvent
from decoupled_diloco.storage.files import NOT_JSON

SCHEMA = 3
"""Version of the record. A program reads no other one."""

FOLDER_NAME = "tape"
MERGED_NAME = "tape.jsonl"

SECONDS_MAX = 1e12
"""No clock that began in 1970 shows more for thirty thousand years: such a line is spoilt."""

PROBLEMS_MAX = 10_000
"""So many torn lines are told of one by one."""

Kind = Literal["start", "event", "effect", "sample"]
Event = SyncerEvent | LearnerEvent | CoordinatorEvent | LeaseEvent
Effect = SyncerEffect | LearnerEffect | CoordinatorEffect | LeaseEffect

_CLASSES: dict[str, tuple[type[Any], ...]] = {
    "event": get_args(Event),
    "effect": get_args(Effect),
    "sample": get_args(Sample),
}

to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
"""Compact JSON; refuses numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a tape.

    Attributes:
        at: Seconds of the writing process's own clock.
        who: Name of the process: ``learner-0``, ``shard-1``, ``coordinator``, ``launcher``, ….
        seq: Number of the record within its life, from 0.
        kind: What it is.
        type: Name of the dataclass; ``start`` for start records.
        data: Its fields as plain JSON values.
        cause: For effects: ``seq`` of the event that caused it.
        wall: Seconds since the Unix epoch, from ``at`` and the latest start record.
        life: How many start records of this process came before its own, from 0.
    """

    at: float
    who: str
    seq: int
    kind: Kind
    type: str
    data: Mapping[str, Any]
    cause: int | None
    wall: float
    life: int

    @property
    def typed(self) -> dict[str, Any]:
        """Its fields and their type in one table, as in messages."""
        return {"type": self.type, **self.data}

    def value(self) -> Event | Effect | Sample:
        """The event, effect or sample as its dataclass.

        Raises:
            ProtocolError: The fields are not those of the dataclass; the message names the field.
        """
        assert self.kind != "start", "a start record holds a plain table"
        value: Event | Effect | Sample = wire.decode(self.typed, _CLASSES[self.kind])
        return value


class Parser:
    """Turns the lines of one file into records; knows its process's clocks and lives."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self._path = path
        self._problems = problems
        self._number = 0
        self._clocks: dict[str, tuple[float, int]] = {}

    def parse(self, line: bytes) -> Record | None:
        """The record of the next line, or ``None`` for one that is torn: that is a problem."""
        self._number += 1
        if not line.strip():
            return None
        try:
            fields = json.loads(line.decode("utf-8", "surrogatepass"))
            version = fields["v"]
            if type(version) is not int:
                raise ValueError("the schema is a number")
            if version == SCHEMA:
                return self._record(fields)
        except (ArithmeticError, *NOT_JSON):
            self._note(
                f"{self._path}: line {self._number} is torn and was left out "
                f"({len(line)} bytes{_shown(line[:40])})"
            )
            return None
        raise StorageError(
            f"{self._path} is an event tape of schema {version}, but this version reads schema "
            f"{SCHEMA} only: read it with the decoupled-diloco that wrote it"
        )

    def _note(self, problem: str) -> None:
        """A file of nothing but torn lines must not fill the memory with what is said of them."""
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(problem)
        elif len(self._problems) == PROBLEMS_MAX:
            self._problems.append(f"{self._path}: what follows is torn, too, and is not counted")

    def _record(self, fields: dict[str, Any]) -> Record:
        at, who = float(fields["at"]), str(fields["who"])
        name, data = str(fields["type"]), dict(fields["data"])
        if fields["kind"] == "start":
            life = self._clocks[who][1] + 1 if who in self._clocks else 0
            self._clocks[who] = (float(data["wall"]) - float(data["monotonic"]), life)
        if who not in self._clocks:
            self._clocks[who] = (0.0, 0)
            self._note(
                f"{self._path}: no start record of {who}, so its times are those of its own clock"
            )
        offset, life = self._clocks[who]
        if not abs(at) + abs(offset) < SECONDS_MAX:
            raise ValueError("no clock shows this")
        kind, seq, cause = _kind(fields["kind"]), int(fields["seq"]), fields.get("cause")
        return Record(at, who, seq, kind, name, data, cause, at + offset, life)


def _shown(line: bytes) -> str:
    """The beginning of a line that can be read by people."""
    text = line.decode(errors="replace")
    return f": {text!r}" if text.isprintable() and "\ufffd" not in text else ", not text"


@cache
def _kind(name: str) -> Kind:
    if name not in get_args(Kind):
        raise ValueError(f"{name!r} is no kind of record")
    kind: Kind = name  # type: ignore[assignment]
    return kind


def format_record(record: Record) -> str:
    names = ("at", "who", "seq", "kind", "type", "data", "cause")
    fields = {"v": SCHEMA} | {name: getattr(record, name) for name in names}
    if record.cause is None:
        del fields["cause"]
    return to_json(fields) + "\n"


def plain_numbers(value: Any) -> Any:
    """The same JSON value with ``None`` in the place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
