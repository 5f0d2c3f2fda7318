"""The run folder: its lock and its contents.

```
RUN/run.toml  lock  token  addresses  host  launcher  coordinator/  logs/*.log
    places/shard-*  places/*.lock  places/meetings/*
    tape/*.jsonl  tape/*.segments/*.jsonl.xz
    learners/  checkpoints/shard-*.safetensors  weights.safetensors  report.html
    export/  durable/shard-*/  payloads/shard-*/  data.ledger
```
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import IO

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.storage.files import write_text
from decoupled_diloco.storage.shared_folder import reason_of
from decoupled_diloco.tape.records import FOLDER_NAME, MERGED_NAME
from decoupled_diloco.transport.tokens import is_secret

TOKEN, HIDDEN_TOKEN = "token", ".token"
"""The file with the run's token, and a hidden one that its processes read before they listen."""

LAUNCHER = "launcher"
"""The file with the launcher's process id and the name of its machine."""

MADE = ("logs", FOLDER_NAME, "learners")
"""Folders that every new run folder contains."""

SHARED = ("claims", "durable")
"""Folders that may exist before the run: mount points of a storage that several machines share."""


class RunFolder:
    """A run folder that only this process and its children may use until they exit.

    Args:
        path: The folder, which is created if it does not exist. An earlier run in it is moved aside
            to ``<path>.1``, ``<path>.2``, …; a folder with other files in it is not changed.
        resume: Continue the run in the folder instead.
        spare: Called with the folder of an earlier run while it is locked; raises if that run must
            not be moved aside.

    Raises:
        ConfigError: Another process uses the folder, or it is neither empty nor a run folder.
        StorageError: It cannot be created.
    """

    def __init__(
        self, path: Path, *, resume: bool = False, spare: Callable[[Path], None] = lambda path: None
    ) -> None:
        self.path = path
        self._place = _without_links(path)
        self.resumed = resume
        self._spare = spare
        self.moved_to: Path | None = None
        self._lock: IO[str] | None = None
        try:
            self._take()
        except DilocoError:
            raise
        except OSError as error:
            raise StorageError(
                f"the run folder {path} cannot be created: {error.strerror or error}"
            ) from error

    def _take(self) -> None:
        if self._place.exists():
            self._require_ours_or_unused()
            self._lock_or_refuse()
            if not (self.resumed or _is_unused(self._place)):
                self._spare(self.path)
                # Rename before the release: otherwise another process could move the folder too.
                self.moved_to = self._place.rename(self._free_name())
                self.release()
        self._place.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock_or_refuse()
        for name in MADE:
            (self.path / name).mkdir(exist_ok=True)

    def _require_ours_or_unused(self) -> None:
        """Check the folder before any write: even a lock file must not go into a foreign folder."""
        require_ours_or_unused(self.path, resume=self.resumed)
        here = Path.cwd()
        if not (self.resumed or _is_unused(self._place)) and here.is_relative_to(self._place):
            raise ConfigError(
                f"the run folder {self.path} contains the current folder {here}, so the earlier "
                "run cannot be moved aside: start the command in another folder"
            )

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
        while os.path.lexists(free := self._place.with_name(f"{self._place.name}.{number}")):
            number += 1
        return free

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that each child must inherit, so that the folder stays locked while it runs.

        Otherwise, after this process is killed, a new run could start while old children still run.
        """
        return () if self._lock is None else (self._lock.fileno(),)

    def record_launcher(self) -> None:
        """Write this process's id and machine to the folder, for commands that stop the run."""
        write_text(self.path / LAUNCHER, f"{os.getpid()} {socket.gethostname()}\n")

    def token_file(self, *, shown: bool = True) -> Path:
        """Create a token for this run, readable by this user only; a resumed run keeps its token.

        Args:
            shown: Whether to create the file `token` now. Otherwise the run's own processes read a
                hidden file, and programs can wait for `token` until `show_token`.

        Returns:
            The file that the run's own processes read.
        """
        path, hidden = self.path / TOKEN, self.path / HIDDEN_TOKEN
        if self.resumed and path.exists():
            return path
        write_secret(hidden, new_token())
        if not shown:
            return hidden
        hidden.replace(path)
        return path

    def show_token(self) -> None:
        """Copy a hidden token to `token`, atomically: learners can join from now on."""
        path, hidden = self.path / TOKEN, self.path / HIDDEN_TOKEN
        if not hidden.exists():
            return
        write_secret(path, hidden.read_text())

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _same_file(file: IO[str], path: Path) -> bool:
    """Whether a locked file is still at its path: another run may have moved the folder aside."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def enter_run_folder(config: RunConfig) -> Path:
    """Create and mark the run folder of a process that is started without a launcher.

    Other processes may use it, on this machine or on another one that shares it.

    Raises:
        ConfigError: It is neither empty nor a run folder.
        StorageError: It cannot be created.
    """
    path = config.run.folder
    require_ours_or_unused(path)
    try:
        (_without_links(path) / FOLDER_NAME).mkdir(parents=True, exist_ok=True)
        if not (path / RUN_FILE).exists():
            # Another process may do the same at this moment, with another process id in the name.
            temporary = path / f"{RUN_FILE}.{os.getpid()}"
            temporary.write_text(dump_config(config), encoding="utf-8")
            temporary.replace(path / RUN_FILE)
    except OSError as error:
        raise StorageError(
            f"the run folder {path} cannot be created: {error.strerror or error}"
        ) from error
    return path


def require_ours_or_unused(path: Path, *, resume: bool = False) -> None:
    """Check that a path does not exist, is an empty folder, or is a run folder.

    Raises:
        ConfigError: It is a file, or a folder with other files.
    """
    place = _without_links(path)
    if not place.exists():
        return
    if not place.is_dir():
        raise ConfigError(
            f"the run folder {path} is a file, not a folder: choose another with --set run.folder=…"
        )
    if not (_is_unused(place) or is_run_folder(place)):
        fix = (
            "pass the folder of a run to --resume, such as runs/quickstart"
            if resume
            else "choose another with --set run.folder=…, or move its files away"
        )
        raise ConfigError(
            f"the run folder {path} is not empty and not a run of ddiloco, so it is not changed: "
            f"{fix}"
        )


def is_run_folder(path: Path) -> bool:
    """Whether a folder contains a run: all tables of its settings, and tapes."""
    has_tape = (path / FOLDER_NAME).is_dir() or (path / MERGED_NAME).is_file()
    with contextlib.suppress(OSError, ValueError, RecursionError):  # TOML and UTF-8 both
        tables = tomllib.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        optional = {"faults", "sites", "tls", "launch", "trust", "workload"}
        return has_tape and tables.keys() >= set(RunConfig.model_fields) - optional
    return False


def _is_unused(path: Path) -> bool:
    """Whether a folder contains only what `RunFolder` or `enter_run_folder` creates first."""
    return all(map(_is_made_first, path.iterdir()))


def _is_made_first(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name in (*MADE, *SHARED) and not any(entry.iterdir())
    half_written = entry.stem == RUN_FILE and entry.suffix[1:].isdigit()
    return half_written or (entry.name == "lock" and entry.lstat().st_size == 0)


def _without_links(path: Path) -> Path:
    """Return the target of a link; another path is returned unchanged if it has a usable name."""
    followed = Path(os.path.realpath(path))
    return followed if path.is_symlink() or path.name in ("", "..") else path


def read_token(path: Path | None) -> str | None:
    """Return the secret in a file, without surrounding whitespace; ``None`` for no file.

    Raises:
        ConfigError: The file cannot be read, is empty, or has something else than a secret.
    """
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"token_file={str(path)!r} cannot be read: {error.strerror or error}"
        ) from error
    except UnicodeDecodeError:  # the original error would quote the secret
        raise ConfigError(
            f"token_file={str(path)!r} is not a text file: pass the file with the run's secret"
        ) from None
    if not token:
        raise ConfigError(f"token_file={str(path)!r} is empty: write the run's secret into it")
    if not is_secret(token):
        raise ConfigError(
            f"token_file={str(path)!r} is not one line of printable ASCII: pass the file with the "
            "run's secret"
        )
    return token


class Position:
    """The number of batches that a learner, with all its ranks, has trained on.

    Its checkpoints contain the number.
    """

    def __init__(self) -> None:
        self.batches = 0

    def advance(self, batches: int = 1) -> None:
        self.batches += batches

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.batches = state_dict["batches"]


def launcher_of(run: Path, command: str) -> int:
    """Return the id of the process that launched a run which is running on this machine.

    Args:
        run: The run folder.
        command: The command to name in the error if the run is on another machine.

    Raises:
        ConfigError: The run is not running here, or the folder is not a run folder.
    """
    if not run.exists():
        raise ConfigError(f"{run} does not exist: pass a run folder (see ddiloco list)")
    try:
        number, host = read_launcher(run)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run} does not name the process that launched it ({reason_of(error)}): pass the run "
            "folder of a run that ddiloco train, syncer or launch has started"
        ) from None
    if host != socket.gethostname():
        raise ConfigError(f"{run} was launched on {host}: run {command} there")
    if not is_in_use(run):
        raise ConfigError(f"{run} is not running")
    return number


def is_running_here(run: Path) -> bool | None:
    """Whether the processes of a run still exist; ``None`` if they run on another machine."""
    try:
        _, host = read_launcher(run)
    except (OSError, ValueError):
        return None
    return is_in_use(run) if host == socket.gethostname() else None


def read_launcher(run: Path) -> tuple[int, str]:
    """Return the id and the machine of the process that launched a run, even if it has ended.

    Raises:
        OSError: The file with its id cannot be read.
        ValueError: The file is not valid.
    """
    number, host = (run / LAUNCHER).read_text().split()
    return int(number), host


def is_in_use(run: Path) -> bool:
    """Whether a process on this machine holds the lock of a run folder."""
    try:
        with (run / "lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def new_token() -> str:
    """Return the text of a file with a new token."""
    return secrets.token_urlsafe(24) + "\n"


def write_secret(path: Path, text: str) -> None:
    """Replace a file that only this user may read; no reader sees a part of it."""
    part = path.with_name(f".{path.name.removeprefix('.')}.copy")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    part.replace(path)
