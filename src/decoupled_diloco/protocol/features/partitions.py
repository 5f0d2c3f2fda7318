"""Leased partitions of the data.

*The learner's side*: functions on `DataView`. The loop trains the leases in the order in which they
were granted. At least one spare lease is kept, so that the loop never waits for the coordinator.
Each step records which batches it trained. A fragment with an accepted contribution holds all steps
up to that snapshot, and batches of steps that every fragment holds are durable. While the
coordinator is away, the loop continues with its leases. When they are used up, it trains its last
partition once more. It counts that as a repeat, and reports it as soon as the coordinator is back.

*The coordinator's side.* In each epoch, partitions are leased in order. A revoked partition is
leased again first, from its durable position. When an epoch has none left, the next one begins, so
that every request gets a partition. A learner reports its leases and how many unfinished ones it
needs; the answer grants or ends leases accordingly. A lost answer or a repeated report therefore
changes nothing.

A lease has no time limit while its learner is connected. It ends when its partition is durable,
when the learner leaves, when a newer process has its name, or after ``GRACE_SECONDS`` without a
connection. The state changes only by entries of the ledger (`apply`), and each is durable before
any process is notified.

Repeated training: an incarnation repeats what it trained beyond the last durable position that it
reported, in the leases that it held. While connected, it reports at least once every H of its own
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import assert_never

from decoupled_diloco.protocol.learner_state import DataView, LearnerState, LeasedPart, TrainedRun
from decoupled_diloco.protocol.messages import (
    COORDINATOR,
    CoordinatorEffect,
    DataClosed,
    DataDescribed,
    DataEvent,
    DataOpened,
    DataRefused,
    DataReport,
    Enter,
    LearnerEffect,
    Lease,
    Leased,
    LeasesGiven,
    LeaseState,
    LedgerEntry,
    Note,
    PartWanted,
    Repeated,
    Send,
    Settled,
    TakenBack,
)


def handle(state: LearnerState, event: DataEvent) -> list[LearnerEffect]:
    """Process an event of the training loop about its data."""
    if isinstance(event, DataOpened):
        step = durable_step(state)
        held = 1 + event.ahead
        state.data = DataView(event.parts, held, state.coordinated, durable_step=step)
    data = state.data
    if data is None:
        return []
    match event:
        case DataOpened():
            return report_leases(data, state.step, "the loop needs data")
        case PartWanted(batches, taken):
            return part_wanted(data, state.step, batches, taken)
        case DataClosed():
            return close(data, state.step)
        case _:
            assert_never(event)


def durable_step(state: LearnerState) -> int:
    """Return the newest own step up to which every fragment has an accepted contribution."""
    return min(view.merged_step for view in state.fragments)


def part_wanted(data: DataView, step: int, batches: int | None, taken: int) -> list[LearnerEffect]:
    """Select the loop's next partition; ``batches`` is the length of the one that ended, if any."""
    if taken:
        data.pending.append((data.current, taken, data.repeating))
    last = data.leases.get(data.current)
    if last is not None and batches is not None:
        last.length = batches
    data.leave = data.repeating = False
    part = next((p for p in data.leases.values() if p.length is None), None)
    effects: list[LearnerEffect] = []
    if part is None:
        finished = [p for p in data.leases.values() if p.length]
        part = finished[-1] if finished else None
        data.repeating = part is not None
        if part is not None:
            name = f"partition {part.lease.part} of epoch {part.lease.turn}"
            effects.append(Note(f"{name} is trained again", "no lease is left"))
    data.current = 0 if part is None else part.lease.number
    if batches is None:
        return effects
    return effects + report_leases(data, step, "a partition has ended")


def stepped(data: DataView, step: int, batches: int, period: int) -> list[LearnerEffect]:
    """Record a finished step that trained ``batches`` of the present partition."""
    ended = False
    for number, count, repeating in [*data.pending, (data.current, batches, data.repeating)]:
        part = data.leases.get(number)
        if part is None or not count:
            continue  # another learner trains what was revoked meanwhile
        if repeating:
            part.repeated += count
        else:
            _note(part, step, count)
            part.trained += count
            ended |= part.trained == part.length
    data.pending.clear()
    if ended:
        return report_leases(data, step, "a partition has ended")
    if data.stale and step - data.reported_step >= period:
        return report_leases(data, step, "durable batches, once per period")
    return []


def _note(part: LeasedPart, step: int, batches: int) -> None:
    last = part.runs[-1] if part.runs else None
    if last is not None and last.stride == batches and last.step + last.steps == step:
        last.steps += 1
    else:
        part.runs.append(TrainedRun(step, 1, part.trained, batches))


def merged(data: DataView, step: int, durable_step: int) -> list[LearnerEffect]:
    """Record that every fragment has an accepted contribution of ``durable_step`` or later."""
    if durable_step <= data.durable_step:
        return []
    data.durable_step = durable_step
    settled = False
    for part in data.leases.values():
        before = part.settled
        _settle(part, durable_step)
        settled |= part.settled and not before
    data.stale = True
    return report_leases(data, step, "a partition is durable") if settled else []


def _settle(part: LeasedPart, durable_step: int) -> None:
    while part.runs and part.runs[0].step <= durable_step:
        run = part.runs[0]
        part.durable = run.trained_by(durable_step)
        if run.step + run.steps - 1 > durable_step:
            return
        part.runs.popleft()


def report_leases(data: DataView, step: int, why: str) -> list[LearnerEffect]:
    """Report all leases, if the coordinator is connected."""
    if not data.linked or data.refused:
        return []
    data.reported_step, data.stale = step, False
    # A partition that is being repeated has not ended: its repeats have yet to be reported.
    busy = {number for number, _, _ in data.pending} | {data.current}
    states = tuple(
        LeaseState(
            lease=number,
            trained=part.trained,
            durable=part.durable,
            ended=part.trained == part.length and number not in busy,
            repeated=part.repeated,
        )
        for number, part in data.leases.items()
    )
    return [Send(COORDINATOR, DataReport(data.parts, data.want, states), why)]


def link(data: DataView, step: int, *, linked: bool) -> list[LearnerEffect]:
    """Report all leases when the coordinator has connected."""
    data.linked = linked
    return report_leases(data, step, "the coordinator is connected") if linked else []


def close(data: DataView, step: int) -> list[LearnerEffect]:
    """Return what is not durable, because the loop has ended."""
    data.want = 0
    return report_leases(data, step, "the loop has ended")


def answered(data: DataView, message: LeasesGiven | DataRefused) -> list[LearnerEffect]:
    """Apply the coordinator's answer to a report."""
    if isinstance(message, DataRefused):
        data.refused, data.leave = message.reason, True
        return [Note("the coordinator leases no data to this learner", message.reason)]
    for number in message.dropped:
        if data.leases.pop(number, None) is not None and number == data.current:
            data.current, data.leave = 0, True
    for lease in message.leases:
        if lease.number not in data.leases:  # a crossed report may be answered twice
            data.leases[lease.number] = LeasedPart(lease, lease.start, lease.start)
            data.leave |= data.repeating
    return []


# The coordinator's side


GRACE_SECONDS = 15.0
"""How long a learner may be disconnected before its leases are revoked.

It is three times the longest pause between two reconnection attempts. Nothing waits for a
partition, so the time may be long.
"""


HELD_MAX = 256
"""Most leases of one learner, including ended ones whose last steps are not merged yet.

A learner whose contributions do not arrive for that long repeats its last partition: its training
has no use for the other learners.
"""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as the coordinator records it; ``trained`` and ``durable`` as last reported."""

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
    """An incomplete epoch: the next partition never leased, the revoked ones, the durable ones."""

    fresh: int = 0
    returned: dict[int, int] = field(default_factory=dict)
    settled: int = 0


@dataclass(slots=True)
class LeaseBook:
    """All leases of a run; its size does not depend on the number of partitions.

    Attributes:
        parts: Number of partitions of the data; 0: no learner has described the data yet.
        entries: Number of ledger entries applied.
        leases: Number of leases granted; also the newest one's number.
        opened: Number of epochs begun.
        turns: Epochs that are not complete.
        holders: Active leases, by learner and number.
    """

    parts: int = 0
    entries: int = 0
    leases: int = 0
    opened: int = 0
    turns: dict[int, Turn] = field(default_factory=dict)
    holders: dict[str, dict[int, Held]] = field(default_factory=dict)


@dataclass(slots=True)
class Absences:
    """Since when learners with leases are disconnected.

    ``unnoticed``: the absences from before a restart have yet to be counted.
    """

    since: dict[str, float] = field(default_factory=dict)
    unnoticed: bool = False

    @property
    def deadline(self) -> float | None:
        """When the first absence has lasted too long."""
        return min(self.since.values()) + GRACE_SECONDS if self.since else None

    def noticed(self, now: float, book: LeaseBook) -> None:
        """Count absences from before a restart of the coordinator from now on."""
        if self.unnoticed:
            self.unnoticed = False
            self.since = dict.fromkeys(book.holders, now)

    def began(self, now: float, learner: str, book: LeaseBook) -> None:
        if learner in book.holders:
            self.since[learner] = now

    def ended(self, learner: str) -> None:
        self.since.pop(learner, None)

    def over(self, now: float, book: LeaseBook) -> list[CoordinatorEffect]:
        """Revoke the leases of learners that have been away for too long."""
        effects: list[CoordinatorEffect] = []
        for learner, since in list(self.since.items()):
            if now >= since + GRACE_SECONDS:
                del self.since[learner]
                effects += take_back(book, learner, f"{learner} was away for {GRACE_SECONDS:g} s")
        return effects


def copied(book: LeaseBook) -> LeaseBook:
    """Return a copy that shares only immutable values."""
    return replace(
        book,
        turns={n: replace(t, returned=dict(t.returned)) for n, t in book.turns.items()},
        holders={name: dict(held) for name, held in book.holders.items()},
    )


def apply(book: LeaseBook, entry: LedgerEntry) -> None:
    """Apply one entry of the ledger."""
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
                del book.turns[held.turn]  # the book must not grow with the number of epochs
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
    """Assert the invariants of one state: no partition is lost or leased twice."""
    held = [(h.turn, h.part) for mine in book.holders.values() for h in mine.values()]
    assert len(held) == len(set(held)), "two leases overlap"
    for number, turn in book.turns.items():
        leased = {part for of, part in held if of == number}
        assert not leased & turn.returned.keys(), "a leased partition is free"
        assert turn.fresh == len(leased) + len(turn.returned) + turn.settled, "a partition is lost"


def report(
    book: LeaseBook, learner: str, epoch: int, message: DataReport
) -> list[CoordinatorEffect]:
    """Answer a learner's report of its leases and needs."""
    if not message.parts:
        reason = f"partitions=0 of {learner} must be at least 1: use the run's data"
        return [Send(learner, DataRefused(reason), reason)]
    if not book.parts:
        effects = _enter(book, DataDescribed(message.parts), f"{learner} describes the data")
    elif book.parts != message.parts:
        reason = (
            f"partitions={message.parts} of {learner} must equal the run's {book.parts}: use the "
            "same data and number of partitions for every learner"
        )
        return [Send(learner, DataRefused(reason), reason)]
    else:
        effects = []
    # Ended leases first, so that they do not count against the limit of new ones.
    for state in message.leases:
        effects += _update(book, learner, epoch, state)
    if not message.want:
        return effects + take_back(book, learner, "the learner returned it")
    return effects + _give(book, learner, epoch, message)


def _update(
    book: LeaseBook, learner: str, epoch: int, state: LeaseState
) -> list[CoordinatorEffect]:
    held = book.holders.get(learner, {}).get(state.lease)
    if held is None or held.epoch != epoch:
        return []
    effects: list[CoordinatorEffect] = []
    if state.repeated > held.repeated:
        more = state.repeated - held.repeated
        why = "it had no lease left while the coordinator was away"
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
    """Grant leases up to the requested number, and list those that have ended."""
    mine = book.holders.get(learner, {})
    known = {state.lease for state in message.leases}
    unfinished = sum(not held.ended for held in mine.values())
    effects: list[CoordinatorEffect] = []
    for _ in range(min(message.want - unfinished, HELD_MAX - len(mine))):
        entry = _next(book, learner, epoch)
        effects += _enter(book, entry, f"{learner} needs {message.want}")
    mine = book.holders.get(learner, {})
    # Everything that the learner did not list, so that grants in a lost answer are repeated.
    given = tuple(Lease(n, h.turn, h.part, h.start) for n, h in mine.items() if n not in known)
    dropped = tuple(sorted(known - mine.keys()))
    if given or dropped:
        effects.append(Send(learner, LeasesGiven(given, dropped), "its report"))
    return effects


def _next(book: LeaseBook, learner: str, epoch: int) -> Leased:
    """Return the first free partition of the earliest epoch that has one."""
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
    """Revoke the leases of a learner, or only those of its incarnations before ``before_epoch``."""
    effects: list[CoordinatorEffect] = []  # break: trained-batches-called-durable
    for number, held in list(book.holders.get(learner, {}).items()):
        if before_epoch is None or held.epoch < before_epoch:
            entry = TakenBack(number, learner, held.durable, held.trained, reason)
            effects += _enter(book, entry, reason)
    return effects


def _enter(book: LeaseBook, entry: LedgerEntry, why: str) -> list[CoordinatorEffect]:
    apply(book, entry)
    return [Enter(entry, why)]
