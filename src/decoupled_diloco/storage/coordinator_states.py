"""The coordinator's state on disk: numbered files in the run folder, each created once.

``RUN/coordinator/00000007.json`` holds the whole state, or only the records of learners that joined
after file 6. So the cost of a join does not depend on the number of learners. A coordinator reads
the newest whole state and the records after it, and writes the next number. Only one process can
create that number. An earlier coordinator that still writes finds the number taken, and exits
before it sends any answer. So the storage orders the coordinators' decisions without a clock.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoupled_diloco.errors import LeaseError, StorageError
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.claims import create_once, newest_number, numbered, numbers
from decoupled_diloco.storage.files import NOT_JSON

STATES = "coordinator"
"""Subfolder of the run folder with the states."""

JOINED = "joined"
"""Key of a file that holds only joins instead of a whole state: records by learner."""

JOINS_MAX = 256
"""Maximum number of files with joins per whole state, so that a start reads few files."""

TRIES = 3
"""Attempts to read: a running coordinator may delete listed files after it wrote a newer state."""


class CoordinatorStates:
    """The states of one run.

    Args:
        run: The run folder.
        nonce: A text that is unique to the writing process; readers can omit it.

    Attributes:
        number: The number of the newest file read or written by this object; 0 if there is none.
    """

    def __init__(self, run: Path, nonce: str = "") -> None:
        self.folder = run / STATES
        self.number = 0
        self._nonce = nonce
        self._newest_whole = 0
        self._has_written = False

    def read(self) -> dict[str, Any] | None:
        """Return the newest state with all later joins; ``None`` if no coordinator has written one.

        Raises:
            StorageError: The state cannot be read.
        """
        for _ in range(TRIES - 1):
            with contextlib.suppress(StorageError):
                return self._read()
        return self._read()

    def _read(self) -> dict[str, Any] | None:
        found = sorted(numbers(self.folder), reverse=True)
        joined: dict[str, Any] = {}
        for number in found:
            path = numbered(self.folder, number)
            try:
                document = json.loads(runtime().disk.read(path))
                if JOINED in document:
                    joined = {**document[JOINED], **joined}
                    continue
                document["state"]["learners"].update(joined)
            except (OSError, *NOT_JSON) as error:
                raise unreadable(path, error) from error
            self.number, self._newest_whole = found[0], number
            return dict(document)
        if found:
            raise StorageError(f"{self.folder} has no whole state: move the run folder away")
        return None

    @property
    def can_append(self) -> bool:
        """Whether `append` may be used: this process wrote a whole state, and few joins since."""
        return self._has_written and self.number - self._newest_whole < JOINS_MAX

    def append(self, records: Mapping[str, Any]) -> None:
        """Write a file with the records of learners that joined.

        Raises:
            StorageError: The file cannot be written; another attempt may succeed.
            LeaseError: Another coordinator has written the next state.
        """
        self._create({JOINED: records})  # break: joins-forgotten

    def write(self, document: Mapping[str, Any]) -> None:
        """Write a whole state, and delete all files older than the previous whole state.

        Raises:
            StorageError: The file cannot be written; another attempt may succeed.
            LeaseError: Another coordinator has written the next state.
        """
        self._create(document)
        before, self._newest_whole, self._has_written = self._newest_whole, self.number, True
        for number in numbers(self.folder):
            if number < before:
                with contextlib.suppress(OSError):  # an old file that stays does no harm
                    runtime().disk.remove(numbered(self.folder, number))

    def _create(self, document: Mapping[str, Any]) -> None:
        text = json.dumps({**document, "writer": self._nonce})
        while not create_once(path := numbered(self.folder, self.number + 1), text, self._nonce):
            if not self._is_ours(path):
                raise _replaced(path)
            self.number += 1  # an earlier attempt created this file, and then the storage failed
        self.number += 1
        # A later coordinator may have used this number and deleted it. Then the creation succeeds
        # although the number is not the newest one.
        if newest_number(self.folder) > self.number:
            raise _replaced(path)

    def _is_ours(self, path: Path) -> bool:
        try:
            return bool(json.loads(runtime().disk.read(path))["writer"] == self._nonce)
        except (OSError, *NOT_JSON) as error:
            raise unreadable(path, error) from error


def _replaced(path: Path) -> LeaseError:
    return LeaseError(f"another coordinator has taken over: it wrote {path} or a later state")


def unreadable(path: Path, error: Exception) -> StorageError:
    """Return the error for a state that cannot be read."""
    return StorageError(
        f"{path} cannot be read ({error}): move the run folder away to start a new run"
    )
