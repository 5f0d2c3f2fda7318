"""Where the coordinator keeps its state: what it must not forget, in the run folder.

One process may act: one small file, written whole, and beside it the records of learners that have
joined since, a line each, so that a join costs the same with four learners and with four thousand.
Several may: every state is a file of its own,
numbered, created once. Who goes on from state n and creates n + 1 is the only one to do so; an
earlier coordinator that still writes finds its number taken and ends, before it has told anybody
anything. So the storage orders the coordinators' decisions, and no clock is asked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from decoupled_diloco.errors import LeaseError, StorageError
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.claims import create_once, newest_number, numbered
from decoupled_diloco.storage.files import write_text
from decoupled_diloco.storage.shared_folder import STATE
from decoupled_diloco.syncer.shard_lease import NoStandby, ShardLease

FILE = STATE
"""The newest state; where several may act, a copy for readers, which decides nothing."""

JOINED = "coordinator.joined"
"""Learners' records since the newest state, a line each; where one process acts."""

STATES = "coordinator"
"""The folder of the numbered states."""

STATES_KEPT = 3


def newest_state(folder: Path) -> Path:
    """Where a run folder has the coordinator's newest state, if it has one.

    Raises:
        StorageError: The folder cannot be read.
    """
    number = newest_number(folder / STATES)
    return numbered(folder / STATES, number) if number else folder / FILE


def joined_since(folder: Path) -> list[str]:
    """The records of learners beside the newest state; the last may be torn, and counts not then.

    Raises:
        StorageError: They cannot be read.
    """
    path = folder / JOINED
    try:
        text = runtime().disk.read(path).decode() if runtime().disk.exists(path) else ""
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from error
    return text.split("\n")[:-1]


class CoordinatorDisk:
    """The state of one coordinator's life.

    Args:
        folder: The run folder.
        shard_lease: The claim by which this process acts.
    """

    def __init__(self, folder: Path, shard_lease: ShardLease | NoStandby) -> None:
        self._states = folder / STATES
        self._shard_lease = shard_lease
        self._number = 0
        self._whole = False

    def find(self) -> Path:
        """Where the state of an earlier life is, if there was one.

        Raises:
            StorageError: The folder cannot be read.
        """
        if self._shard_lease.number:
            self._number = newest_number(self._states)
        return newest_state(self._states.parent)

    @property
    def can_append(self) -> bool:
        """Whether records can be added to what this life has written; never to a torn line."""
        return self._whole and not self._shard_lease.number

    def append(self, lines: Sequence[str]) -> None:
        """Adds learners' records to the state on the disk.

        Raises:
            StorageError: They cannot be written; another attempt may succeed.
        """
        path = self._states.with_name(JOINED)
        self._whole = False
        try:
            disk = runtime().disk
            with disk.open(path) as file:
                file.seek(0, os.SEEK_END)
                # break: joins-forgotten
                disk.write(file, "".join(f"{line}\n" for line in lines).encode())
                disk.sync_file(file)
            disk.sync(path.parent)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
        self._whole = True

    def write(self, text: str) -> None:
        """Brings a state to the disk.

        Raises:
            StorageError: It cannot be written; another attempt may succeed.
            LeaseError: Another coordinator has gone on from the state before.
        """
        if self._shard_lease.number:
            number = self._number + 1
            path = numbered(self._states, number)
            is_ours = create_once(path, text, self._shard_lease.nonce)
            if is_ours:
                self._number = number  # also if the storage fails now, and this is tried again
            if not is_ours or self._newest() > number:
                raise LeaseError(f"another coordinator has gone on: {path} is not this one's")
            self._forget(number - STATES_KEPT)
        write_text(self._states.with_name(FILE), text)
        with contextlib.suppress(OSError):  # older records than the state's change nothing
            runtime().disk.remove(self._states.with_name(JOINED))
        self._whole = True
        if not self._shard_lease.number:
            self._forget(self._newest())  # of a time when the run had standbys

    def _newest(self) -> int:
        return newest_number(self._states)

    def _forget(self, last: int) -> None:
        """Deletes what nobody goes on from; a number that is free again is not the newest."""
        for number in range(last, 0, -1):
            path = numbered(self._states, number)
            with contextlib.suppress(OSError):
                if not runtime().disk.exists(path):
                    break
                runtime().disk.remove(path)
