"""A tape as one party may see it: without the learners of the others.

A record about another party's learner is left out. In all other records, the names of these
learners are left out of lists and replaced in sentences. A name is known from the settings, or from
the first record about it, which precedes all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from decoupled_diloco.protocol.messages import COORDINATOR, is_shard_peer, relay_of
from decoupled_diloco.storage.files import NOT_JSON
from decoupled_diloco.tape.records import Record

NAMING = ("learner", "peer", "name", "process")
"""Fields that name a learner, or another process."""

SHOWN_TO_ALL = ("evaluator",)

SOMEONE = "another party's learner"

_HIDDEN = object()


class RestrictedTape:
    """Leaves the learners of other parties out of records.

    Args:
        owns: Whether a learner is of the party that reads.
        learners: Names of learners that are known from the beginning.
    """

    def __init__(self, owns: Callable[[str], bool], learners: Iterable[str] = ()) -> None:
        self._owns = owns
        self._others = {name for name in learners if not owns(name)}
        self._pattern: re.Pattern[str] | None = None
        self._compiled = 0

    def lines(self, piece: bytes) -> bytes:
        """Return the lines of a piece of a tape that the party may read."""
        kept = []
        for line in piece.splitlines():
            try:
                values = dict(json.loads(line))
            except NOT_JSON:
                continue  # a torn line may contain any name
            found = self._record(values)
            if found is not None:
                kept.append(json.dumps(found, separators=(",", ":")).encode() + b"\n")
        return b"".join(kept)

    def record(self, record: Record) -> Record | None:
        """Return a record as the party may read it; ``None``: it is about another learner."""
        values = {"process": record.process, "data": dict(record.data)}
        found = self._record(values)
        return None if found is None else replace(record, data=found["data"])

    def _record(self, values: dict[str, Any]) -> dict[str, Any] | None:
        self._learn(values.get("data"))
        found = self._shown(values)
        return None if found is _HIDDEN else found

    def _learn(self, value: Any) -> None:
        """Note the learners that a record is about."""
        if not isinstance(value, Mapping):
            return
        for field in ("learner", "peer"):
            name = value.get(field)
            if isinstance(name, str) and name and not self._owns(name) and _is_learner(name):
                self._others.add(name)
        for inner in ("message", "order"):
            self._learn(value.get(inner))

    def _shown(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._without_names(value)
        if isinstance(value, list):
            return [each for each in map(self._kept, value) if each is not _HIDDEN]
        if isinstance(value, dict):
            if any(value.get(field) in self._others for field in NAMING if _is_text(value, field)):
                return _HIDDEN
            found = {}
            for key, each in value.items():
                shown = self._shown(each)
                if shown is _HIDDEN and key in ("data", "message", "order"):
                    return _HIDDEN
                if key not in self._others:
                    found[key] = None if shown is _HIDDEN else shown
            return found
        return value

    def _kept(self, value: Any) -> Any:
        """Return an element of a list, unless it is, or begins with, another party's learner."""
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, str) and first in self._others:
            return _HIDDEN
        return self._shown(value)

    def _without_names(self, text: str) -> str:
        if not self._others:
            return text
        if self._compiled != len(self._others):
            names = sorted(self._others, key=len, reverse=True)
            whole = rf"(?<![\w-])({'|'.join(map(re.escape, names))})(?![\w-])"
            self._pattern, self._compiled = re.compile(whole), len(self._others)
        assert self._pattern is not None
        return self._pattern.sub(SOMEONE, text)


def _is_text(value: Mapping[str, Any], field: str) -> bool:
    return isinstance(value.get(field), str)


def _is_learner(name: str) -> bool:
    is_other = name == COORDINATOR or is_shard_peer(name) or bool(relay_of(name))
    return not is_other and name not in SHOWN_TO_ALL
