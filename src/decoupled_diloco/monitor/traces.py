"""A run's tape as traces: one for each round of a fragment, across its shard and the learners.

Whoever runs the training has nothing to do with it: a reader of the tape makes the traces,
as it makes the status. What the tapes of the shards tell is in `traced_shard`, what those of the
learners add is in `traced_learner`. Spans come as soon as all that they tell is known, in any
order. What is kept does not grow with the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decoupled_diloco.errors import ProtocolError
from decoupled_diloco.monitor import traced_learner, traced_shard
from decoupled_diloco.monitor.joints import Joints
from decoupled_diloco.monitor.spans import Attributes, Process, Span, SpanEvent, ns_of
from decoupled_diloco.monitor.traced_learner import TracedLearner
from decoupled_diloco.monitor.traced_shard import TracedShard
from decoupled_diloco.observe.acting import is_learner, is_shard
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.samples import FaultEnded, FaultInjected, ProcessEnded

_FAULTS = frozenset(cls.__name__ for cls in (FaultInjected, FaultEnded, ProcessEnded))

PROCESS_ENDED = "the shard's process ended"
"""Why a round was never over."""


class TraceFold:
    """Makes spans of the records of a run, which come in order of time or nearly.

    Attributes:
        rounds: How many rounds have been told.
        left_out: How many records could not be read.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._rounds_before = 0
        self._joints = Joints()
        self._shards: dict[str, TracedShard] = {}
        self._learners: dict[str, TracedLearner | None] = {}  # None: an observer

    @property
    def rounds(self) -> int:
        return self._rounds_before + sum(shard.rounds for shard in self._shards.values())

    def take(self, record: Record) -> list[Span]:
        """The spans that are complete with this record."""
        try:
            at = ns_of(record.wall)
            return [*self._take(record, at), *self._settled(at)]
        except (ProtocolError, ValueError):
            self.left_out += 1
            return []

    def rest(self, problem: str = "") -> Iterator[Span]:
        """What is left when nothing more comes; open rounds too, if there is a ``problem``."""
        for shard in self._shards.values():
            yield from shard.rest(problem)
        yield from self._joints.rest()

    def _settled(self, now: int) -> Iterator[Span]:
        for shard in self._shards.values():
            yield from shard.settled(now)

    def _take(self, record: Record, at: int) -> list[Span]:
        who, kind = record.who, record.type
        if is_shard(who):
            if record.kind == "start" or who not in self._shards:
                return self._shard_started(record)
            if kind in traced_shard.LOOKS_AT and _matters(record):
                return self._shards[who].take(at, record.value())
        elif kind in _FAULTS:
            self._fault(at, record.value())
        elif is_learner(who):
            if record.kind == "start":
                self._learner_started(record)
            learner = self._learners.get(who)
            if learner is not None and kind in traced_learner.LOOKS_AT:
                return learner.take(at, record.seq, record.value())
        return []

    def _shard_started(self, record: Record) -> list[Span]:
        """A new life knows nothing of the rounds that were open."""
        before = self._shards.pop(record.who, None)
        spans = [] if before is None else before.rest(PROCESS_ENDED)
        if before is not None:
            self._rounds_before += before.rounds
        process = Process.of(record)
        self._shards[record.who] = TracedShard(process, _settings(record), self._joints)
        return spans

    def _learner_started(self, record: Record) -> None:
        observes = _header(record).get("role") == "observer"
        self._learners[record.who] = (
            None if observes else TracedLearner(Process.of(record), self._joints)
        )

    def _fault(self, at: int, value: Any) -> None:
        told: Attributes
        match value:
            case FaultInjected(kind, target) | FaultEnded(kind, target):
                told = {"ddiloco.fault": kind, "ddiloco.target": target}
                name = "fault" if isinstance(value, FaultInjected) else "fault undone"
            case ProcessEnded(target, code, signal) if code != 0:
                how = f"signal {signal}" if code is None else f"exit code {code}"
                told, name = {"ddiloco.target": target, "ddiloco.reason": how}, "process ended"
            case _:
                return
        for shard in self._shards.values():
            shard.happened(SpanEvent(name, at, told))


def _header(record: Record) -> dict[str, Any]:
    header = record.data.get("header")
    return header if isinstance(header, dict) else {}


def _settings(record: Record) -> dict[str, Any]:
    """The table ``sync`` of the run's settings."""
    settings = _header(record).get("settings")
    sync = settings.get("sync") if isinstance(settings, dict) else None
    return sync if isinstance(sync, dict) else {}


def _matters(record: Record) -> bool:
    """Of messages only one kind: most need no decoding."""
    if record.type != "Received":
        return True
    message = record.data.get("message")
    return isinstance(message, dict) and message.get("type") == "Holding"
