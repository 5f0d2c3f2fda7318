"""Where the tapes of two processes meet: a learner's spans find the round that they belong to.

A learner does not know rounds. It names the asking that it answers, and the version that it takes;
the shard's tape says of which round these are. Either may be read first.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from decoupled_diloco.monitor.spans import Attributes, Kept, Kind, Process, Span, SpanEvent, span_id
from decoupled_diloco.protocol.versions import Asking, Version

Key = Hashable


def asking_key(shard: str, ask: Asking) -> Key:
    """Of a contribution: each shard numbers its own askings."""
    return ("asking", shard, ask)


def version_key(fragment: int, version: Version) -> Key:
    """Of a published copy: a fragment belongs to one shard."""
    return ("version", fragment, version)


@dataclass(frozen=True, slots=True)
class RoundPlace:
    """The place in a trace that a learner's span gets.

    ``taken_at``: when the shard had what the learner sent, or knew that it would not come, in
    nanoseconds since 1970. ``arrived``: it came.
    """

    trace: int
    parent: int
    taken_at: int | None = None
    arrived: bool = True


@dataclass(slots=True)
class Draft:
    """A learner's span that lacks its trace; ``end``: ``None`` if the shard's tape tells it.

    ``record``: the number of the record that it begins with. ``whole``: all that the learner's
    tape tells of it is here. ``is_placed``: it has its trace, and is told.
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
        """The span, in its trace."""
        self.is_placed = True
        told = self.end if self.end is not None else round.taken_at
        end = self.start if told is None else told
        attributes = dict(self.attributes)
        if end < self.start:  # the clocks of two machines
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


class Joints:
    """Brings drafts and rounds together, whichever comes first."""

    def __init__(self) -> None:
        self._rounds: Kept[Key, RoundPlace] = Kept()
        self._waiting: Kept[Key, list[Draft]] = Kept()

    def round(self, key: Key, round: RoundPlace) -> list[Span]:
        """A shard's tape says where this belongs; returns what has waited for it."""
        self._rounds[key] = round
        return [draft.placed(round) for draft in self._waiting.pop(key, [])]

    def draft(self, key: Key, draft: Draft) -> list[Span]:
        """A learner's tape tells of it, or more of it; returns it once its trace is known."""
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
        """What is not whole, and never will be."""
        found = []
        for key, drafts in self._waiting.items():
            round = self._rounds.get(key)
            found += [] if round is None else [draft.placed(round) for draft in drafts]
        self._waiting.clear()
        return found
