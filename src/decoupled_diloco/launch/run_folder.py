"""The run folder: who may use it, and where things are in it.

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

TOKEN, HIDDEN_TOKEN = "token", ".token"
"""The file with the run's secret, and what its processes read before they listen."""

LAUNCHER = "launcher"
"""The file with the launcher's process number, and the name of its machine."""

MADE = ("logs", FOLDER_NAME, "learners")
"""The folders that every run folder has from the first."""

SHARED = ("claims", "durable")
"""The folders that may be made beforehand: a storage that several machines share is there."""


class RunFolder:
    """A run folder that this process and its children alone may use until they exit.

    Args:
        path: Made if it does not exist. An earlier run of ours in it is moved aside to
            ``<path>.1``, ``<path>.2``, …; a folder with anything else in it is left alone.
        resume: Go on with the run that is in it instead.
        spare: Called with the folder of an earlier run while no other process may use it; raises if
            that run must not be moved aside.

    Raises:
        ConfigError: another process is using it, or it is not empty and no run of ours.
        StorageError: it cannot be made.
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
                f"the run folder {path} cannot be made: {error.strerror or error}"
            ) from error

    def _take(self) -> None:
        if self._place.exists():
            self._require_ours_or_unused()
            self._lock_or_refuse()
            if not (self.resumed or _is_unused(self._place)):
                self._spare(self.path)
                # Before the lock, which goes along, is let go: no other process may move it.
                self.moved_to = self._place.rename(self._free_name())
                self.release()
        self._place.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock_or_refuse()
        for name in MADE:
            (self.path / name).mkdir(exist_ok=True)

    def _require_ours_or_unused(self) -> None:
        """Before anything is written: not even the lock belongs into a folder that is not ours."""
        require_ours_or_unused(self.path, resume=self.resumed)
        here = Path.cwd()
        if not (self.resumed or _is_unused(self._place)) and here.is_relative_to(self._place):
            raise ConfigError(
                f"the run folder {self.path} has the current folder {here} in it, so the earlier "
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
        """What a child process must inherit, so that the folder is in use for as long as it lives.

        Else a run that begins after this process was killed would meet the children of the last.
        """
        return () if self._lock is None else (self._lock.fileno(),)

    def tell_launcher(self) -> None:
        """Writes down who launched the run, for those who want to stop it."""
        write_text(self.path / LAUNCHER, f"{os.getpid()} {socket.gethostname()}\n")

    def token_file(self, *, shown: bool = True) -> Path:
        """A secret of this run's own, readable by this user only; one that goes on keeps it.

        Args:
            shown: Whether `token` is there at once. Otherwise the run's own processes read
                another file until `show_token`, so that programs can wait for `token`.
        """
        path, hidden = self.path / TOKEN, self.path / HIDDEN_TOKEN
        if self.resumed and path.exists():
            return path
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with os.fdopen(os.open(hidden, flags, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(24) + "\n")
        if not shown:
            return hidden
        hidden.replace(path)  # whole, or not there
        return path

    def show_token(self) -> None:
        """Copies a token that is not shown yet to `token`, whole: the run can be joined now."""
        path, hidden = self.path / TOKEN, self.path / HIDDEN_TOKEN
        if not hidden.exists():
            return
        copy = hidden.with_suffix(".copy")
        with os.fdopen(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(hidden.read_text())
        copy.replace(path)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _same_file(file: IO[str], path: Path) -> bool:
    """Whether a lock is still at its place: another run may have moved the folder aside."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def enter_run_folder(config: RunConfig) -> Path:
    """The run folder of a process that is started by hand: made, and marked as a run's.

    Others may be using it, on this machine or on one that shares it.

    Raises:
        ConfigError: it is not empty and no run of ours.
        StorageError: it cannot be made.
    """
    path = config.run.folder
    require_ours_or_unused(path)
    try:
        (_without_links(path) / FOLDER_NAME).mkdir(parents=True, exist_ok=True)
        if not (path / RUN_FILE).exists():
            # Another process that comes at the same time has another name.
            mine = path / f"{RUN_FILE}.{os.getpid()}"
            mine.write_text(dump_config(config), encoding="utf-8")
            mine.replace(path / RUN_FILE)
    except OSError as error:
        raise StorageError(
            f"the run folder {path} cannot be made: {error.strerror or error}"
        ) from error
    return path


def require_ours_or_unused(path: Path, *, resume: bool = False) -> None:
    """Nothing is moved, renamed or written where other files are.

    Raises:
        ConfigError: it is a file, or a folder with something in it that is no run of ours.
    """
    place = _without_links(path)
    if not place.exists():
        return
    if not place.is_dir():
        raise ConfigError(
            f"the run folder {path} is a file, not a folder: choose another with --set run.folder=…"
        )
    if not (_is_unused(place) or is_run_folder(place)):
        way_out = (
            "--resume takes the folder of a run, as runs/quickstart"
            if resume
            else "choose another with --set run.folder=…, or move away what is in it"
        )
        raise ConfigError(
            f"the run folder {path} is no run of ddiloco, but not empty, and is left as it is: "
            f"{way_out}"
        )


def is_run_folder(path: Path) -> bool:
    """Whether a folder is a run of ours: all of its settings are in it, and a tape."""
    has_tape = (path / FOLDER_NAME).is_dir() or (path / MERGED_NAME).is_file()
    with contextlib.suppress(OSError, ValueError, RecursionError):  # TOML and UTF-8 both
        tables = tomllib.loads((path / RUN_FILE).read_text(encoding="utf-8"))
        optional = {"faults", "tls", "launch", "workload"}
        return has_tape and tables.keys() >= set(RunConfig.model_fields) - optional
    return False


def _is_unused(path: Path) -> bool:
    """Whether there is nothing in it but what `RunFolder` or `enter_run_folder` makes first."""
    return all(map(_is_made_first, path.iterdir()))


def _is_made_first(entry: Path) -> bool:
    if entry.is_dir():
        return entry.name in (*MADE, *SHARED) and not any(entry.iterdir())
    half_written = entry.stem == RUN_FILE and entry.suffix[1:].isdigit()
    return half_written or (entry.name == "lock" and entry.lstat().st_size == 0)


def _without_links(path: Path) -> Path:
    """Where a path leads; by the same name if it is there itself."""
    followed = Path(os.path.realpath(path))
    return followed if path.is_symlink() or path.name in ("", "..") else path


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
    except UnicodeDecodeError:  # what is in it is not repeated
        raise ConfigError(
            f"token_file={str(path)!r} is no text: give the file with the run's secret"
        ) from None
    if not token:
        raise ConfigError(f"token_file={str(path)!r} is empty: put the run's secret into it")
    return token


class Position:
    """How many batches a learner and all its ranks have trained on; kept in its checkpoints."""

    def __init__(self) -> None:
        self.batches = 0

    def advance(self, batches: int = 1) -> None:
        self.batches += batches

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.batches = state_dict["batches"]


def launcher_of(run: Path, command: str) -> int:
    """Return the process that launched a run that is running on this machine.

    Args:
        run: Its run folder.
        command: What needs the process: an error of a run on another machine names it.

    Raises:
        ConfigError: The run is not running here, or the folder is not a run folder.
    """
    try:
        number, host = read_launcher(run)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run} does not name the process that launched it ({reason_of(error)}): give the run "
            "folder of a run that ddiloco train, syncer or launch has started"
        ) from None
    if host != socket.gethostname():
        raise ConfigError(f"{run} was launched on {host}: run {command} there")
    if not is_in_use(run):
        raise ConfigError(f"{run} is not running")
    return number


def is_running_here(run: Path) -> bool | None:
    """Whether the processes of a run still exist; ``None``: they are not of this machine."""
    try:
        _, host = read_launcher(run)
    except (OSError, ValueError):
        return None
    return is_in_use(run) if host == socket.gethostname() else None


def read_launcher(run: Path) -> tuple[int, str]:
    """Return the process that launched a run, and its machine, whether or not it still exists.

    Raises:
        OSError: The run folder does not name it.
        ValueError: The same.
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
