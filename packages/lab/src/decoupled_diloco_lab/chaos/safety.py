"""Check the safety rules for versions, epochs and merges while a run's tape is read.

The rules are checked on the shards' tapes:

* Versions of a fragment only increase, and no version is issued twice.
* A restart never goes back before a merged version, unless the shard's disk was lost.
* Nothing is merged twice, or from an old epoch, or with a wrong age.

A killed process loses up to the last half second of its tape. A missing record proves nothing, but
every record that is present must satisfy the rules.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from decoupled_diloco.protocol.messages import (
    Accept,
    Admit,
    Asking,
    BodyArrived,
    Evict,
    Install,
    Lost,
    Participant,
    Received,
    RoundFinished,
    ShardAdmitted,
    Version,
)
from decoupled_diloco.run_model.facts import is_shard
from decoupled_diloco.tape.samples import FaultInjected


class SafetyChecker:
    """Listens to the records of a `RunModel`.

    Attributes:
        membership: For each shard and learner, the spans during which the learner was admitted and
            connected.
        merges: Number of merged rounds per fragment.
        contributions: Number of merged contributions.
        broken: A description of each violation.
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
        """Whether a learner was a member of a shard for the whole span."""
        return any(a <= begin and end <= b for a, b in self.membership[shard, learner])

    def take(self, process: str, at: float, value: Any) -> None:
        """Process one record; ``None`` marks the start of a process."""
        match value:
            case None if is_shard(process):
                self._forget(process, at)
            case FaultInjected("disk-lost", processes=processes):
                self._emptied.update(processes)
            case Admit():
                self._admitted(value)
            case _ if is_shard(process):
                self._shard(process, value, at)

    def _forget(self, shard: str, at: float) -> None:
        """End all memberships of a shard that restarts."""
        for (name, _), spans in self.membership.items():
            if name == shard:
                _leave(spans, at)

    def _admitted(self, admit: Admit) -> None:
        if admit.epoch < self._epochs.get(admit.learner, 0):
            newest = self._epochs[admit.learner]
            self._break(f"{admit.learner} is admitted with epoch {admit.epoch} after {newest}")
        self._epochs[admit.learner] = admit.epoch

    def _shard(self, shard: str, value: Any, at: float) -> None:
        match value:
            case Accept(learner=learner, epoch=epoch):
                if epoch < self._bound.get((shard, learner), 0):
                    newest = self._bound[shard, learner]
                    self._break(f"{shard} accepts {learner} with epoch {epoch} after {newest}")
                self._bound[shard, learner] = epoch
                spans = self.membership[shard, learner]
                _leave(spans, at)
                spans.append([at, math.inf])
            case Evict(learner=learner) | Lost(peer=learner):
                _leave(self.membership[shard, learner], at)
            case Received(message=ShardAdmitted() as admitted):
                if admitted.term < self._terms.get(shard, 0):
                    newest = self._terms[shard]
                    self._break(f"{shard} receives term {admitted.term} after {newest}")
                self._terms[shard] = admitted.term
            case BodyArrived():
                self._arrived[shard, value.ask] = value
            case Install(fragment, version):
                self._installed(shard, fragment, version)
            case RoundFinished(verdict="merged"):
                self._round(shard, value)

    def _installed(self, shard: str, fragment: int, version: Version) -> None:
        newest, merged = self._newest.get(fragment), self._merged.get(fragment)
        if newest is not None and version < newest:
            self._break(f"fragment {fragment}: {shard} installs {version} after {newest}")
        lost = merged is not None and version.counter < merged.counter
        if lost and shard not in self._emptied:
            self._break(
                f"fragment {fragment}: {shard} installs {version} although {merged} was merged"
            )
        self._newest[fragment] = version

    def _round(self, shard: str, result: RoundFinished) -> None:
        fragment, version = result.fragment, result.version
        assert version is not None, "a merged round has a version"
        newest = self._newest.get(fragment)
        if (fragment, version) in self._issued:
            self._break(f"fragment {fragment}: {shard} issues {version} twice")
        elif newest is not None and version <= newest:
            self._break(f"fragment {fragment}: {shard} issues {version} after {newest}")
        self._issued.add((fragment, version))
        self._newest[fragment] = self._merged[fragment] = version
        self.merges[fragment] += 1
        for participant in result.participants:
            if participant.state == "folded":
                self.contributions += 1
                self._contribution(shard, result, participant)

    def _contribution(self, shard: str, result: RoundFinished, part: Participant) -> None:
        learner = part.learner
        where = f"fragment {result.fragment}, round {result.round} of {shard}: {learner}"
        body = self._arrived.get((shard, part.ask))
        if body is None:
            self._break(f"{where} is merged, but no payload of it has arrived")
            return
        if body.epoch != self._bound.get((shard, learner)):
            self._break(f"{where} is merged from the old epoch {body.epoch}")
        late = 0 if result.base is None else result.base.counter - body.base.counter
        if late != part.age:
            self._break(
                f"{where} was trained from {body.base}: age {late} versions, recorded {part.age}"
            )
        key = (result.fragment, learner, body.epoch, body.base)
        if key in self._used:
            self._break(f"{where} is merged twice from {body.base}")
        self._used.add(key)

    def _break(self, text: str) -> None:
        self.broken.append(text)


def _leave(spans: list[list[float]], at: float) -> None:
    if spans and math.isinf(spans[-1][1]):
        spans[-1][1] = at
