"""Leadership claims in shared storage: one process can create each claim, and the newest one holds.

Files of one folder, for claim number 7::

    00000007.json       the process that made it: created atomically and never changed
    00000007.renewals   the holder's renewal counter, replaced atomically each time

This module compares no claims and reads no clock: see `decoupled_diloco.protocol.lease_machine`.
The storage must meet two conditions. Every process sees a file once its creation is confirmed, and
a file cannot be created twice. Local disks and NFS version 3 or later meet both. ``ddiloco`` uses
hard links (`os.link`), which are atomic on both.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol.messages import Condition, NewestLease
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, is_folder, names_in

CLAIMS = "claims"
"""Subfolder of the run folder that contains one folder per shard."""

NUMBER_DIGITS = 8


def create_once(path: Path, text: str, nonce: str) -> bool:
    """Create a file atomically and durably unless it exists; return whether this call created it.

    Args:
        nonce: The nonce of the process, for the name of the temporary file.

    Raises:
        StorageError: The file cannot be written.
    """
    part, disk = path.with_name(f".{path.name}.{nonce}.part"), runtime().disk
    try:
        disk.make_folder(path.parent)
        # The content must be durable before the name exists, and the name must be durable before
        # the caller acts on the claim. A link fails if the name exists; a rename would replace it.
        with disk.open(part) as file:
            disk.truncate(file, 0)
            disk.write(file, text.encode())
            disk.sync_file(file)  # break: claim-linked-before-sync
        try:
            disk.link(part, path)
        except FileExistsError:
            return False
        disk.sync(path.parent)
        return True
    except OSError as error:
        raise StorageError(f"{path} cannot be created: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # a leftover temporary file is harmless
            disk.remove(part)


def newest_number(folder: Path) -> int:
    """Return the highest number of a file that `create_once` created; 0 if there is none.

    Raises:
        StorageError: The folder cannot be read. A folder that does not exist counts as empty.
    """
    return max(numbers(folder), default=0)


def numbered(folder: Path, number: int) -> Path:
    return folder / f"{number:0{NUMBER_DIGITS}d}.json"


def numbers(folder: Path) -> Iterator[int]:
    """Yield the numbers of the files that `create_once` created, in any order.

    Raises:
        StorageError: The folder cannot be read. A folder that does not exist counts as empty.
    """
    for path in names_in(folder):
        if path.suffix == ".json" and path.stem.isdigit():
            yield int(path.stem)


class ClaimStore:
    """The claims of one shard.

    Args:
        folder: The folder of the claims, in the storage that all contenders share. Its parent must
            exist: the process that starts a run creates it, once.
        nonce: A text that is unique to this process.
        lease_seconds: The length of the lease that this process claims.
        holder: A description of this process, for people.
    """

    def __init__(self, folder: Path, nonce: str, lease_seconds: float, holder: str) -> None:
        self.folder = folder
        self.nonce = nonce
        self.lease_seconds = lease_seconds
        self.holder = holder

    def newest(self) -> int:
        """Return the number of the newest claim; 0 if there is none.

        Raises:
            StorageError: The storage cannot be read or is not mounted.
        """
        self._require_storage()
        return newest_number(self.folder)

    def read_newest(self) -> NewestLease:
        """Return the newest claim.

        Raises:
            StorageError: The storage cannot be read, or the claim is torn.
        """
        number = self.newest()
        if not number:
            return NewestLease(0, "", 0, 0.0, "held")
        path = numbered(self.folder, number)
        try:
            claim = json.loads(runtime().disk.read(path))
            nonce, lease_seconds = str(claim["nonce"]), float(claim["lease_seconds"])
        except (OSError, *NOT_JSON) as error:
            raise StorageError(
                f"{path} cannot be read ({error}): if the error persists, stop all processes of "
                "this shard and remove the file"
            ) from error
        renewals, condition = self._renewals(number)
        return NewestLease(number, nonce, renewals, lease_seconds, condition)

    def claim(self, number: int) -> bool:
        """Create a claim unless it exists; return whether this process holds it."""
        self._require_storage()
        facts = {"nonce": self.nonce, "lease_seconds": self.lease_seconds, "holder": self.holder}
        return create_once(numbered(self.folder, number), json.dumps(facts), self.nonce)

    def renew(self, number: int, renewals: int, condition: Condition = "held") -> None:
        """Replace the renewal counter and the condition of a claim.

        The write is not synced to disk: after a power failure no process holds a claim, so the
        renewals may be lost.

        Raises:
            StorageError: The file cannot be written, or the claim no longer exists.
        """
        claim, path = numbered(self.folder, number), self._renewals_file(number)
        part, disk = path.with_name(f".{path.name}.part"), runtime().disk
        try:
            disk.size(claim)  # raises if the claim no longer exists
            disk.put(part, json.dumps({"renewals": renewals, "condition": condition}).encode())
            disk.rename(part, path)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def reopen(self) -> None:
        """Mark a finished run as continuing; only valid while no process of the shard runs."""
        newest = self.read_newest()
        if newest.condition == "finished":
            self.renew(newest.number, newest.renewals, "released")

    def _require_storage(self) -> None:
        """Raise if the storage is not mounted: an empty mount point looks like a new run.

        Raises:
            StorageError: The parent of the folder does not exist.
        """
        root = self.folder.parent
        if not is_folder(root):
            raise StorageError(
                f"{root} does not exist: mount the storage that the processes of this shard share; "
                f"for a new run in it make the folder once: mkdir -p {root}"
            )

    def _renewals_file(self, number: int) -> Path:
        return numbered(self.folder, number).with_suffix(".renewals")

    def _renewals(self, number: int) -> tuple[int, Condition]:
        path = self._renewals_file(number)
        try:
            facts = json.loads(runtime().disk.read(path))
            renewals, condition = int(facts["renewals"]), facts["condition"]
            if condition not in get_args(Condition):
                raise ValueError(f"condition {condition!r}")
        except FileNotFoundError:
            return 0, "held"
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
        except NOT_JSON:
            # Torn by a power failure, since `renew` does not sync. A holder that is alive replaces
            # the file. Otherwise the counter stays at 0 and the lease expires.
            return 0, "held"
        return renewals, condition
