"""The run folder: who may use it, and where things are in it.

```
RUN/run.toml  lock  token  addresses  coordinator.json  tape/*.jsonl  tape.jsonl  logs/*.log
    learners/  checkpoints/shard-*.safetensors  weights.safetensors  report.html  report.png
    export/  durable/shard-*/  payloads/shard-*/  data.ledger
```
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.storage.files import write_text

ADDRESSES = "addresses"
"""The file that says where the shards listen."""


class RunFolder:
    """A run folder that this process and its children alone may use until they exit.

    Args:
        path: Made if it does not exist. What an earlier run left in it is moved aside to
            ``<path>.1``, ``<path>.2``, …
        resume: Go on with the run that is in it instead.

    Attributes:
        path: See above.
        moved_to: Where the earlier run is now, if there was one.
        resumed: Whether the run in it goes on.

    Raises:
        ConfigError: another process is using it.
        StorageError: it cannot be made.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.resumed = resume
        self.moved_to: Path | None = None
        self._lock: IO[str] | None = None
        try:
            self._take()
        except OSError as error:
            raise StorageError(
                f"the run folder {path} cannot be made: {error.strerror or error}"
            ) from error

    def _take(self) -> None:
        if self.path.exists():
            self._lock_or_refuse()
            used = any(entry.name != "lock" for entry in self.path.iterdir())
            if used and not self.resumed:
                # Before the lock, which goes along, is let go: nobody else may move it meanwhile.
                self.moved_to = self.path.rename(self._free_name())
                self.release()
        self.path.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock_or_refuse()
        for name in ("logs", "tape", "learners"):
            (self.path / name).mkdir(exist_ok=True)

    def _lock_or_refuse(self) -> None:
        file = (self.path / "lock").open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = _same_file(file, self.path / "lock")
        except BlockingIOError:
            held = False
        if not held:
            file.close()
            instead = "" if self.resumed else ", or choose another with --set run.folder=…"
            raise ConfigError(
                f"the run folder {self.path} is in use by another process: wait for it{instead}"
            )
        self._lock = file

    def _free_name(self) -> Path:
        number = 1
        while (free := self.path.with_name(f"{self.path.name}.{number}")).exists():
            number += 1
        return free

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a child process must inherit, so that the folder is in use for as long as it lives.

        Else a run that begins after this process was killed would meet the children of the last.
        """
        return () if self._lock is None else (self._lock.fileno(),)

    def token_file(self) -> Path:
        """A secret of this run's own, readable by this user only; one that goes on keeps it."""
        path = self.path / "token"
        if self.resumed and path.exists():
            return path
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
        return path

    def release(self) -> None:
        """Lets others use it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


def _same_file(file: IO[str], path: Path) -> bool:
    """Whether a lock is still at its place: another run may have moved the folder aside."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def read_token(path: Path | None) -> str | None:
    """The secret in a file, without the line's end; ``None`` for no file.

    Raises:
        ConfigError: the file cannot be read or is empty.
    """
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"token_file={str(path)!r} cannot be read: {error.strerror or error}"
        ) from error
    if not token:
        raise ConfigError(f"token_file={str(path)!r} is empty: put the run's secret into it")
    return token


class Position:
    """How many batches a learner has trained on; kept in its checkpoints."""

    def __init__(self) -> None:
        self.batches = 0

    def advance(self) -> None:
        """One more."""
        self.batches += 1

    def state_dict(self) -> dict[str, int]:
        """See `Stateful`."""
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """See `Stateful`."""
        self.batches = state_dict["batches"]


def write_addresses(run: Path, addresses: Sequence[str]) -> None:
    """Keeps where the shards listen, in order: with port 0 nothing else tells.

    Raises:
        StorageError: It cannot be written.
    """
    write_text(run / ADDRESSES, "\n".join(addresses) + "\n")


def read_addresses(run: Path) -> tuple[str, ...]:
    """Where the shards of a run on this machine listen, or did when it was last started.

    Raises:
        StorageError: It is no run folder, or the run was never started.
    """
    try:
        return tuple((run / ADDRESSES).read_text().split())
    except OSError as error:
        raise StorageError(
            f"{run} does not say where its syncer listens ({error.strerror}): give the folder of a "
            "run that was started on this machine, or http://HOST:PORT"
        ) from error
