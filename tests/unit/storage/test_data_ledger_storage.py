"""The data ledger on disk: entries are restored, and a run can return to an earlier state."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol.features.partitions import LeaseBook, apply, copied
from decoupled_diloco.protocol.messages import (
    DataDescribed,
    Leased,
    LedgerEntry,
    Repeated,
    Settled,
    TakenBack,
)
from decoupled_diloco.run_model.data_usage import read_data
from decoupled_diloco.storage.data_ledger import Basis, DataLedger, ledger_files, read_ledger
from decoupled_diloco.storage.journal import Journal

ENTRIES: list[LedgerEntry] = [
    DataDescribed(3),
    Leased(1, 0, 0, 0, "a", 1),
    Leased(2, 0, 1, 0, "b", 1),
    Repeated(1, "a", 4),
    Settled(1, "a", 9),
    TakenBack(2, "b", 3, 5, "gone"),
    Leased(3, 0, 1, 3, "a", 1),
]


def book_of(entries: list[LedgerEntry]) -> LeaseBook:
    book = LeaseBook()
    for entry in entries:
        apply(book, entry)
    return book


def test_a_new_coordinator_reads_the_leases_of_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "data.ledger"
    ledger = DataLedger(tmp_path, LeaseBook())
    ledger.append(ENTRIES[:3])
    ledger.append(ENTRIES[3:])
    ledger.close()
    assert list(read_ledger(path)) == ENTRIES
    assert DataLedger(tmp_path, LeaseBook()).book == book_of(ENTRIES)


def test_a_torn_entry_was_never_sent(tmp_path: Path) -> None:
    path = tmp_path / "data.ledger"
    ledger = DataLedger(tmp_path, LeaseBook())
    for entry in ENTRIES:
        ledger.append([entry])
    ledger.close()
    path.write_bytes(path.read_bytes()[:-3])
    again = DataLedger(tmp_path, LeaseBook())
    assert again.book == book_of(ENTRIES[:-1])
    again.append([ENTRIES[-1]])
    again.close()
    assert list(read_ledger(path)) == ENTRIES


def test_a_run_that_goes_back_drops_later_entries(tmp_path: Path) -> None:
    path = tmp_path / "data.ledger"
    ledger = DataLedger(tmp_path, LeaseBook())
    ledger.append(ENTRIES)
    before = book_of(ENTRIES[:3])
    ledger.go_back(before)
    later = TakenBack(1, "a", 0, 2, "gone")
    ledger.append([later])
    ledger.close()
    expected = copied(before)
    apply(expected, later)
    assert DataLedger(tmp_path, LeaseBook()).book == expected
    assert Basis(before) in list(read_ledger(path))


def test_a_missing_ledger_is_recreated_from_the_coordinators_state(tmp_path: Path) -> None:
    book = book_of(ENTRIES)
    ledger = DataLedger(tmp_path, book)
    ledger.close()
    assert ledger.book == book
    assert list(read_ledger(ledger.path)) == [Basis(book)]


def test_an_entry_of_another_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.ledger"
    journal = Journal(path)
    journal.append({"entries": [{"type": "Borrowed", "lease": 1}]})
    journal.close()
    with pytest.raises(StorageError, match=r"data\.ledger has an unknown format .*'Borrowed'"):
        DataLedger(tmp_path, LeaseBook())


def test_a_large_ledger_is_read_in_little_time(tmp_path: Path) -> None:
    """A restarted coordinator reads all of it before it admits a learner."""
    ledger = DataLedger(tmp_path, LeaseBook())
    many: list[LedgerEntry] = [DataDescribed(10_000)]
    for number in range(1, 10_001):
        many += [Leased(number, 0, number - 1, 0, "a", 1), Settled(number, "a", 9)]
    ledger.append(many)
    ledger.close()
    began = time.process_time()
    assert DataLedger(tmp_path, LeaseBook()).book.opened == 1
    assert time.process_time() - began < 5.0


def test_a_coordinator_that_takes_over_uses_its_own_file(tmp_path: Path) -> None:
    """Later writes of the previous coordinator then have no effect."""
    first = DataLedger(tmp_path, LeaseBook(), claim=1)
    first.append(ENTRIES[:3])
    book = book_of(ENTRIES[:4])  # its state was written, its ledger was not: it has stopped
    second = DataLedger(tmp_path, book, ENTRIES[3:4], claim=2)
    assert second.book == book
    second.append(ENTRIES[4:])
    first.append(ENTRIES[3:4])
    first.close()
    second.close()
    assert [path.name for path in ledger_files(tmp_path)] == ["data-1.ledger", "data-2.ledger"]
    account = read_data(tmp_path)
    assert not account.problems
    assert [span.learner for span in account.turns[0][1].spans] == ["b", "a"]
    third = DataLedger(tmp_path, LeaseBook(), claim=3)
    assert third.book == book_of(ENTRIES)
    third.close()


@pytest.mark.parametrize("since", [3, 1], ids=["none of them is there", "some are there"])
def test_entries_sent_but_not_written_by_a_dead_coordinator_are_kept(
    tmp_path: Path, since: int
) -> None:
    first = DataLedger(tmp_path, LeaseBook(), claim=1)
    first.append(ENTRIES[:3])
    first.close()
    second = DataLedger(tmp_path, book_of(ENTRIES[:5]), ENTRIES[since:5], claim=2)
    second.append(ENTRIES[5:])
    second.close()
    account = read_data(tmp_path)
    assert not account.problems
    assert account.count(0, "durable") == 1
