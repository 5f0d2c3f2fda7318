"""Find a smaller world that fails in the same place, by removing parts that are not needed.

`Changes` remove parts of a random world. They fit on one line of JSON, so that the smaller world
can be repeated::

    PYTHONPATH=tests python -m worlds.worlds --seed 17 --with '{"without_faults": [0, 2]}'
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from decoupled_diloco.errors import ConfigError

SIMPLE_OPTIONS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("adapt", (None,)),
    ("max_steps", (None,)),
    ("shards", (1,)),
    ("fragments", (1, 2)),
    ("quorum", (1,)),
    ("overlap", (0, 1)),
    ("period", (1, 2, 4)),
    ("grace_margin", (0.0,)),
    ("norm_gate", (0.0,)),
    ("participants", ("reported",)),
    ("wait", ("never",)),
    ("apply", ("on_arrival",)),
    ("missed", ("overwrite",)),
    ("alignment", ("overwrite",)),
)
"""Simpler values of each option, the simplest first."""

SIMPLE_LEARNERS: tuple[tuple[str, Any], ...] = (
    ("ranks", 1),
    ("sync_ranks", 1),
    ("staged", False),
    ("variance", 0.0),
    ("jitter", 0.0),
    ("joins_at", 0.0),
    ("up_bytes_per_second", 1e9),
    ("down_bytes_per_second", 1e9),
    ("latency", 0.001),
)
"""A simpler value of each attribute, for all learners."""

SECONDS_MIN = 1.0


@dataclass(frozen=True)
class Changes:
    """The parts of a random world that are removed or replaced.

    Attributes:
        without_faults: Numbers of removed faults, in the order in which they were drawn.
        without_learners: Names of removed learners.
        options: Replaced values of `Options`.
        mishaps: Replaced values of `Mishaps`.
        learners: Replaced values of every learner's `LearnerSpec`.
        faulty_seconds: When faults cease.
        without_standbys: Whether each shard has only one process.
        endless: Whether the budget is never spent, so that progress is checked.
        relays: Whether learners are behind relays, at random.
        secure: Whether the run has secure sums.
        quotas: Whether learners belong to parties with limited shares.
        moments: Whether the momentum of the learners' optimizers is merged.
    """

    without_faults: tuple[int, ...] = ()
    without_learners: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    mishaps: dict[str, float] = field(default_factory=dict)
    learners: dict[str, Any] = field(default_factory=dict)
    faulty_seconds: float | None = None
    without_standbys: bool = False
    endless: bool = False
    relays: bool = False
    secure: bool = False
    quotas: bool = False
    moments: bool = False

    @classmethod
    def from_json(cls, text: str) -> Changes:
        """Parse the output of `to_json`.

        Raises:
            ConfigError: The text is not valid.
        """
        try:
            table: dict[str, Any] = json.loads(text)
            for name in ("without_faults", "without_learners"):
                table[name] = tuple(table.get(name, ()))
            return cls(**table)
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{text!r} is not a valid table of changes: {error}") from error

    def to_json(self) -> str:
        """Return one line of JSON without the unchanged fields."""
        table = {f.name: getattr(self, f.name) for f in fields(self)}
        return json.dumps({name: value for name, value in table.items() if value})


@dataclass(frozen=True)
class Size:
    """The size of a world: the parts that can be removed from it."""

    faults: int
    learners: tuple[str, ...]
    mishaps: tuple[str, ...]
    faulty_seconds: float


def signature(error: Exception) -> str:
    """Return the place and the message of an error without numbers, to compare failures."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.name}:{re.sub(r'[0-9.]+', 'N', str(error))[:40]}"


def shrink(size: Size, fails: Callable[[Changes], bool], changes: Changes | None = None) -> Changes:
    """Remove parts that the failure does not need, until no more can be removed.

    Args:
        size: The size of the world.
        fails: Returns whether the world with these changes fails in the same place.
        changes: The changes to start with.
    """
    changes = changes or Changes()
    while True:
        before = changes
        for candidates in (_shorter, _fewer_faults, _fewer_learners, _simpler):
            changes = _take(changes, fails, size, candidates)
        if changes == before:
            return changes


def _take(
    changes: Changes,
    fails: Callable[[Changes], bool],
    size: Size,
    candidates: Callable[[Changes, Size], Iterator[Changes]],
) -> Changes:
    """Take the first candidate that still fails, and repeat from there."""
    tried: set[str] = set()
    found = True
    while found:
        found = False
        for candidate in candidates(changes, size):
            text = candidate.to_json()
            if text not in tried and candidate != changes and fails(candidate):
                changes, found = candidate, True
                break
            tried.add(text)
    return changes


def _shorter(changes: Changes, size: Size) -> Iterator[Changes]:
    seconds = changes.faulty_seconds or size.faulty_seconds
    for share in (0.25, 0.5, 0.75, 0.9):
        if seconds * share >= SECONDS_MIN:
            yield replace(changes, faulty_seconds=round(seconds * share, 3))


def _fewer_faults(changes: Changes, size: Size) -> Iterator[Changes]:
    left = [n for n in range(size.faults) if n not in changes.without_faults]
    width = len(left)
    while width >= 1:
        for start in range(0, len(left), width):
            gone = {*changes.without_faults, *left[start : start + width]}
            yield replace(changes, without_faults=tuple(sorted(gone)))
        width //= 2


def _fewer_learners(changes: Changes, size: Size) -> Iterator[Changes]:
    for name in size.learners:
        if name not in changes.without_learners:
            yield replace(changes, without_learners=(*changes.without_learners, name))


def _simpler(changes: Changes, size: Size) -> Iterator[Changes]:
    yield replace(changes, without_standbys=True)
    for name in size.mishaps:
        if name not in changes.mishaps:
            yield replace(changes, mishaps={**changes.mishaps, name: 0.0})
    for option, values in SIMPLE_OPTIONS:
        for value in values:
            if changes.options.get(option, ...) == value:
                break
            yield replace(changes, options={**changes.options, option: value})
    for name, simple in SIMPLE_LEARNERS:
        if name not in changes.learners:
            yield replace(changes, learners={**changes.learners, name: simple})
