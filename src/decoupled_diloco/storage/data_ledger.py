"""The data ledger on disk: ``RUN/data.ledger``, an append-only journal.

A record holds entries that were decided together, or a *basis*: the whole state of the leases on
which later entries build. A run that returns to an earlier state of itself writes a basis. Entries
between that state and the basis no longer count but stay readable.

If several processes can act for the coordinator, each has its own file, ``data-<number>.ledger``
with the number of its claim. The file starts with the basis on which the process builds. So no
process writes to the file of another one that may still be running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from decoupled_diloco.errors import ProtocolError, StorageError
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.features.partitions import LeaseBook, apply, copied
from decoupled_diloco.protocol.messages import LEDGER_ENTRIES, LedgerEntry
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, exists, names_in
from decoupled_diloco.storage.journal import Journal, JournalReader

FILE = "data.ledger"

_BOOK = TypeAdapter(LeaseBook)


@dataclass(frozen=True, slots=True)
class Basis:
    """A new state of the leases, which replaces the effect of all earlier records.

    ``entered``: the last entries that led to it, in case learners received them and the ledger did
    not.
    """

    book: LeaseBook
    entered: tuple[LedgerEntry, ...] = ()


class DataLedger:
    """The ledger of a coordinator, open for writing.

    Args:
        folder: The run folder.
        book: The leases in the coordinator's own state. They take precedence if the file is missing
            or behind.
        entered: The last entries that led to them, at least those that the file may lack.
        claim: The number of this process's claim; 0 if no other process can act.

    Raises:
        StorageError: The file exists but cannot be read.
    """

    def __init__(
        self, folder: Path, book: LeaseBook, entered: Sequence[LedgerEntry] = (), claim: int = 0
    ) -> None:
        before = ledger_files(folder)
        newest = before[-1] if before else folder / FILE
        self.path = folder / f"data-{claim}.ledger" if claim else newest
        self._journal: Journal | None = None
        self.book = _folded(newest)
        # The coordinator's state can be written before the ledger. After a crash in between, the
        # ledger lacks the last entries.
        missing = book.entries - self.book.entries
        if missing > 0:
            self.go_back(book, entered[-missing:])
        elif self.path != newest and self.book.entries:  # a new claim's file starts with a basis
            self.go_back(self.book)

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        """Write entries; they are durable when this returns.

        Raises:
            StorageError: The entries cannot be written; the ledger contains none of them.
        """
        self._append({"entries": [wire.encode(entry) for entry in entries]})

    def go_back(self, book: LeaseBook, entered: Sequence[LedgerEntry] = ()) -> None:
        """Write a basis: the run continues from this state, an earlier one or one that was lost."""
        last = [wire.encode(entry) for entry in entered]
        self._append({"basis": _BOOK.dump_python(book, mode="json"), "entered": last})
        self.book = copied(book)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _append(self, fields: dict[str, object]) -> None:
        if self._journal is None:  # opened at the first write: a run without leases has no ledger
            self._journal = Journal(self.path)
        self._journal.append({**fields, "wall": runtime().wall()})


def read_ledger(path: Path) -> Iterator[LedgerEntry | Basis]:
    """Yield the entries and bases of a ledger, in order.

    Raises:
        StorageError: The file cannot be read or has another format version.
    """
    for record in JournalReader(path):
        try:
            if "basis" in record.fields:
                last = (wire.decode(e, LEDGER_ENTRIES) for e in record.fields["entered"])
                yield Basis(_BOOK.validate_python(record.fields["basis"]), tuple(last))
            for entry in record.fields.get("entries", ()):
                yield wire.decode(entry, LEDGER_ENTRIES)
        except (ProtocolError, *NOT_JSON) as error:
            raise StorageError(
                f"{path} has an unknown format ({error}): read it with the version that wrote it"
            ) from error


def ledger_files(folder: Path) -> list[Path]:
    """Return the files of a run's ledger, in the order in which they were written."""
    numbered = {
        int(path.stem.removeprefix("data-")): path
        for path in names_in(folder)
        if path.match("data-*.ledger") and path.stem.removeprefix("data-").isdigit()
    }
    first = [folder / FILE] if exists(folder / FILE) else []
    return first + [numbered[number] for number in sorted(numbered)]


def _folded(path: Path) -> LeaseBook:
    book = LeaseBook()
    if not exists(path):
        return book
    for item in read_ledger(path):
        if isinstance(item, Basis):
            book = item.book
        else:
            apply(book, item)
    return book
