"""Claims in a shared storage: each can be made once, by one process; the newest one counts.

Files of one folder, for claim number 7::

    00000007.json       who made it: created whole, or not at all, and never touched again
    00000007.renewals   what its holder counts to, replaced whole each time

Nothing is compared here and no clock is read: see `decoupled_diloco.protocol.lease`. The storage
must show a file to everybody once its creation is confirmed, and must refuse to create it twice,
as local disks do, and NFS of version 3 or later; ``ddiloco`` uses hard links for it (`os.link`),
which are atomic on both.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from decoupled_diloco.errors import StorageError
from decoupled_diloco.protocol.shard_lease import Condition, NewestLease
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, is_folder, names_in

CLAIMS = "claims"
"""The folder in the run folder; each shard has its own in it."""

NUMBER_DIGITS = 8


def create_once(path: Path, text: str, nonce: str) -> bool:
    """Creates a file whole, and durably, unless it exists; returns whether it was this call.

    ``nonce``: of the process, for the name of the file in the making.

    Raises:
        StorageError: It cannot be written.
    """
    part, disk = path.with_name(f".{path.name}.{nonce}.part"), runtime().disk
    try:
        disk.make_folder(path.parent)
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
        with contextlib.suppress(OSError):  # a name that nobody looks at
            disk.remove(part)


def newest_number(folder: Path) -> int:
    """The highest number among the files that `create_once` has made; 0: there is none.

    Raises:
        StorageError: The folder cannot be read; one that is not there yet is empty.
    """
    return max(_numbers(folder), default=0)


def numbered(folder: Path, number: int) -> Path:
    return folder / f"{number:0{NUMBER_DIGITS}d}.json"


def _numbers(folder: Path) -> Iterator[int]:
    for path in names_in(folder):
        if path.suffix == ".json" and path.stem.isdigit():
            yield int(path.stem)


class ClaimStore:
    """The claims of one shard.

    Args:
        folder: Where they are, in the storage that all contenders share. Its parent must exist:
            whoever begins a run makes it, once.
    """

    def __init__(self, folder: Path, nonce: str, lease_seconds: float, holder: str) -> None:
        self.folder = folder
        self.nonce = nonce
        self.lease_seconds = lease_seconds
        self.holder = holder

    def newest(self) -> int:
        """The number of the newest claim; 0: there is none.

        Raises:
            StorageError: The storage cannot be read, or is not there.
        """
        self._require_storage()
        return newest_number(self.folder)

    def look(self) -> NewestLease:
        """What the newest claim is.

        Raises:
            StorageError: The storage cannot be read, or a claim in it is torn.
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
                f"{path} cannot be read ({error}): if it stays so, remove it once no process of "
                "this shard runs"
            ) from error
        renewals, condition = self._renewals(number)
        return NewestLease(number, nonce, renewals, lease_seconds, condition)

    def claim(self, number: int) -> bool:
        """Makes a claim, unless it exists; returns whether it is ours."""
        self._require_storage()
        facts = {"nonce": self.nonce, "lease_seconds": self.lease_seconds, "holder": self.holder}
        return create_once(numbered(self.folder, number), json.dumps(facts), self.nonce)

    def renew(self, number: int, renewals: int, condition: Condition = "held") -> None:
        """Replaces what the holder of a claim says beside it.

        It need not survive a power cut, after which nobody holds anything: the disk is not waited
        for.

        Raises:
            StorageError: It cannot be written, or the claim is no longer there.
        """
        claim, path = numbered(self.folder, number), self._renewals_file(number)
        part, disk = path.with_name(f".{path.name}.part"), runtime().disk
        try:
            disk.size(claim)  # it must still be there
            disk.put(part, json.dumps({"renewals": renewals, "condition": condition}).encode())
            disk.rename(part, path)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def reopen(self) -> None:
        """Takes back that the run is over; for when nobody acts, and it is to go on."""
        standing = self.look()
        if standing.condition == "finished":
            self.renew(standing.number, standing.renewals, "released")

    def _require_storage(self) -> None:
        """An empty mount point looks like a run that nobody has claimed anything of."""
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
            # Torn by a power loss, since nothing waits for the disk: a holder that lives replaces
            # it, and one that does not is silent from now on.
            return 0, "held"
        return renewals, condition
