"""A write-ahead journal: records that are on the disk before anybody hears of them.

One file, only ever appended to. A record is a small JSON object and a body of bytes, with a digest
over both, so that after a crash every record is whole or not there: a torn one can only be the
last, and is cut off when the file is opened again.

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
    """One record: what it says (plain JSON values) and its body."""

    fields: dict[str, Any]
    body: bytes


class Journal:
    """A journal that is open for writing.

    A write that fails (the disk is full) leaves the file as it was: the next one may succeed.

    Args:
        path: The file; made if it does not exist, and cut back to its last whole record.

    Raises:
        StorageError: The file cannot be opened or is no journal.
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
        """Writes a record and waits until the disk has it.

        Raises:
            StorageError: It cannot be written; the record is not in the journal.
        """
        text = json.dumps(fields, separators=(",", ":")).encode()
        body = memoryview(body).cast("B")
        head = _HEAD.pack(MAGIC, len(text), body.nbytes, _digest(text, body))
        try:
            for part in (head + text, body):
                self._disk.write(self._file, part)
            self._disk.sync_file(self._file)  # break: journal-not-synced
        except OSError as error:
            self._undo()
            raise StorageError(
                f"{self.path} cannot be written: {error.strerror}: free disk space"
            ) from error
        self.nbytes += len(head) + len(text) + body.nbytes
        self._failed = False  # what had failed here is written over

    def settle(self) -> None:
        """Makes sure that no record whose writing failed is ever read.

        Raises:
            StorageError: It may be; the next record that is written goes over it.
        """
        if not self._failed:
            return
        try:
            self._disk.truncate(self._file, self.nbytes)
            self._disk.sync_file(self._file)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be cut: {error.strerror}") from error
        self._failed = False

    def close(self) -> None:
        self._file.close()

    def _undo(self) -> None:
        self._failed = True
        with contextlib.suppress(StorageError):  # break: torn-record-stays
            self.settle()
        self._file.seek(self.nbytes)


class JournalReader:
    """The whole records of a journal, in order; what follows the last whole one is left out.

    `torn_bytes` were left out; that is known when all records were read.

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
    """What the records of a journal say, in order, without reading their bodies or digests.

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
    """The next record, or ``None`` at the end of what is whole."""
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
