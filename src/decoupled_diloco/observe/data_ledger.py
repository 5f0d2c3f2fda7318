"""Which part of the data was trained when, by whom: the data ledger of a run, read and checked.

The ledger is ``RUN/data.ledger``; of a run that has only a tape, such as a simulated one, it is the
coordinator's entries there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, assert_never

from decoupled_diloco.errors import StorageError
from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco.protocol.data_leases.effects import Enter
from decoupled_diloco.protocol.data_leases.ledger import (
    DataDescribed,
    Leased,
    LedgerEntry,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.storage.data_ledger import FILE, Basis, ledger_files, read_ledger

Standing = Literal["durable", "training", "returned"]


@dataclass(slots=True)
class LeasedSpan:
    """What one lease contributed to its part: batches ``first`` to before ``end``.

    ``end`` is ``None`` while the lease is in force.
    """

    lease: int
    learner: str
    epoch: int
    first: int
    end: int | None = None


@dataclass(slots=True)
class PartAccount:
    """One part in one pass: who trained it, in order, and where it stands."""

    part: int
    spans: list[LeasedSpan] = field(default_factory=list)
    standing: Standing = "training"

    @property
    def batches(self) -> int:
        """Batches that are durable."""
        return max((span.end or 0 for span in self.spans), default=0)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Batches ``first`` to before ``end`` that a learner trained and that somebody trained again.

    Of a lease that was taken back ``end`` is what its learner had reported; it may have trained
    more. Where a learner trained its part once more, the two count the repeated batches from 0.
    """

    turn: int
    part: int
    learner: str
    epoch: int
    first: int
    end: int
    reason: str


@dataclass(slots=True)
class DataAccount:
    """A run's data: every part of every pass, what was repeated, and what is wrong.

    Attributes:
        parts: Virtual parts of the data; 0: nobody has asked for any.
        turns: For each pass, its parts that were ever leased, by number.
        repeats: What was trained more than once.
        undone: Entries that count no longer because the run went back to an earlier state.
        problems: What must not be, in words; empty if the ledger adds up.
    """

    parts: int = 0
    turns: dict[int, dict[int, PartAccount]] = field(default_factory=dict)
    repeats: list[Repeat] = field(default_factory=list)
    undone: int = 0
    problems: list[str] = field(default_factory=list)

    def count(self, turn: int, standing: Standing) -> int:
        """Parts of a pass that stand like this."""
        return sum(part.standing == standing for part in self.turns[turn].values())

    def shares(self, turn: int) -> dict[str, int]:
        """Durable batches of a pass by learner."""
        shares: dict[str, int] = {}
        for part in self.turns[turn].values():
            for span in part.spans:
                if span.end is not None:
                    shares[span.learner] = shares.get(span.learner, 0) + span.end - span.first
        return shares


def account_of_data(items: Iterable[LedgerEntry | Basis]) -> DataAccount:
    """Adds up a ledger."""
    entries, undone, problems = _in_force(items)
    books = _Bookkeeping()
    for entry in entries:
        books.take(entry)
    books.account.undone = undone
    books.account.problems[:0] = problems
    books.finish()
    return books.account


def read_data(run: Path) -> DataAccount:
    """The account of a run folder's data.

    Raises:
        StorageError: It has neither ledger nor tape, or they cannot be read.
    """
    files = ledger_files(run)
    if files:
        return account_of_data(item for file in files for item in read_ledger(file))
    return account_of_data(_of_tape(run))


def _of_tape(run: Path) -> Iterator[LedgerEntry]:
    try:
        reader = TapeReader(run)
    except StorageError as error:
        raise StorageError(f"{run} has no {FILE}, and no tape either: {error}") from None
    for record in reader:
        if record.kind == "effect" and record.type == "Enter":
            effect = record.value()
            assert isinstance(effect, Enter)
            yield effect.entry


def _in_force(
    items: Iterable[LedgerEntry | Basis],
) -> tuple[list[LedgerEntry], int, list[str]]:
    entries: list[LedgerEntry] = []
    undone, problems = 0, []
    for item in items:
        if not isinstance(item, Basis):
            entries.append(item)
            continue
        lost = item.book.entries - len(entries)
        if lost > 0 and lost == len(item.entered):
            entries += item.entered
        elif lost > 0:
            problems.append(f"{lost} entries of the ledger are gone: who trained what is not known")
        else:
            undone += len(entries) - item.book.entries
            del entries[item.book.entries :]
    return entries, undone, problems


class _Bookkeeping:
    def __init__(self) -> None:
        self.account = DataAccount()
        self._leases: dict[int, Leased] = {}

    def take(self, entry: LedgerEntry) -> None:
        match entry:
            case DataDescribed(parts):
                self.account.parts = parts
            case Leased():
                self._leased(entry)
            case Settled(lease, _, batches):
                self._ended(lease, batches, "durable")
            case TakenBack():
                self._taken_back(entry)
            case Repeated():
                self._repeated(entry)
            case _:
                assert_never(entry)

    def _leased(self, entry: Leased) -> None:
        self._leases[entry.lease] = entry
        parts = self.account.turns.setdefault(entry.turn, {})
        part = parts.setdefault(entry.part, PartAccount(entry.part, standing="returned"))
        name = f"part {entry.part} of pass {entry.turn}"
        if part.standing == "training":
            self._wrong(f"{name} is leased to {entry.learner} and to {part.spans[-1].learner}")
        elif part.standing == "durable":
            self._wrong(f"{name} is durable, and leased once more, to {entry.learner}")
        elif entry.start > part.batches:
            self._wrong(f"{name}: batches {part.batches} to {entry.start - 1} are skipped")
        elif entry.start < part.batches:
            self._wrong(f"{name}: batches {entry.start} to {part.batches - 1} are durable twice")
        part.spans.append(LeasedSpan(entry.lease, entry.learner, entry.epoch, entry.start))
        part.standing = "training"

    def _ended(self, lease: int, end: int, standing: Standing) -> Leased | None:
        leased = self._leases.get(lease)
        if leased is None:
            self._wrong(f"lease {lease} ends, and was never given")
            return None
        part = self.account.turns[leased.turn][leased.part]
        span = part.spans[-1]
        if part.standing != "training" or span.lease != lease:
            self._wrong(f"lease {lease} ends, and is not in force")
            return None
        span.end, part.standing = end, standing
        return leased

    def _taken_back(self, entry: TakenBack) -> None:
        leased = self._ended(entry.lease, entry.durable, "returned")
        if leased is not None and entry.trained > entry.durable:
            self._repeat(leased, entry.durable, entry.trained, entry.reason)

    def _repeated(self, entry: Repeated) -> None:
        leased = self._leases.get(entry.lease)
        if leased is None:
            self._wrong(f"lease {entry.lease} is repeated, and was never given")
            return
        self._repeat(leased, 0, entry.batches, "no lease was left while the coordinator was away")

    def _repeat(self, leased: Leased, first: int, end: int, reason: str) -> None:
        self.account.repeats.append(
            Repeat(leased.turn, leased.part, leased.learner, leased.epoch, first, end, reason)
        )

    def _wrong(self, problem: str) -> None:
        self.account.problems.append(problem)

    def finish(self) -> None:
        """A pass begins when every part of the one before is somebody's: none is left out."""
        turns = self.account.turns
        for turn in sorted(turns):
            skipped = sorted(set(range(self.account.parts)) - turns[turn].keys())
            if turn < max(turns) and skipped:
                self._wrong(f"parts {skipped[:5]} of pass {turn} are skipped")
            beyond = [part for part in turns[turn] if part >= self.account.parts]
            if beyond:
                self._wrong(f"parts {beyond[:5]} of pass {turn} are not of the data")
