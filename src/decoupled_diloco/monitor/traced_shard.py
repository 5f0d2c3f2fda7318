"""A shard's part of the traces: each round, its stages, its contributions, who holds its result.

| span | from | to |
|---|---|---|
| `round`, the root | the round opens | its new version is announced, or it is given up |
| `quorum` | the round opens | the K-th learner qualifies |
| `grace` | the quorum is there | the window closes |
| `bodies` | the window is closed | what the round waits for is in |
| `merge` | all is in | the new version is announced |
| `contribution` | the shard asks a learner | its body is folded, or will not come |
| `delivery` | the new version is announced | a learner says that it holds it |

All by the shard's own clock. A `contribution` is in the trace of the round that it went into; one
that is late was asked for before that round opened, and is linked to the round of then. A
`delivery` begins when its round ends.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.merge import token_weight
from decoupled_diloco.monitor.joints import Joints, RoundPlace, asking_key, version_key
from decoupled_diloco.monitor.spans import (
    NANOSECONDS,
    Attributes,
    Kept,
    Kind,
    Link,
    Process,
    Span,
    SpanEvent,
    span_id,
    trace_id,
)
from decoupled_diloco.observe.records import SECONDS_MAX
from decoupled_diloco.protocol import effects as do
from decoupled_diloco.protocol import events as fact
from decoupled_diloco.protocol import messages as say
from decoupled_diloco.protocol.versions import Asking, Version

LOOKS_AT = frozenset(
    cls.__name__
    for cls in (
        do.RoundOpened, do.RoundFinished, do.Expect, do.Unexpect, do.Fold, do.Drop, do.Evict,
        fact.BodyArrived, fact.Connected, fact.Received,
    )
)  # fmt: skip

VERSIONS_MAX = 8
"""Of each fragment so many of the latest versions are followed to the learners."""

SETTLE_NANOSECONDS = 2 * NANOSECONDS
"""A round is told so long after its end: what other processes say of that time is read by then."""


@dataclass(slots=True)
class _Asked:
    learner: str
    why: str
    round: int  # that was open; 0: there was none
    fallen_at: int | None = None
    nbytes: int | None = None
    fold: do.Fold | None = None


@dataclass(slots=True)
class _Open:
    """A round that is open, or over and not told yet."""

    number: int
    fragment: int
    trace: int
    start: int
    opened: do.RoundOpened | None = None
    end: int | None = None
    attributes: Attributes = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    error: str = ""

    @property
    def root(self) -> int:
        return span_id(self.trace, "round")


@dataclass(slots=True)
class _Merged:
    version: Version
    trace: int
    parent: int
    at: int
    holders: set[str] = field(default_factory=set)


class TracedShard:
    """Takes in one life of a shard, record by record."""

    def __init__(self, process: Process, settings: dict[str, Any], joints: Joints) -> None:
        self.process = process
        self.rounds = 0  # that are told
        self._uniform = settings.get("weighting") == "uniform"
        self._quorum = settings.get("quorum")
        self._joints = joints
        self._at = 0
        self._open: dict[int, _Open] = {}
        self._over: deque[_Open] = deque()
        self._asked: Kept[Asking, _Asked] = Kept()
        self._paths: Kept[str, Asking] = Kept()
        self._merged: dict[int, deque[_Merged]] = {}
        self._observers: set[str] = set()

    def take(self, at: int, value: Any) -> list[Span]:
        """One record; ``at`` in nanoseconds since 1970."""
        self._at = max(self._at, at)
        match value:
            case do.RoundOpened():
                self._open[value.round] = round = self._new(value, at)
                round.opened = value
            case do.Expect(path=path, learner=learner, round=number, ask=ask, why=why):
                self._asked[ask] = _Asked(learner, why, number)
                self._paths[path] = ask
            case do.Unexpect(path, _):
                asked = self._asked.get(self._paths.pop(path, Asking(-1, -1)))
                if asked is not None:
                    asked.fallen_at = at
            case fact.BodyArrived(ask=ask, nbytes=nbytes) if ask in self._asked:
                self._asked[ask].nbytes = nbytes
            case do.Fold(ask=ask) if ask in self._asked:
                self._asked[ask].fold = value
            case do.Drop(fragment=fragment, learner=learner, why=why):
                self._happened(SpanEvent("dropped", at, _about(learner, why)), fragment)
            case do.Evict(learner, _, why):
                self.happened(SpanEvent("evicted", at, _about(learner, why)))
            case fact.Connected(name, say.Hello(role="observer")):
                self._observers.add(name)
            case fact.Received(learner, say.Holding(fragment, version)):
                return self._held(at, learner, fragment, version)
            case do.RoundFinished():
                return self._finished(at, value)
        return []

    def happened(self, event: SpanEvent) -> None:
        """Notes something in every round that it happened in."""
        self._happened(event, None)

    def _happened(self, event: SpanEvent, fragment: int | None) -> None:
        for round in (*self._open.values(), *self._over):
            here = round.start <= event.at and (round.end is None or event.at <= round.end)
            if here and fragment in (None, round.fragment):
                round.events.append(event)

    def settled(self, now: int) -> list[Span]:
        """The roots of the rounds that ended long enough before ``now``."""
        found = []
        while self._over and (self._over[0].end or 0) <= now - SETTLE_NANOSECONDS:
            found.append(self._root(self._over.popleft()))
        return found

    def rest(self, problem: str = "") -> list[Span]:
        """The roots that are not told yet; with a ``problem`` also of rounds that are open."""
        for round in list(self._open.values()) if problem else []:
            round.end, round.error = max(self._at, round.start), problem
            round.attributes["ddiloco.verdict"] = "open"
            self._over.append(self._open.pop(round.number))
        found = [self._root(round) for round in self._over]
        self._over.clear()
        return found

    def _new(self, told: do.RoundOpened | do.RoundFinished, start: int) -> _Open:
        trace = trace_id(self.process, told.fragment, told.round)
        attributes: Attributes = {
            "ddiloco.shard": self.process.name,
            "ddiloco.fragment": told.fragment,
            "ddiloco.round": told.round,
            "ddiloco.term": told.term,
            "ddiloco.step": told.tick,
            "ddiloco.grace_seconds": told.grace_seconds,
            "ddiloco.slack_seconds": told.slack_seconds,
        }
        if told.base is not None:
            attributes["ddiloco.version.base"] = str(told.base)
        if isinstance(told, do.RoundOpened):
            attributes["ddiloco.closing"] = told.closing
            attributes["ddiloco.delivery_seconds"] = told.delivery_seconds
            attributes["ddiloco.reason"] = told.why
        return _Open(told.round, told.fragment, trace, start, attributes=attributes)

    def _finished(self, at: int, told: do.RoundFinished) -> list[Span]:
        if not _is_told_well(told):
            return []
        round = self._open.pop(told.round, None)
        if round is None:  # a tape from before shards told of openings
            round = self._new(told, max(0, at - _ns(told.finished_seconds)))
        round.end = end = round.start + _ns(told.finished_seconds)
        round.attributes |= self._told_at_the_end(told)
        round.error = told.reason if told.given_up else ""
        self._over.append(round)
        spans = [*self._stages(round, told), *self._contributions(round, told)]
        if told.version is not None and told.verdict == "merged":
            self._publish(round, told.version, end)
            key = version_key(told.fragment, told.version)
            spans += self._joints.round(key, RoundPlace(round.trace, round.root))
        return spans

    def _told_at_the_end(self, told: do.RoundFinished) -> Attributes:
        folded = [each for each in told.participants if each.state == "folded"]
        found: Attributes = {
            "ddiloco.verdict": told.verdict,
            "ddiloco.end_reason": told.reason,
            "ddiloco.tokens": sum(each.tokens for each in folded),
        }
        asked = [self._asked.get(each.ask) for each in folded]
        if all(each is not None and each.nbytes is not None for each in asked):
            found["ddiloco.body_bytes"] = sum(each.nbytes or 0 for each in asked if each)
        for state in ("folded", "late", "declined", "refused", "gone"):
            count = sum(each.state == state for each in told.participants)
            found[f"ddiloco.contributions.{state}"] = count
        if told.version is not None:
            found["ddiloco.version"] = str(told.version)
        return found

    def _stages(self, round: _Open, told: do.RoundFinished) -> list[Span]:
        """One after the other; the last one that began ends with the round."""
        ends = (told.quorum_seconds, told.closed_seconds, told.uploaded_seconds, None)
        names = ("quorum", "grace", "bodies", "merge")
        found, start, until = [], 0.0, told.finished_seconds
        for name, told_end in zip(names, ends, strict=True):
            end = until if told_end is None else min(max(start, told_end), until)
            attributes: Attributes = {}
            if name == "quorum":
                attributes = {"ddiloco.learner": told.quorum_learner}
                if isinstance(self._quorum, int):
                    attributes["ddiloco.quorum"] = self._quorum
            elif name == "grace":
                attributes = {"ddiloco.reason": told.why}
            error = round.error if told_end is None else ""
            at = round.start + _ns(start), round.start + _ns(end)
            found.append(self._child(round, name, *at, attributes=attributes, error=error))
            if told_end is None:
                break
            start = end
        return found

    def _contributions(self, round: _Open, told: do.RoundFinished) -> list[Span]:
        weights = {each.ask: self._weight(each.ask) for each in told.participants}
        total = sum(weights.values())
        found = []
        for each in told.participants:
            if each.state != "late":
                share = weights[each.ask] / total if total else None
                found += self._contribution(round, each, share if each.state == "folded" else None)
        return found

    def _weight(self, ask: Asking) -> float:
        asked = self._asked.get(ask)
        fold = None if asked is None else asked.fold
        if fold is None or not (0 <= fold.tokens < math.inf and 0 <= fold.steps < math.inf):
            return 0.0
        return fold.discount * (1.0 if self._uniform else token_weight(fold.tokens, fold.steps))

    def _contribution(self, round: _Open, part: do.Participant, share: float | None) -> list[Span]:
        asked = self._asked.pop(part.ask, None)
        assert round.end is not None
        start = round.start + _ns(part.asked_seconds)
        end = round.end if asked is None or asked.fallen_at is None else asked.fallen_at
        if part.delivered_seconds is not None:
            end = round.start + _ns(part.delivered_seconds)
        end = min(max(start, end), max(start, round.end))
        folded = part.state == "folded"
        attributes: Attributes = {
            "ddiloco.learner": part.learner,
            "ddiloco.asking": str(part.ask),
            "ddiloco.outcome": part.state,
            "ddiloco.steps": part.steps,
            "ddiloco.tokens": part.tokens,
            "ddiloco.age_versions": part.age,
        }
        attributes |= {"ddiloco.end_reason": part.reason} if part.reason else {}
        attributes |= {} if share is None else {"ddiloco.weight_share": share}
        link = None
        if asked is not None:
            attributes["ddiloco.reason"] = asked.why
            attributes |= {} if asked.nbytes is None else {"ddiloco.body_bytes": asked.nbytes}
            link = self._link_of(round, asked)
        error = part.reason or part.state if part.state in ("refused", "gone") else ""
        if error:
            told = {**_about(part.learner, part.reason), "ddiloco.outcome": part.state}
            round.events.append(SpanEvent(part.state, end, told))
        span = self._child(
            round, "contribution", start, end, str(part.ask), "client", attributes, link, error
        )
        key = asking_key(self.process.name, part.ask)
        return [span, *self._joints.round(key, RoundPlace(round.trace, span.id, end, folded))]

    def _link_of(self, round: _Open, asked: _Asked) -> Link | None:
        """The round in which it was asked for, if that is another."""
        if asked.round in (0, round.number):
            return None
        trace = trace_id(self.process, round.fragment, asked.round)
        return Link(trace, span_id(trace, "round"))

    def _publish(self, round: _Open, version: Version, at: int) -> None:
        known = self._merged.setdefault(round.fragment, deque(maxlen=VERSIONS_MAX))
        known.append(_Merged(version, round.trace, round.root, at))

    def _held(self, at: int, learner: str, fragment: int, version: Version) -> list[Span]:
        for merged in self._merged.get(fragment, ()):
            if merged.version != version or learner in merged.holders | self._observers:
                continue
            merged.holders.add(learner)
            name = span_id(merged.trace, "delivery", learner)
            told: Attributes = {"ddiloco.learner": learner, "ddiloco.version": str(version)}
            start, end = merged.at, max(merged.at, at)
            place = (merged.trace, name, merged.parent, "delivery", self.process)
            return [Span(*place, start, end, "producer", told)]
        return []

    def _child(
        self,
        round: _Open,
        name: str,
        start: int,
        end: int,
        about: str = "",
        kind: Kind = "internal",
        attributes: Attributes | None = None,
        link: Link | None = None,
        error: str = "",
    ) -> Span:
        own = span_id(round.trace, name, about)
        place = (round.trace, own, round.root, name, self.process, start, end, kind)
        return Span(*place, attributes or {}, link=link, error=error)

    def _root(self, round: _Open) -> Span:
        assert round.end is not None
        self.rounds += 1
        events = tuple(sorted(round.events, key=lambda event: event.at))
        place = (round.trace, round.root, None, "round", self.process, round.start, round.end)
        return Span(*place, "internal", round.attributes, events, error=round.error)


def _about(learner: str, reason: str) -> Attributes:
    return {"ddiloco.learner": learner, "ddiloco.reason": reason}


def _ns(seconds: float) -> int:
    return round(seconds * 1e6) * 1000


def _is_told_well(told: do.RoundFinished) -> bool:
    """Whether its durations are ones that a clock can show: a tape may be spoilt."""
    stages = (told.finished_seconds, told.quorum_seconds, told.closed_seconds)
    parts = [s for each in told.participants for s in (each.asked_seconds, each.delivered_seconds)]
    forward = all(s is None or 0 <= s < SECONDS_MAX for s in (*stages, told.uploaded_seconds))
    return forward and all(s is None or abs(s) < SECONDS_MAX for s in parts)
