"""The write-ahead journal: every record is complete or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from decoupled_diloco.errors import StorageError
from decoupled_diloco.storage.journal import Journal, JournalReader, JournalRecord

RECORDS = [({"n": 1}, b"one"), ({"n": 2}, b""), ({"n": 3, "text": "drei"}, bytes(range(256)))]


def written(path: Path) -> list[int]:
    """Write the records and return the end of each."""
    journal, ends = Journal(path), []
    for fields, body in RECORDS:
        journal.append(fields, body)
        ends.append(journal.nbytes)
    journal.close()
    assert path.stat().st_size == ends[-1]
    return ends


def test_records_come_back_in_order(tmp_path: Path) -> None:
    written(tmp_path / "new" / "a.journal")
    found = list(JournalReader(tmp_path / "new" / "a.journal"))
    assert found == [JournalRecord(fields, body) for fields, body in RECORDS]


def test_a_journal_truncated_at_any_byte_keeps_the_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    ends = written(path)
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        whole = sum(end <= length for end in ends)
        assert len(list(JournalReader(path))) == whole


def test_a_flipped_bit_ends_the_journal_before_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    ends = written(path)
    content = bytearray(path.read_bytes())
    content[ends[1] - 1] ^= 1
    path.write_bytes(content)
    assert [record.fields["n"] for record in JournalReader(path)] == [1]


def test_any_changed_byte_of_a_record_ends_the_journal_before_it(tmp_path: Path) -> None:
    """Also if its text is still JSON: no other digest covers the fields."""
    path = tmp_path / "a.journal"
    ends = written(path)
    content = path.read_bytes()
    for place in range(ends[1], ends[2]):
        changed = bytearray(content)
        changed[place] ^= 3
        path.write_bytes(changed)
        assert [record.fields["n"] for record in JournalReader(path)] == [1, 2], place


def test_after_a_torn_write_it_continues_after_the_last_whole_record(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.journal"
    ends = written(path)
    path.write_bytes(path.read_bytes()[: ends[-1] - 5])
    journal = Journal(path)
    assert journal.nbytes == ends[1]
    journal.append({"n": 4}, b"four")
    journal.close()
    assert [record.fields["n"] for record in JournalReader(path)] == [1, 2, 4]


def test_a_full_disk_loses_only_the_failed_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.journal"
    journal = Journal(path)
    journal.append({"n": 1}, b"one")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left on device: free disk space"):
            journal.append({"n": 2}, b"two")
    journal.append({"n": 3}, b"three")
    journal.close()
    assert [record.fields["n"] for record in JournalReader(path)] == [1, 3]


def test_a_path_that_is_not_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be opened"):
        Journal(tmp_path)
    with pytest.raises(StorageError, match="cannot be read"):
        list(JournalReader(tmp_path / "missing"))
