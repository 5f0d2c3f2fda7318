"""Who trains which part of the data: the coordinator's side of the leases.

Theory of operation. In each pass parts are given out in order; a part that was taken back is given
out again first, from where it is durable. When a pass has none left the next one begins, so that
there is always a part for who asks. A learner says what it holds and how many unfinished leases it
wants; the answer brings it there. So a lost answer, or the same report twice, changes nothing.

A lease has no time limit while its learner is connected. It ends when its part is durable, when
the learner goes, when a newer process bears its name, or when nobody has heard of it for
``GRACE_SECONDS``. State changes by entries of the ledger alone (`apply`), each durable before
anybody hears of it.

How much is repeated: what a life had trained beyond the last durable position that it reported, in
the leases that it held; it reports one at least every period H of its steps while it is connected.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import assert_never

from decoupled_diloco.protocol.data_leases.effects import Enter
from decoupled_diloco.protocol.data_leases.ledger import (
    DataDescribed,
    Leased,
    LedgerEntry,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.protocol.data_leases.messages import (
    DataRefused,
    DataReport,
    Lease,
    LeasesGiven,
    LeaseState,
)
from decoupled_diloco.protocol.effects import CoordinatorEffect, Send

GRACE_SECONDS = 15.0
"""How long a learner may be gone before its leases are others': three times the longest pause
between two attempts to come back. Nothing waits for a part, so there is no hurry."""

HELD_MAX = 256
"""Most leases of one learner, ended ones whose last steps are not merged yet among them. One that
no shard hears for so long trains its last part over again: its training is of no use to others."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as the coordinator knows it; ``trained`` and ``durable`` as last reported."""

    turn: int
    part: int
    start: int
    epoch: int
    trained: int
    durable: int
    ended: bool = False
    repeated: int = 0


@dataclass(slots=True)
class Turn:
    """A pass that is not complete: the next part never leased, those taken back, those durable."""

    fresh: int = 0
    returned: dict[int, int] = field(default_factory=dict)
    settled: int = 0


@dataclass(slots=True)
class LeaseBook:
    """All leases of a run: small, whatever the number of parts.

    Attributes:
        parts: Virtual parts of the data; 0: nobody has asked yet.
        entries: Entries of the ledger that led here.
        leases: Leases given so far; also the newest one's number.
        opened: Passes begun.
        turns: Passes that are not complete.
        holders: Leases in force, by learner and number.
    """

    parts: int = 0
    entries: int = 0
    leases: int = 0
    opened: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)
    holders: dict[str, dict[int, Held]] = field(default_factory=dict)


@dataclass(slots=True)
class Absences:
    """Since when learners that hold leases are gone; ``unnoticed``: those before a restart."""

    since: dict[str, float] = field(default_factory=dict)
    unnoticed: bool = False

    @property
    def deadline(self) -> float | None:
        """When the first absence has lasted too long."""
        return min(self.since.values()) + GRACE_SECONDS if self.since else None

    def noticed(self, now: float, book: LeaseBook) -> None:
        """Who held leases when the coordinator's last life ended is gone from now on."""
        if self.unnoticed:
            self.unnoticed = False
            self.since = dict.fromkeys(book.holders, now)

    def began(self, now: float, learner: str, book: LeaseBook) -> None:
        """A learner is gone."""
        if learner in book.holders:
            self.since[learner] = now

    def ended(self, learner: str) -> None:
        """A learner is back."""
        self.since.pop(learner, None)

    def over(self, now: float, book: LeaseBook) -> list[CoordinatorEffect]:
        """Takes back the leases of those who are gone for too long."""
        effects: list[CoordinatorEffect] = []
        for learner, since in list(self.since.items()):
            if now >= since + GRACE_SECONDS:
                del self.since[learner]
                effects += take_back(book, learner, f"{learner} is gone for {GRACE_SECONDS:g} s")
        return effects


def copied(book: LeaseBook) -> LeaseBook:
    """A copy that shares only what never changes."""
    return replace(
        book,
        turns={n: replace(t, returned=dict(t.returned)) for n, t in book.turns.items()},
        holders={name: dict(held) for name, held in book.holders.items()},
    )


def apply(book: LeaseBook, entry: LedgerEntry) -> None:
    """One entry of the ledger."""
    book.entries += 1
    match entry:
        case DataDescribed(parts):
            book.parts = parts
        case Leased():
            _lease(book, entry)
        case Settled(lease, learner):
            held = _over(book, learner, lease)
            turn = book.turns[held.turn]
            turn.settled += 1
            if turn.settled == book.parts:
                del book.turns[held.turn]
        case TakenBack(lease, learner, durable):
            held = _over(book, learner, lease)
            book.turns[held.turn].returned[held.part] = durable
        case Repeated(lease, learner, batches):
            held = book.holders[learner][lease]
            book.holders[learner][lease] = replace(held, repeated=held.repeated + batches)
        case _:
            assert_never(entry)


def _lease(book: LeaseBook, entry: Leased) -> None:
    if entry.turn == book.opened:
        book.opened += 1
        book.turns[entry.turn] = Turn()
    turn = book.turns[entry.turn]
    if entry.part == turn.fresh:
        turn.fresh += 1
    else:
        del turn.returned[entry.part]
    book.leases = entry.lease
    held = Held(entry.turn, entry.part, entry.start, entry.epoch, entry.start, entry.start)
    book.holders.setdefault(entry.learner, {})[entry.lease] = held


def _over(book: LeaseBook, learner: str, lease: int) -> Held:
    held = book.holders[learner].pop(lease)
    if not book.holders[learner]:
        del book.holders[learner]
    return held


def check(book: LeaseBook) -> None:
    """Asserts what must hold in one state: no part is lost, and none is anybody's twice."""
    held = [(h.turn, h.part) for mine in book.holders.values() for h in mine.values()]
    assert len(held) == len(set(held)), "two leases overlap"
    for number, turn in book.turns.items():
        leased = {part for of, part in held if of == number}
        assert not leased & turn.returned.keys(), "a part that is leased is free"
        assert turn.fresh == len(leased) + len(turn.returned) + turn.settled, "a part is lost"


def report(
    book: LeaseBook, learner: str, epoch: int, message: DataReport
) -> list[CoordinatorEffect]:
    """A learner said what it has trained and what it wants."""
    if not message.parts:
        reason = f"the data of {learner} have no parts: give it the run's data"
        return [Send(learner, DataRefused(reason), reason)]
    if not book.parts:
        effects = _enter(book, DataDescribed(message.parts), f"{learner} brings the data")
    elif book.parts != message.parts:
        reason = (
            f"the run's data have {book.parts} parts, those of {learner} {message.parts}: give "
            "every learner the same data, cut into as many parts"
        )
        return [Send(learner, DataRefused(reason), reason)]
    else:
        effects = []
    for state in message.leases:
        effects += _heard(book, learner, epoch, state)
    if not message.want:
        return effects + take_back(book, learner, "the learner returns it")
    return effects + _give(book, learner, epoch, message)


def _heard(book: LeaseBook, learner: str, epoch: int, state: LeaseState) -> list[CoordinatorEffect]:
    held = book.holders.get(learner, {}).get(state.lease)
    if held is None or held.epoch != epoch:
        return []
    effects: list[CoordinatorEffect] = []
    if state.repeated > held.repeated:
        more = state.repeated - held.repeated
        why = "it had no lease left, and the coordinator was away"
        effects += _enter(book, Repeated(state.lease, learner, more), why)
        held = book.holders[learner][state.lease]
    if state.ended and state.durable >= state.trained:  # break: partition-settled-early
        why = "every fragment had an accepted merge after its last step"
        return effects + _enter(book, Settled(state.lease, learner, state.trained), why)
    book.holders[learner][state.lease] = replace(
        held,
        trained=max(held.trained, state.trained),
        durable=max(held.durable, state.durable),
        ended=state.ended,
    )
    return effects


def _give(
    book: LeaseBook, learner: str, epoch: int, message: DataReport
) -> list[CoordinatorEffect]:
    """Leases up to what is wanted, and word of those that the learner need not keep."""
    mine = book.holders.get(learner, {})
    known = {state.lease for state in message.leases}
    unfinished = sum(not held.ended for held in mine.values())
    effects: list[CoordinatorEffect] = []
    for _ in range(min(message.want - unfinished, HELD_MAX - len(mine))):
        entry = _next(book, learner, epoch)
        effects += _enter(book, entry, f"{learner} wants {message.want}")
    mine = book.holders.get(learner, {})
    given = tuple(Lease(n, h.turn, h.part, h.start) for n, h in mine.items() if n not in known)
    dropped = tuple(sorted(known - mine.keys()))
    if given or dropped:
        effects.append(Send(learner, LeasesGiven(given, dropped), "its report"))
    return effects


def _next(book: LeaseBook, learner: str, epoch: int) -> Leased:
    """The first part that is free, of the earliest pass that has one."""
    number = book.leases + 1
    for turn in sorted(book.turns):
        returned, fresh = book.turns[turn].returned, book.turns[turn].fresh
        if returned:
            part = min(returned)
            # break: returned-part-skips-a-batch
            return Leased(number, turn, part, returned[part], learner, epoch)
        if fresh < book.parts:
            return Leased(number, turn, fresh, 0, learner, epoch)
    return Leased(number, book.opened, 0, 0, learner, epoch)


def take_back(
    book: LeaseBook, learner: str, reason: str, *, before_epoch: int | None = None
) -> list[CoordinatorEffect]:
    """Ends the leases of a learner, or those of its lives before an epoch."""
    effects: list[CoordinatorEffect] = []  # break: trained-batches-called-durable
    for number, held in list(book.holders.get(learner, {}).items()):
        if before_epoch is None or held.epoch < before_epoch:
            entry = TakenBack(number, learner, held.durable, held.trained, reason)
            effects += _enter(book, entry, reason)
    return effects


def _enter(book: LeaseBook, entry: LedgerEntry, why: str) -> list[CoordinatorEffect]:
    apply(book, entry)
    return [Enter(entry, why)]
