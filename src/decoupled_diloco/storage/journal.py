"""A write-ahead journal: records that are durable before any other process is notified of them.

A journal is one append-only file. A record is a small JSON object and a body of bytes, with a
digest over both. So after a crash every record is either complete or absent: only the last one can
be torn, and it is truncated when the file is opened again.

Layout of a record, little-endian::

    magic 4 B | bytes of the JSON 4 B | bytes of the body 8 B | xxh3-128 of JSON and body 16 B |
    JSON, UTF-8 | body
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from decoupled_diloco.errors import StorageError
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON

MAGIC = b"DDJ1"
_HEAD = struct.Struct("<4sIQ16s")


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One record: its fields (plain JSON values) and its body."""

    fields: dict[str, Any]
    body: bytes


class Journal:
    """A journal that is open for writing.

    After a failed write, for example on a full disk, the next one may succeed: the failed record is
    removed or overwritten.

    Args:
        path: The file. It is created if it does not exist, and truncated to its last whole record.

    Raises:
        StorageError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._disk = disk = runtime().disk
        self._failed = False
        try:
            disk.make_folder(path.parent)
            self.nbytes = _whole_bytes(path) if disk.exists(path) else 0
            self._file: BinaryIO = disk.open(path)
            try:
                disk.truncate(self._file, self.nbytes)
                disk.sync(path.parent)
            except OSError:
                self._file.close()
                raise
        except OSError as error:
            raise StorageError(f"{path} cannot be opened: {error.strerror}") from error

    def append(self, fields: Mapping[str, Any], body: memoryview | bytes = b"") -> None:
        """Write a record; it is durable when this returns.

        Raises:
            StorageError: The record cannot be written and is not in the journal.
        """
        text = json.dumps(fields, separators=(",", ":")).encode()
        body = memoryview(body).cast("B")
        head = _HEAD.pack(MAGIC, len(text), body.nbytes, _digest(text, body))
        try:
            for part in (head + text, body):  # two writes: concatenation would copy a large body
                self._disk.write(self._file, part)
            self._disk.sync_file(self._file)  # break: journal-not-synced
        except OSError as error:
            self._undo()
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror}: free disk space"
            ) from error
        self.nbytes += len(head) + len(text) + body.nbytes
        self._failed = False  # this record has overwritten the failed one

    def settle(self) -> None:
        """Ensure that a record whose write failed can never be read.

        Such a record may be complete in the file although its sync failed.

        Raises:
            StorageError: The record cannot be removed yet; the next write overwrites it.
        """
        if not self._failed:
            return
        try:
            self._disk.truncate(self._file, self.nbytes)
            self._disk.sync_file(self._file)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be truncated: {error.strerror}") from error
        self._failed = False

    def close(self) -> None:
        self._file.close()

    def _undo(self) -> None:
        self._failed = True
        with contextlib.suppress(StorageError):  # break: torn-record-stays
            self.settle()
        # Also if the truncation failed: the next record must overwrite the failed one.
        self._file.seek(self.nbytes)


class JournalReader:
    """Iterates over the whole records of a journal, in order, and ignores bytes after the last one.

    Attributes:
        torn_bytes: The number of ignored bytes; valid when all records have been read.

    Raises:
        StorageError: While iterating: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[JournalRecord]:
        try:
            with runtime().disk.reading(self.path) as file:
                end = 0
                while (record := _read(file)) is not None:
                    end = file.tell()
                    yield record
                self.torn_bytes = os.fstat(file.fileno()).st_size - end
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror}") from error


def fields_in(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the fields of a journal's records, in order, without reading bodies or digests.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        with runtime().disk.reading(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                magic, text_bytes, body_bytes, _ = _HEAD.unpack(head)
                if magic != MAGIC or file.tell() + text_bytes + body_bytes > nbytes:
                    return
                try:
                    yield dict(json.loads(file.read(text_bytes)))
                except NOT_JSON:
                    return
                file.seek(body_bytes, os.SEEK_CUR)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error


def _whole_bytes(path: Path) -> int:
    with runtime().disk.reading(path) as file:
        end = 0
        while _read(file) is not None:
            end = file.tell()
    return end


def _read(file: BinaryIO) -> JournalRecord | None:
    """Return the next record, or ``None`` at the end of the file or at a torn record."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, text_bytes, body_bytes, digest = _HEAD.unpack(head)
    left = os.fstat(file.fileno()).st_size - file.tell()
    if magic != MAGIC or text_bytes + body_bytes > left:
        return None
    text, body = file.read(text_bytes), file.read(body_bytes)
    if _digest(text, body) != digest:  # break: record-digest-unchecked
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return JournalRecord(fields, body) if isinstance(fields, dict) else None


def _digest(text: bytes, body: memoryview | bytes) -> bytes:
    state = xxhash.xxh3_128(text)
    state.update(body)
    return state.digest()
