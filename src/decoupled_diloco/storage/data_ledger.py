"""The data ledger on disk: ``RUN/data.ledger``, a journal that is only ever appended to.

A record holds entries that were decided together, or a *basis*: the whole state of the leases from
which later entries go on. A run that goes back to an earlier state of itself writes one; entries
between that state and the basis count no longer, and stay readable.

Where several processes may act for the coordinator each has a file of its own,
``data-<number>.ledger`` by its claim, which begins with the basis that it goes on from: none writes
into the file of another that may still be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from decoupled_diloco.errors import ProtocolError, StorageError
from decoupled_diloco.protocol import wire
from decoupled_diloco.protocol.data_leases.coordinator import LeaseBook, apply, copied
from decoupled_diloco.protocol.data_leases.ledger import LEDGER_ENTRIES, LedgerEntry
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, exists, names_in
from decoupled_diloco.storage.journal import Journal, JournalReader

FILE = "data.ledger"

_BOOK = TypeAdapter(LeaseBook)


@dataclass(frozen=True, slots=True)
class Basis:
    """From here on the leases are these, whatever was entered before.

    ``entered``: the last entries that led to them, in case they were told and did not get here.
    """

    book: LeaseBook
    entered: tuple[LedgerEntry, ...] = ()


class DataLedger:
    """The ledger of a coordinator, open for writing.

    Args:
        book: The leases as the coordinator's own state has them; where the file is gone, or behind,
            they are what counts.
        entered: The last entries that led to them, at least those that the file may lack.
        claim: Number of this process's claim; 0: no other can act.

    Raises:
        StorageError: It is there and cannot be read.
    """

    def __init__(
        self, folder: Path, book: LeaseBook, entered: Sequence[LedgerEntry] = (), claim: int = 0
    ) -> None:
        before = ledger_files(folder)
        newest = before[-1] if before else folder / FILE
        self.path = folder / f"data-{claim}.ledger" if claim else newest
        self._journal: Journal | None = None
        self.book = _folded(newest)
        missing = book.entries - self.book.entries
        if missing > 0:
            self.go_back(book, entered[-missing:])
        elif self.path != newest and self.book.entries:
            self.go_back(self.book)

    def append(self, entries: Sequence[LedgerEntry]) -> None:
        """Writes entries and waits until the disk has them.

        Raises:
            StorageError: They cannot be written; none of them is in the ledger.
        """
        self._append({"entries": [wire.encode(entry) for entry in entries]})

    def go_back(self, book: LeaseBook, entered: Sequence[LedgerEntry] = ()) -> None:
        """The run goes on from this state of its leases, an earlier one or one that was lost."""
        last = [wire.encode(entry) for entry in entered]
        self._append({"basis": _BOOK.dump_python(book, mode="json"), "entered": last})
        self.book = copied(book)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _append(self, fields: dict[str, object]) -> None:
        if self._journal is None:
            self._journal = Journal(self.path)
        self._journal.append({**fields, "wall": runtime().wall()})


def read_ledger(path: Path) -> Iterator[LedgerEntry | Basis]:
    """What is in a ledger, in order.

    Raises:
        StorageError: It cannot be read, or is not of this version.
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
                f"{path} cannot be understood ({error}): read it with the version that wrote it"
            ) from error


def ledger_files(folder: Path) -> list[Path]:
    """The files of a run's ledger, in the order in which they were written."""
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
