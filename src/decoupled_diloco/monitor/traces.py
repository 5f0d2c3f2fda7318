"""Traces from a run's tape: one trace per round of a fragment, across its shard and the learners.

`Tracer` reads the tape, as the status does; the training itself does no extra work. A span is
returned once everything about it is known, and the order of spans is arbitrary. Memory does not
grow with the length of the run.

| span | from | to |
|---|---|---|
| `round`, the root | the round opens | its new version is announced, or it is abandoned |
| `quorum` | the round opens | the K-th learner qualifies |
| `grace` | the quorum is reached | the window closes |
| `bodies` | the window is closed | all payloads that the round waits for have arrived |
| `merge` | everything has arrived | the new version is announced |
| `contribution` | the shard requests it | its payload is folded, or will not come |
| `delivery` | the new version is announced | a learner reports that it holds it |
| `upload` | the learner has request and snapshot (`SendBody`) | the shard has it, or it failed |
| `fetch` | the learner starts to fetch the new copy (`Fetch`) | the copy is verified, or failed |
| `apply` | the copy has arrived (`Done`) | the boundary at which it is applied (`Apply`) |

The first seven use the shard's clock. An `upload` starts by the learner's clock and ends by the
shard's. The last two use the learner's clock. A `contribution` is in the trace of the round that
merged it. A late contribution was requested before that round opened, and links to the earlier
round.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from decoupled_diloco.merge import token_weight
from decoupled_diloco.monitor.spans import (
    NANOSECONDS,
    Attributes,
    Kept,
    Kind,
    Link,
    Process,
    Span,
    SpanEvent,
    ns_of,
    span_id,
    trace_id,
)
from decoupled_diloco.protocol import messages
from decoupled_diloco.protocol.messages import Asking, Done, Failed, Version
from decoupled_diloco.run_model import RunModel
from decoupled_diloco.run_model.facts import is_learner, is_shard
from decoupled_diloco.tape.records import SECONDS_MAX, Record
from decoupled_diloco.tape.samples import FaultEnded, FaultInjected, ProcessEnded

_SHARD_LOOKS_AT = frozenset(
    cls.__name__
    for cls in (
        messages.RoundOpened,
        messages.RoundFinished,
        messages.Expect,
        messages.Unexpect,
        messages.Fold,
        messages.Drop,
        messages.Evict,
        messages.BodyArrived,
        messages.Connected,
        messages.Received,
    )
)

_LEARNER_LOOKS_AT = frozenset(
    cls.__name__
    for cls in (
        messages.SendBody,
        messages.BodyEncoded,
        messages.Fetch,
        messages.Apply,
        Done,
        Failed,
    )
)

PROCESS_ENDED = "the shard's process ended"
"""Error of a round that did not finish because its shard ended."""


class Tracer:
    """Creates spans from the records of a run, which arrive roughly in order of time.

    It listens to the run's single fold, which decodes records and counts unreadable ones.

    Attributes:
        run: The fold.
    """

    looks_at = _SHARD_LOOKS_AT | _LEARNER_LOOKS_AT

    def __init__(self) -> None:
        self.run = RunModel(listener=self)
        self._spans: list[Span] = []  # complete with the current record
        self._rounds_before = 0
        self._links = SpanLinks()
        self._shards: dict[str, TracedShard] = {}
        self._learners: dict[str, TracedLearner] = {}

    @property
    def rounds(self) -> int:
        """Number of rounds whose root span has been returned."""
        return self._rounds_before + sum(shard.rounds for shard in self._shards.values())

    def spans_of(self, record: Record) -> list[Span]:
        """Return the spans that are complete with this record."""
        self._spans = []
        try:
            self.run.take(record)
            if record.kind == "start":
                self._started(record)
            now = ns_of(record.wall)
        except ValueError as error:  # a time that is not valid
            self.run.leave_out(str(error))
            return []
        for shard in self._shards.values():
            self._spans += shard.settled(now)
        return self._spans

    def rest(self, problem: str = "") -> Iterator[Span]:
        """Return the remaining spans at the end; with a ``problem``, open rounds too."""
        for shard in self._shards.values():
            yield from shard.rest(problem)
        yield from self._links.rest()

    def take(self, process: str, at: float, value: Any) -> None:
        """Receive a record that the fold has decoded; see `Listener`."""
        record = self.run.record
        if process in self._shards and value is not None:
            self._spans += self._shards[process].take(ns_of(record.wall), value)
        elif process in self._learners:
            self._spans += self._learners[process].take(ns_of(record.wall), record.seq, value)
        elif is_shard(process):
            self._started(record)  # the beginning of its tape is missing
        else:
            self._fault(ns_of(record.wall), value)

    def _started(self, record: Record) -> None:
        """Start a new incarnation, which has no open rounds."""
        process = record.process
        if is_shard(process):
            before = self._shards.pop(process, None)
            if before is not None:
                self._spans += before.rest(PROCESS_ENDED)
                self._rounds_before += before.rounds
            settings = self.run.settings_of("sync")
            self._shards[process] = TracedShard(Process.of(record), settings, self._links)
        elif is_learner(process) and process not in self.run.observers:
            self._learners[process] = TracedLearner(Process.of(record), self._links)

    def _fault(self, at: int, value: Any) -> None:
        attributes: Attributes
        match value:
            case FaultInjected(kind, target) | FaultEnded(kind, target):
                attributes = {"ddiloco.fault": kind, "ddiloco.target": target}
                name = "fault" if isinstance(value, FaultInjected) else "fault undone"
            case ProcessEnded(target, code, signal) if code != 0:
                how = f"signal {signal}" if code is None else f"exit code {code}"
                attributes, name = (
                    {"ddiloco.target": target, "ddiloco.reason": how},
                    "process ended",
                )
            case _:
                return
        for shard in self._shards.values():
            shard.happened(SpanEvent(name, at, attributes))


VERSIONS_MAX = 8
"""Number of each fragment's latest versions whose delivery to learners is traced."""

SETTLE_NANOSECONDS = 2 * NANOSECONDS
"""Delay between a round's end and its root span, so that events of other processes are included."""


@dataclass(slots=True)
class _Request:
    learner: str
    why: str
    round: int  # the open round at that time; 0 for none
    fallen_at: int | None = None
    nbytes: int | None = None
    fold: messages.Fold | None = None


@dataclass(slots=True)
class _Open:
    """A round that is open, or finished without its root span returned."""

    number: int
    fragment: int
    trace: int
    start: int
    opened: messages.RoundOpened | None = None
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
    """Traces one incarnation of a shard, record by record."""

    def __init__(self, process: Process, settings: dict[str, Any], links: SpanLinks) -> None:
        self.process = process
        self.rounds = 0  # whose root span was returned
        self._uniform = settings.get("weighting") == "uniform"
        self._quorum = settings.get("quorum")
        self._links = links
        self._at = 0
        self._open: dict[int, _Open] = {}
        self._over: deque[_Open] = deque()
        self._requests: Kept[Asking, _Request] = Kept()
        self._paths: Kept[str, Asking] = Kept()
        self._merged: dict[int, deque[_Merged]] = {}
        self._observers: set[str] = set()

    def take(self, at: int, value: Any) -> list[Span]:
        """Process one record; ``at`` in nanoseconds since 1970."""
        self._at = max(self._at, at)
        match value:
            case messages.RoundOpened():
                self._open[value.round] = round = self._new(value, at)
                round.opened = value
            case messages.Expect(path=path, learner=learner, round=number, ask=ask, why=why):
                self._requests[ask] = _Request(learner, why, number)
                self._paths[path] = ask
            case messages.Unexpect(path, _):
                request = self._requests.get(self._paths.pop(path, Asking(-1, -1)))
                if request is not None:
                    request.fallen_at = at
            case messages.BodyArrived(ask=ask, nbytes=nbytes) if ask in self._requests:
                self._requests[ask].nbytes = nbytes
            case messages.Fold(ask=ask) if ask in self._requests:
                self._requests[ask].fold = value
            case messages.Drop(fragment=fragment, learner=learner, why=why):
                self._happened(SpanEvent("dropped", at, _about(learner, why)), fragment)
            case messages.Evict(learner, _, why):
                self.happened(SpanEvent("evicted", at, _about(learner, why)))
            case messages.Connected(name, messages.Hello(role="observer")):
                self._observers.add(name)
            case messages.Received(learner, messages.Holding(fragment, version)):
                return self._held(at, learner, fragment, version)
            case messages.RoundFinished():
                return self._finished(at, value)
        return []

    def happened(self, event: SpanEvent) -> None:
        """Add an event to every round during which it happened."""
        self._happened(event, None)

    def _happened(self, event: SpanEvent, fragment: int | None) -> None:
        for round in (*self._open.values(), *self._over):
            here = round.start <= event.at and (round.end is None or event.at <= round.end)
            if here and fragment in (None, round.fragment):
                round.events.append(event)

    def settled(self, now: int) -> list[Span]:
        """Return the roots of the rounds that ended long enough before ``now``."""
        found = []
        while self._over and (self._over[0].end or 0) <= now - SETTLE_NANOSECONDS:
            found.append(self._root(self._over.popleft()))
        return found

    def rest(self, problem: str = "") -> list[Span]:
        """Return the remaining roots; with a ``problem``, those of open rounds too."""
        for round in list(self._open.values()) if problem else []:
            round.end, round.error = max(self._at, round.start), problem
            round.attributes["ddiloco.verdict"] = "open"
            self._over.append(self._open.pop(round.number))
        found = [self._root(round) for round in self._over]
        self._over.clear()
        return found

    def _new(self, event: messages.RoundOpened | messages.RoundFinished, start: int) -> _Open:
        trace = trace_id(self.process, event.fragment, event.round)
        attributes: Attributes = {
            "ddiloco.shard": self.process.name,
            "ddiloco.fragment": event.fragment,
            "ddiloco.round": event.round,
            "ddiloco.term": event.term,
            "ddiloco.step": event.tick,
            "ddiloco.grace_seconds": event.grace_seconds,
            "ddiloco.slack_seconds": event.slack_seconds,
        }
        if event.base is not None:
            attributes["ddiloco.version.base"] = str(event.base)
        if isinstance(event, messages.RoundOpened):
            attributes["ddiloco.closing"] = event.closing
            attributes["ddiloco.delivery_seconds"] = event.delivery_seconds
            attributes["ddiloco.reason"] = event.why
        return _Open(event.round, event.fragment, trace, start, attributes=attributes)

    def _finished(self, at: int, event: messages.RoundFinished) -> list[Span]:
        if not _has_valid_durations(event):
            return []
        round = self._open.pop(event.round, None)
        if round is None:  # a tape of an older version, without `RoundOpened`
            round = self._new(event, max(0, at - _ns(event.finished_seconds)))
        round.end = end = round.start + _ns(event.finished_seconds)
        round.attributes |= self._final_attributes(event)
        round.error = event.reason if event.given_up else ""
        self._over.append(round)
        spans = [*self._stages(round, event), *self._contributions(round, event)]
        if event.version is not None and event.verdict == "merged":
            self._publish(round, event.version, end)
            key = version_key(event.fragment, event.version)
            spans += self._links.round(key, RoundPlace(round.trace, round.root))
        return spans

    def _final_attributes(self, event: messages.RoundFinished) -> Attributes:
        folded = [each for each in event.participants if each.state == "folded"]
        found: Attributes = {
            "ddiloco.verdict": event.verdict,
            "ddiloco.end_reason": event.reason,
            "ddiloco.tokens": sum(each.tokens for each in folded),
        }
        requests = [self._requests.get(each.ask) for each in folded]
        if all(each is not None and each.nbytes is not None for each in requests):
            found["ddiloco.body_bytes"] = sum(each.nbytes or 0 for each in requests if each)
        for state in ("folded", "late", "declined", "refused", "gone"):
            count = sum(each.state == state for each in event.participants)
            found[f"ddiloco.contributions.{state}"] = count
        if event.version is not None:
            found["ddiloco.version"] = str(event.version)
        return found

    def _stages(self, round: _Open, event: messages.RoundFinished) -> list[Span]:
        """Return the consecutive stages; the last one that began ends with the round."""
        ends = (event.quorum_seconds, event.closed_seconds, event.uploaded_seconds, None)
        names = ("quorum", "grace", "bodies", "merge")
        found, start, until = [], 0.0, event.finished_seconds
        for name, known_end in zip(names, ends, strict=True):
            end = until if known_end is None else min(max(start, known_end), until)
            attributes: Attributes = {}
            if name == "quorum":
                attributes = {"ddiloco.learner": event.quorum_learner}
                if isinstance(self._quorum, int):
                    attributes["ddiloco.quorum"] = self._quorum
            elif name == "grace":
                attributes = {"ddiloco.reason": event.why}
            error = round.error if known_end is None else ""
            at = round.start + _ns(start), round.start + _ns(end)
            found.append(self._child(round, name, *at, attributes=attributes, error=error))
            if known_end is None:
                break
            start = end
        return found

    def _contributions(self, round: _Open, event: messages.RoundFinished) -> list[Span]:
        weights = {each.ask: self._weight(each.ask) for each in event.participants}
        total = sum(weights.values())
        found = []
        for each in event.participants:
            if each.state != "late":
                share = weights[each.ask] / total if total else None
                found += self._contribution(round, each, share if each.state == "folded" else None)
        return found

    def _weight(self, ask: Asking) -> float:
        request = self._requests.get(ask)
        fold = None if request is None else request.fold
        if fold is None or not (0 <= fold.tokens < math.inf and 0 <= fold.steps < math.inf):
            return 0.0
        return fold.discount * (1.0 if self._uniform else token_weight(fold.tokens, fold.steps))

    def _contribution(
        self, round: _Open, part: messages.Participant, share: float | None
    ) -> list[Span]:
        request = self._requests.pop(part.ask, None)
        assert round.end is not None
        start = round.start + _ns(part.asked_seconds)
        end = round.end if request is None or request.fallen_at is None else request.fallen_at
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
        if request is not None:
            attributes["ddiloco.reason"] = request.why
            attributes |= {} if request.nbytes is None else {"ddiloco.body_bytes": request.nbytes}
            link = self._link_of(round, request)
        error = part.reason or part.state if part.state in ("refused", "gone") else ""
        if error:
            attributes_of_event = {
                **_about(part.learner, part.reason),
                "ddiloco.outcome": part.state,
            }
            round.events.append(SpanEvent(part.state, end, attributes_of_event))
        span = self._child(
            round, "contribution", start, end, str(part.ask), "client", attributes, link, error
        )
        key = asking_key(self.process.name, part.ask)
        return [span, *self._links.round(key, RoundPlace(round.trace, span.id, end, folded))]

    def _link_of(self, round: _Open, request: _Request) -> Link | None:
        """Return a link to the round in which it was requested, if that is another one."""
        if request.round in (0, round.number):
            return None
        trace = trace_id(self.process, round.fragment, request.round)
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
            attributes: Attributes = {"ddiloco.learner": learner, "ddiloco.version": str(version)}
            start, end = merged.at, max(merged.at, at)
            place = (merged.trace, name, merged.parent, "delivery", self.process)
            return [Span(*place, start, end, "producer", attributes)]
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


def _has_valid_durations(event: messages.RoundFinished) -> bool:
    """Whether its durations are in the range of a clock; a tape may be corrupted."""
    stages = (event.finished_seconds, event.quorum_seconds, event.closed_seconds)
    parts = [s for each in event.participants for s in (each.asked_seconds, each.delivered_seconds)]
    forward = all(s is None or 0 <= s < SECONDS_MAX for s in (*stages, event.uploaded_seconds))
    return forward and all(s is None or abs(s) < SECONDS_MAX for s in parts)


class TracedLearner:
    """Traces one incarnation of a learner, record by record."""

    def __init__(self, process: Process, links: SpanLinks) -> None:
        self.process = process
        self._links = links
        self._sent: dict[int, tuple[str, Asking, Draft]] = {}  # by fragment, the latest
        self._fetches: dict[int, tuple[Version, Draft]] = {}
        self._staged: dict[int, tuple[Version, Draft]] = {}

    def take(self, at: int, record: int, value: Any) -> list[Span]:
        """Process one record with its number; ``at`` in nanoseconds since 1970."""
        match value:
            case messages.SendBody():
                return self._sends(at, record, value)
            case messages.BodyEncoded(fragment, ask):
                return self._sent_more(fragment, ask, SpanEvent("encoded", at))
            case Failed(messages.SendBody(fragment=fragment, ask=ask), reason):
                return self._sent_more(fragment, ask, SpanEvent("failed", at), reason)
            case messages.Fetch(fragment=fragment, version=version, whole=whole):
                draft = self._draft("fetch", record, at)
                draft.kind = "consumer"
                draft.attributes |= {
                    "ddiloco.version": str(version),
                    "ddiloco.body": "whole" if whole else "difference",
                }
                self._fetches[fragment] = (version, draft)
            case Done(messages.Fetch(fragment=fragment, version=version)):
                draft = self._draft("apply", record, at)
                draft.attributes["ddiloco.version"] = str(version)
                self._staged[fragment] = (version, draft)
                return self._fetched(at, fragment, version, "")
            case Failed(messages.Fetch(fragment=fragment, version=version), reason):
                return self._fetched(at, fragment, version, reason)
            case messages.Apply():
                return self._applied(at, value)
        return []

    def _draft(self, name: str, record: int, at: int) -> Draft:
        return Draft(self.process, name, "internal", record, at)

    def _sends(self, at: int, record: int, order: messages.SendBody) -> list[Span]:
        draft = self._draft("upload", record, at)
        draft.kind, draft.whole = "server", False
        draft.attributes |= {
            "ddiloco.fragment": order.fragment,
            "ddiloco.version.base": str(order.base),
            "ddiloco.steps": order.steps,
            "ddiloco.tokens": order.tokens,
            "ddiloco.codec": order.codec,
            "ddiloco.reason": order.why,
        }
        shard = f"shard-{order.shard}"
        self._sent[order.fragment] = (shard, order.ask, draft)
        return self._links.draft(asking_key(shard, order.ask), draft)

    def _sent_more(
        self, fragment: int, ask: Asking, event: SpanEvent, problem: str = ""
    ) -> list[Span]:
        shard, latest, draft = self._sent.get(fragment, ("", None, None))
        if draft is None or latest != ask:
            return []
        draft.events.append(event)
        draft.whole = True
        if problem:
            del self._sent[fragment]
            draft.error, draft.end = problem, event.at
        return self._links.draft(asking_key(shard, ask), draft)

    def _fetched(self, at: int, fragment: int, version: Version, problem: str) -> list[Span]:
        latest, draft = self._fetches.get(fragment, (None, None))
        if draft is None or latest != version:
            return []
        del self._fetches[fragment]
        draft.end, draft.error = at, problem
        return self._links.draft(version_key(fragment, version), draft)

    def _applied(self, at: int, order: messages.Apply) -> list[Span]:
        version, draft = self._staged.get(order.fragment, (None, None))
        if draft is None or version != order.version:
            return []
        del self._staged[order.fragment]
        draft.end = at
        draft.attributes |= {
            "ddiloco.mode": order.mode,
            "ddiloco.discarded_tokens": order.discarded_tokens,
            "ddiloco.reason": order.why,
        }
        return self._links.draft(version_key(order.fragment, order.version), draft)


Key = Hashable


def asking_key(shard: str, ask: Asking) -> Key:
    """Return the key of a contribution; each shard numbers its own requests."""
    return ("asking", shard, ask)


def version_key(fragment: int, version: Version) -> Key:
    """Return the key of a published copy; a fragment belongs to one shard."""
    return ("version", fragment, version)


@dataclass(frozen=True, slots=True)
class RoundPlace:
    """The place of a learner's span in a trace.

    ``taken_at``: when the shard had the learner's payload, or when it was certain that none would
    come, in nanoseconds since 1970. ``arrived``: whether it came.
    """

    trace: int
    parent: int
    taken_at: int | None = None
    arrived: bool = True


@dataclass(slots=True)
class Draft:
    """A learner's span without its trace; ``end`` is ``None`` if the shard's tape determines it.

    ``record``: number of its first record. ``whole``: whether the learner's tape has nothing more
    about it. ``is_placed``: whether it has its trace and was returned.
    """

    process: Process
    name: str
    kind: Kind
    record: int
    start: int
    end: int | None = None
    attributes: Attributes = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    error: str = ""
    whole: bool = True
    is_placed: bool = False

    def placed(self, round: RoundPlace) -> Span:
        """Return the span in its trace."""
        self.is_placed = True
        known_end = self.end if self.end is not None else round.taken_at
        end = self.start if known_end is None else known_end
        attributes = dict(self.attributes)
        if end < self.start:  # the clocks of two machines differ
            attributes["ddiloco.clocks_apart_seconds"] = (self.start - end) / 1e9
            end = self.start
        name = span_id(round.trace, self.name, self.process.instance, self.record)
        return Span(
            round.trace,
            name,
            round.parent,
            self.name,
            self.process,
            self.start,
            end,
            self.kind,
            attributes,
            tuple(self.events),
            error=self.error,
        )


class SpanLinks:
    """Matches drafts with rounds, in whichever order they arrive."""

    def __init__(self) -> None:
        self._rounds: Kept[Key, RoundPlace] = Kept()
        self._waiting: Kept[Key, list[Draft]] = Kept()

    def round(self, key: Key, round: RoundPlace) -> list[Span]:
        """Register the place for a key; return the spans that were waiting for it."""
        self._rounds[key] = round
        return [draft.placed(round) for draft in self._waiting.pop(key, [])]

    def draft(self, key: Key, draft: Draft) -> list[Span]:
        """Add or extend a draft; return its span if its place is known and it is complete."""
        if draft.is_placed:
            return []
        round = self._rounds.get(key)
        drafts = [each for each in self._waiting.pop(key, []) if each is not draft]
        placeable = round is not None and (draft.error or (draft.whole and round.arrived))
        if not placeable:
            drafts.append(draft)
        if drafts:
            self._waiting[key] = drafts
        return [draft.placed(round)] if round is not None and placeable else []

    def rest(self) -> list[Span]:
        """Return the spans that are still incomplete."""
        found = []
        for key, drafts in self._waiting.items():
            round = self._rounds.get(key)
            found += [] if round is None else [draft.placed(round) for draft in drafts]
        self._waiting.clear()
        return found
