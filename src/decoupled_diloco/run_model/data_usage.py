"""Read and check the data ledger of a run: which learner trained which partition of the data.

The ledger is ``RUN/data.ledger``. For a run that has only a tape, such as a simulated one, it is
the coordinator's entries on the tape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, assert_never

from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol.messages import (
    DataDescribed,
    Enter,
    Leased,
    LedgerEntry,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.storage.data_ledger import FILE, Basis, ledger_files, read_ledger
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.reader import check_name

Standing = Literal["durable", "training", "returned"]


@dataclass(slots=True)
class LeasedSpan:
    """The batches of a partition trained under one lease: ``first`` up to but excluding ``end``.

    ``end`` is ``None`` while the lease is in force.
    """

    lease: int
    learner: str
    epoch: int
    first: int
    end: int | None = None


@dataclass(slots=True)
class PartAccount:
    """One partition in one epoch: the leases, in order, and its state."""

    part: int
    spans: list[LeasedSpan] = field(default_factory=list)
    standing: Standing = "training"

    @property
    def batches(self) -> int:
        """The number of durable batches."""
        return max((span.end or 0 for span in self.spans), default=0)


@dataclass(frozen=True, slots=True)
class Repeat:
    """Batches ``first`` up to but excluding ``end`` that were trained more than once.

    For a revoked lease, ``end`` is the last report of its learner, which may have trained more. If
    a learner trained its own partition again, the repeated batches count from 0.
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
    """A run's data: every partition in every epoch, repeated batches, and problems."""

    parts: int = 0  # virtual partitions of the data; 0 if no learner has requested one
    turns: dict[int, dict[int, PartAccount]] = field(default_factory=dict)  # by epoch and partition
    repeats: list[Repeat] = field(default_factory=list)  # batches trained more than once
    undone: int = 0  # entries that no longer count because the run returned to an earlier state
    problems: list[str] = field(default_factory=list)  # violated invariants, as sentences

    def count(self, turn: int, standing: Standing) -> int:
        """Return the number of an epoch's partitions in this state."""
        return sum(part.standing == standing for part in self.turns[turn].values())

    def shares(self, turn: int) -> dict[str, int]:
        """Return the number of durable batches of an epoch by learner."""
        shares: dict[str, int] = {}
        for part in self.turns[turn].values():
            for span in part.spans:
                if span.end is not None:
                    shares[span.learner] = shares.get(span.learner, 0) + span.end - span.first
        return shares


def account_of_data(items: Iterable[LedgerEntry | Basis]) -> DataAccount:
    books = _Bookkeeping()
    for entry in _in_force(items, books.account):
        books.take(entry)
    books.finish()
    return books.account


def read_data(run: Path) -> DataAccount:
    """Return the account of a run folder's data.

    Raises:
        StorageError: The folder has neither a ledger nor a tape, or they cannot be read.
    """
    check_name(run)  # reject a file before it is used as a folder
    files = ledger_files(run)
    if files:
        return account_of_data(item for file in files for item in read_ledger(file))
    return account_of_data(_of_tape(run))


def _of_tape(run: Path) -> Iterator[LedgerEntry]:
    try:
        reader = TapeReader(run)
    except StorageError as error:
        raise StorageError(f"{run} has neither {FILE} nor a tape: {error}") from None
    for record in reader:
        if record.kind == "effect" and record.type == "Enter":
            effect = record.value()
            assert isinstance(effect, Enter)
            yield effect.entry


def _in_force(items: Iterable[LedgerEntry | Basis], account: DataAccount) -> list[LedgerEntry]:
    """Return the entries that count; add undone and lost entries to the account."""
    entries: list[LedgerEntry] = []
    for item in items:
        if not isinstance(item, Basis):
            entries.append(item)
            continue
        lost = item.book.entries - len(entries)
        if lost > 0 and lost == len(item.entered):
            entries += item.entered
        elif lost > 0:
            account.problems.append(
                f"{lost} ledger entries are missing: it is unknown which learners trained that data"
            )
        else:
            account.undone -= lost
            del entries[item.book.entries :]
    return entries


class _Bookkeeping:
    def __init__(self) -> None:
        self.account = DataAccount()
        self._leases: dict[int, Leased] = {}
        self._wrong = self.account.problems.append

    def take(self, entry: LedgerEntry) -> None:
        match entry:
            case DataDescribed(parts):
                self.account.parts = parts
            case Leased():
                self._leased(entry)
            case Settled(lease, _, batches):
                self._ended(lease, batches, "durable")
            case TakenBack(lease=lease, durable=durable, trained=trained, reason=reason):
                leased = self._ended(lease, durable, "returned")
                if leased is not None and trained > durable:
                    self._repeat(leased, durable, trained, reason)
            case Repeated(lease=lease, batches=batches):
                leased = self._leases.get(lease)
                if leased is None:
                    self._wrong(f"lease {lease} is repeated but was never granted")
                    return
                reason = "no lease was left while the coordinator was away"
                self._repeat(leased, 0, batches, reason)
            case _:
                assert_never(entry)

    def _leased(self, entry: Leased) -> None:
        self._leases[entry.lease] = entry
        parts = self.account.turns.setdefault(entry.turn, {})
        part = parts.setdefault(entry.part, PartAccount(entry.part, standing="returned"))
        name = f"partition {entry.part} of epoch {entry.turn}"
        if part.standing == "training":
            self._wrong(f"{name} is leased to {entry.learner} and to {part.spans[-1].learner}")
        elif part.standing == "durable":
            self._wrong(f"{name} is durable but leased again, to {entry.learner}")
        elif entry.start > part.batches:
            self._wrong(f"{name}: batches {part.batches} to {entry.start - 1} are skipped")
        elif entry.start < part.batches:
            self._wrong(f"{name}: batches {entry.start} to {part.batches - 1} are durable twice")
        part.spans.append(LeasedSpan(entry.lease, entry.learner, entry.epoch, entry.start))
        part.standing = "training"

    def _ended(self, lease: int, end: int, standing: Standing) -> Leased | None:
        leased = self._leases.get(lease)
        if leased is None:
            self._wrong(f"lease {lease} ends but was never granted")
            return None
        part = self.account.turns[leased.turn][leased.part]
        span = part.spans[-1]
        if part.standing != "training" or span.lease != lease:
            self._wrong(f"lease {lease} ends but is not in force")
            return None
        span.end, part.standing = end, standing
        return leased

    def _repeat(self, leased: Leased, first: int, end: int, reason: str) -> None:
        self.account.repeats.append(
            Repeat(leased.turn, leased.part, leased.learner, leased.epoch, first, end, reason)
        )

    def finish(self) -> None:
        """Check that no partition was skipped: an epoch starts when all of the last are leased."""
        turns, every = self.account.turns, range(self.account.parts)
        for turn in sorted(turns):
            skipped = sorted(set(every) - turns[turn].keys())
            if turn < max(turns) and skipped:
                self._wrong(f"partitions {skipped[:5]} of epoch {turn} are skipped")
            beyond = [part for part in turns[turn] if part >= len(every)]
            if beyond:
                self._wrong(f"partitions {beyond[:5]} of epoch {turn} do not exist")
