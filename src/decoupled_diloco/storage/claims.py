"""Leadership claims in shared storage: one process can create each claim, and the newest one holds.

Files of one folder, or objects in a store, for claim number 7::

    00000007.json       the process that made it: created atomically and never changed
    00000007.renewals   the holder's renewal counter, replaced atomically each time

This module compares no claims and reads no clock: see `decoupled_diloco.protocol.lease_machine`.
The storage must meet two conditions. Every process sees a file once its creation is confirmed, and
a file cannot be created twice. Local disks and NFS version 3 or later meet both. ``ddiloco`` uses
hard links (`os.link`), which are atomic on both. Object stores meet both with conditional writes
(``If-None-Match``), so processes without a shared disk can use `ObjectClaims`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from copy import copy
from pathlib import Path, PurePath
from typing import get_args

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.protocol.messages import Condition, NewestLease
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, is_folder, names_in
from decoupled_diloco.storage.object_store import Objects

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
            nonce, lease_seconds = _parsed(runtime().disk.read(path))
        except (OSError, *NOT_JSON) as error:
            raise _unreadable(path, error) from error
        renewals, condition = self._renewals(number)
        return NewestLease(number, nonce, renewals, lease_seconds, condition)

    def claim(self, number: int) -> bool:
        """Create a claim unless it exists; return whether this process holds it."""
        self._require_storage()
        text = _text_of(self.nonce, self.lease_seconds, self.holder)
        return create_once(numbered(self.folder, number), text, self.nonce)

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
            disk.put(part, _renewals_text(renewals, condition))
            disk.rename(part, path)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def reopen(self) -> None:
        """Mark a finished run as continuing; only valid while no process of the shard runs."""
        newest = self.read_newest()
        if newest.condition == "finished":
            self.renew(newest.number, newest.renewals, "released")

    def of_shard(self, shard: int) -> ClaimStore:
        """Return the claims of another shard of the run."""
        folder = self.folder.with_name(f"shard-{shard}")
        return ClaimStore(folder, self.nonce, self.lease_seconds, self.holder)

    @property
    def place(self) -> str:
        """Where the claims are, for messages."""
        return str(self.folder)

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
            return _parsed_renewals(runtime().disk.read(path))
        except FileNotFoundError:
            return 0, "held"
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error}") from error
        except NOT_JSON:
            # Torn by a power failure, since `renew` does not sync. A holder that is alive replaces
            # the file. Otherwise the counter stays at 0 and the lease expires.
            return 0, "held"


class ObjectClaims:
    """The claims of one shard in an object store, with the interface of `ClaimStore`.

    Args:
        address: The store, with an address that no other run uses.
        shard: The number of the shard.
        nonce: A text that is unique to this process.
        lease_seconds: The length of the lease that this process claims.
        holder: A description of this process, for people.
    """

    def __init__(
        self, address: str, shard: int, nonce: str, lease_seconds: float, holder: str
    ) -> None:
        self.nonce = nonce
        self.lease_seconds = lease_seconds
        self.holder = holder
        self._prefix = f"{CLAIMS}/shard-{shard}"
        # A request that takes longer than a renewal interval is as good as lost. The state machine
        # repeats it.
        self._objects = Objects(address, request_seconds=lease_seconds / 4, retries=0)
        self._known = 0

    def newest(self) -> int:
        """Return the number of the newest claim; 0 if there is none.

        Raises:
            StorageError: The store is unreachable, or refuses this process.
        """
        # Claims are never deleted, so the listing starts at the newest known one.
        after = f"{self._prefix}/{max(0, self._known - 1):0{NUMBER_DIGITS}d}~"
        with _as_storage_error():
            names = [each.name for each in self._objects.listed(self._prefix, after)]
        paths = map(PurePath, names)
        found = [int(p.stem) for p in paths if p.suffix == ".json" and p.stem.isdigit()]
        self._known = max(found, default=0)
        return self._known

    def read_newest(self) -> NewestLease:
        """Return the newest claim.

        Raises:
            StorageError: The store is unreachable, or refuses this process.
        """
        number = self.newest()
        if not number:
            return NewestLease(0, "", 0, 0.0, "held")
        with _as_storage_error():
            claim = self._objects.get(self._name(number)) or b""
            renewals = self._objects.get(self._name(number, "renewals"))
        try:
            nonce, lease_seconds = _parsed(claim)
            if renewals is None:
                return NewestLease(number, nonce, 0, lease_seconds, "held")
            count, condition = _parsed_renewals(renewals)
        except NOT_JSON as error:
            raise _unreadable(f"{self.place}/{number}", error) from error
        return NewestLease(number, nonce, count, lease_seconds, condition)

    def claim(self, number: int) -> bool:
        """Create a claim unless it exists; return whether this process holds it."""
        text = _text_of(self.nonce, self.lease_seconds, self.holder).encode()
        with _as_storage_error():
            if self._objects.create(self._name(number), text):
                return True
            # The answer to an earlier attempt of this process may have been lost.
            return self._objects.get(self._name(number)) == text

    def renew(self, number: int, renewals: int, condition: Condition = "held") -> None:
        """Replace the renewal counter and the condition of a claim.

        Raises:
            StorageError: The store is unreachable, or the claim no longer exists.
        """
        with _as_storage_error():
            if self._objects.get(self._name(number)) is None:
                raise StorageError(f"{self.place} no longer has claim {number}")
            self._objects.put(self._name(number, "renewals"), _renewals_text(renewals, condition))

    def reopen(self) -> None:
        """Mark a finished run as continuing; only valid while no process of the shard runs."""
        newest = self.read_newest()
        if newest.condition == "finished":
            self.renew(newest.number, newest.renewals, "released")

    def of_shard(self, shard: int) -> ObjectClaims:
        """Return the claims of another shard of the run."""
        other = copy(self)  # the same client: a new one would connect and authenticate again
        other._prefix, other._known = f"{CLAIMS}/shard-{shard}", 0
        return other

    @property
    def place(self) -> str:
        """Where the claims are, for messages."""
        return f"{self._objects.address}/{self._prefix}"

    def _name(self, number: int, suffix: str = "json") -> str:
        return f"{self._prefix}/{number:0{NUMBER_DIGITS}d}.{suffix}"


Claims = ClaimStore | ObjectClaims
"""The claims of one shard, wherever they are."""


@contextlib.contextmanager
def _as_storage_error() -> Iterator[None]:
    """Turn a refusal into `StorageError`: a role may be renewed while the process waits."""
    try:
        yield
    except (ConfigError, FileNotFoundError) as error:
        raise StorageError(str(error)) from error


def _text_of(nonce: str, lease_seconds: float, holder: str) -> str:
    return json.dumps({"nonce": nonce, "lease_seconds": lease_seconds, "holder": holder})


def _parsed(claim: bytes) -> tuple[str, float]:
    """Return the nonce and the lease seconds of a claim."""
    facts = json.loads(claim)
    return str(facts["nonce"]), float(facts["lease_seconds"])


def _unreadable(place: object, error: Exception) -> StorageError:
    return StorageError(
        f"{place} cannot be read ({error}): if the error persists, stop all processes of this "
        "shard and remove the file"
    )


def _renewals_text(renewals: int, condition: Condition) -> bytes:
    return json.dumps({"renewals": renewals, "condition": condition}).encode()


def _parsed_renewals(text: bytes) -> tuple[int, Condition]:
    facts = json.loads(text)
    renewals, condition = int(facts["renewals"]), facts["condition"]
    if condition not in get_args(Condition):
        raise ValueError(f"condition {condition!r}")
    return renewals, condition
