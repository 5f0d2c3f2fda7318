"""What must hold of a run's versions, epochs and merges, checked while its tape is read.

Safety is read off the shards' tapes: versions of a fragment only go up, and no version is issued
twice; a restart goes back behind nothing that was merged, unless its disk was lost; nothing is
merged twice, or from an old epoch, or later than the shard says.
A process that is killed loses the last half second of its tape: what is missing there proves
nothing, and what is there must still hold.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from decoupled_diloco.observe.acting import is_shard
from decoupled_diloco.observe.samples import FaultInjected
from decoupled_diloco.protocol.effects import (
    Accept,
    Admit,
    Evict,
    Install,
    Participant,
    RoundFinished,
)
from decoupled_diloco.protocol.events import BodyArrived, Lost, Received
from decoupled_diloco.protocol.messages import ShardAdmitted
from decoupled_diloco.protocol.versions import Asking, Version


class SafetyChecker:
    """Listens to the records of a `RunModel`.

    Attributes:
        membership: For each shard and learner: when the shard counted on it and was connected.
        broken: What must not be, in words.
    """

    looks_at = frozenset({"Admit"})

    def __init__(self) -> None:
        self.membership: defaultdict[tuple[str, str], list[list[float]]] = defaultdict(list)
        self.merges: Counter[int] = Counter()
        self.contributions = 0
        self.broken: list[str] = []
        self._newest: dict[int, Version] = {}
        self._merged: dict[int, Version] = {}
        self._issued: set[tuple[int, Version]] = set()
        self._terms: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._bound: dict[tuple[str, str], int] = {}
        self._arrived: dict[tuple[str, Asking], BodyArrived] = {}
        self._used: set[tuple[int, str, int, Version]] = set()
        self._emptied: set[str] = set()

    def member_during(self, shard: str, learner: str, begin: float, end: float) -> bool:
        """Whether a shard counted on a learner for all of this time."""
        return any(a <= begin and end <= b for a, b in self.membership[shard, learner])

    def take(self, who: str, at: float, value: Any) -> None:
        """Takes one record in; ``None`` for the start of a process."""
        match value:
            case None if is_shard(who):
                self._forget(who, at)
            case FaultInjected("disk-lost", processes=processes):
                self._emptied.update(processes)
            case Admit():
                self._admitted(value)
            case _ if is_shard(who):
                self._shard(who, value, at)

    def _forget(self, shard: str, at: float) -> None:
        """A shard starts again: it counts on no learner."""
        for (name, _), spans in self.membership.items():
            if name == shard:
                _leave(spans, at)

    def _admitted(self, admit: Admit) -> None:
        if admit.epoch < self._epochs.get(admit.learner, 0):
            self._break(f"{admit.learner} is admitted with epoch {admit.epoch}, which goes back")
        self._epochs[admit.learner] = admit.epoch

    def _shard(self, who: str, value: Any, at: float) -> None:
        match value:
            case Accept(learner=learner, epoch=epoch):
                if epoch < self._bound.get((who, learner), 0):
                    self._break(f"{who} accepts {learner} with epoch {epoch}, which goes back")
                self._bound[who, learner] = epoch
                spans = self.membership[who, learner]
                _leave(spans, at)
                spans.append([at, math.inf])
            case Evict(learner=learner) | Lost(peer=learner):
                _leave(self.membership[who, learner], at)
            case Received(message=ShardAdmitted() as admitted):
                if admitted.term < self._terms.get(who, 0):
                    self._break(f"{who} is granted term {admitted.term}, which goes back")
                self._terms[who] = admitted.term
            case BodyArrived():
                self._arrived[who, value.ask] = value
            case Install(fragment, version):
                self._installed(who, fragment, version)
            case RoundFinished(verdict="merged"):
                self._round(who, value)

    def _installed(self, who: str, fragment: int, version: Version) -> None:
        newest, merged = self._newest.get(fragment), self._merged.get(fragment)
        if newest is not None and version < newest:
            self._break(f"fragment {fragment}: {who} installs {version} after {newest}")
        lost = merged is not None and version.counter < merged.counter
        if lost and who not in self._emptied:
            self._break(f"fragment {fragment}: {who} installs {version}, but {merged} was merged")
        self._newest[fragment] = version

    def _round(self, who: str, result: RoundFinished) -> None:
        fragment, version = result.fragment, result.version
        assert version is not None, "a merged round has a version"
        newest = self._newest.get(fragment)
        if (fragment, version) in self._issued:
            self._break(f"fragment {fragment}: {who} issues {version} twice")
        elif newest is not None and version <= newest:
            self._break(f"fragment {fragment}: {who} issues {version} after {newest}")
        self._issued.add((fragment, version))
        self._newest[fragment] = self._merged[fragment] = version
        self.merges[fragment] += 1
        for participant in result.participants:
            if participant.state == "folded":
                self.contributions += 1
                self._contribution(who, result, participant)

    def _contribution(self, who: str, result: RoundFinished, part: Participant) -> None:
        learner = part.learner
        where = f"fragment {result.fragment}, round {result.round} of {who}: {learner}"
        body = self._arrived.get((who, part.ask))
        if body is None:
            self._break(f"{where} is in it, but nothing of it has arrived")
            return
        if body.epoch != self._bound.get((who, learner)):
            self._break(f"{where} is in it with epoch {body.epoch}, which is an old one")
        late = 0 if result.base is None else result.base.counter - body.base.counter
        if late != part.age:
            self._break(f"{where} was trained from {body.base}, not {part.age} versions before")
        key = (result.fragment, learner, body.epoch, body.base)
        if key in self._used:
            self._break(f"{where} is merged twice from {body.base}")
        self._used.add(key)

    def _break(self, text: str) -> None:
        self.broken.append(text)


def _leave(spans: list[list[float]], at: float) -> None:
    if spans and math.isinf(spans[-1][1]):
        spans[-1][1] = at
