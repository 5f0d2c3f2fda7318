"""The mirror of a run folder in an object store, and the way back.

A *state* is everything that a run needs to continue, as of one moment. Objects below the address::

    manifests/00000012.json     state 12: each file, its size, and the objects with its bytes
    objects/<writer>/…          whole files, and pieces of files that grow
    parts/shard-1/…             the same for the folder of shard 1, if it is not shard 0's folder

A manifest is written last. So every manifest names whole objects, and a torn upload is never used.
A manifest's number can be created once (`Objects.create`). Of two processes that mirror to one
address, one creates the next number, and the other one stops.

A *part* is a folder without shard 0, on another machine, and has its own mirror. The mirror of
shard 0 reads the parts' newest manifests before it opens its own files, and writes one manifest
with all files. So a state never has a part that is newer than the coordinator. A part may be older
than learners' checkpoints: a restarted shard then takes the newer versions from them
(`protocol.first_copies`). A part keeps its states from the oldest one that a kept state names,
because the next state may name any of them.

The processes of a run write while the mirror reads. A state is consistent because its files are
opened in reverse order of cause and effect (`_GROUPS`). A learner receives a version after it is in
the shard's journal, so journals are opened after the learners' checkpoints. The state then has
every cause of what it contains. An open file keeps its bytes when its process deletes it. So the
upload may take any time, and nothing waits for it.

The backlog is bounded, because the folder itself is the queue: a state that is replaced before its
upload begins is never uploaded. Files that grow are uploaded in pieces. A new piece absorbs the
pieces before it that are not larger. So a file has few pieces, and few bytes are uploaded twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import BinaryIO

import xxhash

from decoupled_diloco.errors import ConfigError, StorageError
from decoupled_diloco.runtime import runtime
from decoupled_diloco.storage.files import NOT_JSON, open_files_allowed, write_text
from decoupled_diloco.storage.object_store import Objects, StoredObject, temporary_folder

MANIFESTS, OBJECTS, PARTS = "manifests", "objects", "parts"

STANDING = "store.json"
"""The file in the run folder that names the state in the store which the folder continues."""

FORMAT = 2

STATES_KEPT = 2
"""The newest states whose objects stay in the store."""

UNNAMED_MAX = 2
"""A part waits after this many states that no state of the run names: its folder is the queue."""

GRACE_SECONDS = 600.0
"""How long an object stays after no kept state needs it, for a process that reads an older one."""

PIECE_BYTES_MAX = 8 << 20
"""A piece of this size is never uploaded again."""

SMALL_BYTES, SMALL_AT_ONCE = 1 << 20, 8
"""Files up to this size are in memory during their transfer, this many at a time."""

READ_BYTES = 1 << 20
"""Bytes that are read from a file at a time."""

OPEN_FILES_MAX = 256
"""If more files are new, most are uploaded one by one before the state is taken."""

TRIES = 20
"""Attempts to open the files of one group; a process may rename a file in between."""

GROWING = (".jsonl", ".journal", ".ledger", ".log")
"""Suffixes of files to which a process appends. All others are replaced as a whole."""

MARK_BYTES = (256, 4096)
"""Bytes at the start and at the end of what was uploaded that show whether a file only grew."""

_GROUPS: tuple[tuple[str, ...], ...] = (
    # Effects before their causes. A checkpoint of the run names the learners' and shards' parts.
    ("checkpoints/*/manifest.json", "checkpoints/*/shard-*.safetensors"),
    # A learner's checkpoint holds versions that are in a journal, and the tape reports them.
    ("learners/*/*.safetensors", "learners/*/*.ranks/*", "learners/*/*.ranks/*/*"),
    ("tape/*.jsonl", "tape/*.segments/*", "logs/*.log"),
    # A record of the trail is in a journal before; the private keys beside it are never copied.
    ("audit/shard-*.jsonl",),
    ("durable/*/*.safetensors", "durable/*/*.journal", "durable/*/exact"),
    # Entries and versions have incarnations and terms that the coordinator has stored before.
    ("*.ledger",),
    ("coordinator/*.json",),
    # After a run, checkpoints leave out what the result contains.
    ("weights.safetensors", "checkpoints/shard-*.safetensors"),
    # Journals have numbers of claims.
    ("claims/*/*.json",),
    ("run.toml",),
)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a state.

    Attributes:
        pieces: The objects with its bytes, in order: name and size in bytes.
        mtime_ns: When it was last changed, ns since the Unix epoch.
        mark: Digest of the ends of what was uploaded, for a file that grows; otherwise empty.
    """

    pieces: tuple[tuple[str, int], ...]
    mtime_ns: int
    mark: str = ""

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.pieces)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """The state of a part that a state of the run contains.

    Attributes:
        number: Its number, from 1.
        host: The machine of the process that wrote it.
        wall: When it was taken, seconds since the Unix epoch.
    """

    number: int
    host: str
    wall: float


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state of a run in a store, or of a part.

    Attributes:
        number: Its number, from 1.
        run: Id of the mirrored run; a resumed run keeps it.
        name: The name of the run.
        writer: Id of the process that wrote the state.
        host: The machine of that process.
        wall: When the state was taken, seconds since the Unix epoch.
        after: In a part, the newest state of the run that its writer had read; otherwise 0.
        files: The files by their paths in the run folder.
        parts: The parts that have some of the files, by name.
    """

    number: int
    run: str
    name: str
    writer: str
    host: str
    wall: float
    after: int
    files: Mapping[str, StoredFile]
    parts: Mapping[str, StoredPart]

    @property
    def objects(self) -> set[str]:
        """The names of all objects that the state needs."""
        return {name for file in self.files.values() for name, _ in file.pieces}

    def to_json(self) -> bytes:
        """Return the manifest."""
        files = {
            path: [file.mtime_ns, file.mark, *itertools.chain(*file.pieces)]
            for path, file in self.files.items()
        }
        document = {"format": FORMAT, **{name: getattr(self, name) for name in _NAMES}}
        parts = {name: astuple(part) for name, part in self.parts.items()}
        document |= {"parts": parts, "files": files}
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def read(cls, text: bytes, place: str) -> StoredState:
        """Return the state of a manifest.

        Raises:
            StorageError: The text is not a manifest, or it has another format.
        """
        try:
            document = json.loads(text)
            if document["format"] != FORMAT:
                raise StorageError(
                    f"{place} has format={document['format']!r}, but this version reads only "
                    f"{FORMAT}: continue with the version of decoupled-diloco that wrote it"
                )
            files = {
                _inside(path): StoredFile(
                    tuple(zip(map(str, pieces[::2]), map(int, pieces[1::2]), strict=True)),
                    int(mtime_ns),
                    str(mark),
                )
                for path, (mtime_ns, mark, *pieces) in document["files"].items()
            }
            parts = {
                name: StoredPart(int(number), str(host), float(wall))
                for name, (number, host, wall) in document["parts"].items()
            }
            return cls(**{name: document[name] for name in _NAMES}, files=files, parts=parts)
        except StorageError:
            raise
        except NOT_JSON as error:
            raise StorageError(f"{place} is not a manifest of a run ({error!r:.100})") from error


_NAMES = ("number", "run", "name", "writer", "host", "wall", "after")


def _inside(path: str) -> str:
    """Return a path of a manifest; it must not leave the folder into which it is restored."""
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path in a run folder")
    return path


def newest_state(
    objects: Objects, known: StoredState | None = None, part: str = ""
) -> StoredState | None:
    """Return the newest state of a run in a store; ``None`` if there is none.

    Args:
        objects: The store.
        known: A state that is returned without a download if it is the newest one.
        part: The name of a part, to return its state.

    Raises:
        ConfigError: The store refuses this process.
        StorageError: The store is unreachable, or the manifest is not valid.
    """
    for _ in range(TRIES):
        names = _manifests(objects, part)
        if not names:
            return None
        if known is not None and names[-1] == _manifest(known.number, part):
            return known
        text = objects.get(names[-1])
        if text is not None:  # otherwise a newer state has replaced it in the meantime
            return StoredState.read(text, f"{objects.address}/{names[-1]}")
    raise StorageError(f"store={objects.address!r} changes too fast to be read: try again")


def required_state(objects: Objects, known: StoredState | None = None) -> StoredState:
    """Return the newest state of a run in a store; see `newest_state`.

    Raises:
        ConfigError: There is none, or the store refuses this process.
        StorageError: The store is unreachable, or the manifest is not valid.
    """
    state = newest_state(objects, known)
    if state is None:
        raise ConfigError(
            f"store={objects.address!r} has no run: use the address that [run] store of the run had"
        )
    return state


def restore(
    objects: Objects,
    folder: Path,
    state: StoredState,
    wanted: Callable[[str], bool] = lambda path: True,
) -> None:
    """Write the files of a state into a folder, ``run.toml`` last.

    A folder without ``run.toml`` is not a run folder, so a partial copy is never used. Memory is
    bounded: see `SMALL_BYTES` and `object_store.PART_BYTES`.

    Args:
        objects: The store.
        folder: The folder; created if it does not exist.
        state: The state.
        wanted: Whether a file is needed, by its path.

    Raises:
        ConfigError: The store refuses this process.
        StorageError: The store is unreachable, an object is missing, or the folder cannot be
            written.
    """
    chosen = {path: file for path, file in state.files.items() if wanted(path)}
    last = {path: file for path, file in chosen.items() if path == "run.toml"}
    small = {p: f for p, f in chosen.items() if f.nbytes <= SMALL_BYTES and p not in last}
    large = {p: f for p, f in chosen.items() if p not in small and p not in last}
    with ThreadPoolExecutor(SMALL_AT_ONCE, thread_name_prefix="ddiloco-store") as pool:
        for _ in pool.map(lambda item: _restore_file(objects, folder, *item), small.items()):
            pass
    for path, file in (*large.items(), *last.items()):
        _restore_file(objects, folder, path, file)


class StoredCopy:
    """A copy of a part of a run in a store, in a folder that is deleted with this object.

    Args:
        address: The store.
        parts: Paths of the files and folders that are needed. Default: all.

    Attributes:
        address: The store.
        folder: The copy; a run folder.
        state: The state of which it is a copy.

    Raises:
        ConfigError: The store has no run, or it refuses this process.
        StorageError: The store is unreachable, or the disk is full.
    """

    def __init__(self, address: str, *parts: str) -> None:
        self._objects = Objects(address, create=False)
        self.address = self._objects.address
        self._parts = (*parts, "run.toml") if parts else ()
        self.folder = temporary_folder(self) / (address.rstrip("/").rpartition("/")[2] or "run")
        self.state = required_state(self._objects)
        restore(self._objects, self.folder, self.state, self._wanted)

    def refresh(self) -> None:
        """Copy what has changed in the store."""
        state = required_state(self._objects, self.state)
        if state.number == self.state.number:
            return
        changed = {path for path, file in state.files.items() if self.state.files.get(path) != file}
        for path in self.state.files.keys() - state.files.keys():
            (self.folder / path).unlink(missing_ok=True)
        restore(self._objects, self.folder, state, lambda p: p in changed and self._wanted(p))
        self.state = state

    def _wanted(self, path: str) -> bool:
        below = (path == part or path.startswith(f"{part}/") for part in self._parts)
        return not self._parts or any(below)


def _restore_file(objects: Objects, folder: Path, path: str, file: StoredFile) -> None:
    target, nbytes = folder / path, 0
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            for name, _ in file.pieces:
                nbytes += objects.download(name, out)
            out.flush()
            os.fsync(out.fileno())
        if nbytes != file.nbytes:
            raise StorageError(
                f"store={objects.address!r} has {nbytes} bytes of {path} instead of {file.nbytes}: "
                "an object was changed; use another state or another copy"
            )
        os.utime(part, ns=(file.mtime_ns, file.mtime_ns))
        part.replace(target)
    except FileNotFoundError as error:
        raise StorageError(
            f"store={objects.address!r} no longer has an object of {path}: a process has replaced "
            "or deleted it; try again"
        ) from error
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error


@dataclass(frozen=True, slots=True)
class Standing:
    """The state in a store that a run folder continues; see `STANDING`.

    Attributes:
        store: The address.
        run: The id of the mirrored run.
        number: The number of the state; 0 before the first one.
        writer: The process that wrote it.
        wall: When it was taken, seconds since the Unix epoch.
        backlog_bytes: Bytes of the folder that are not in the store.
        part: The name of the part that the folder is; empty for the folder of shard 0.
        since: The first state of the run that belongs to this folder. Parts that have read only
            earlier states are of processes before a resume, and are not used. For a part, the
            first state that names it; 0 if none does.
    """

    store: str
    run: str
    number: int
    writer: str
    wall: float = 0.0
    backlog_bytes: int = 0
    part: str = ""
    since: int = 0

    @classmethod
    def of(cls, objects: Objects, state: StoredState, part: str = "", since: int = 0) -> Standing:
        """Return the standing of a folder that has a state and nothing more."""
        found = (state.run, state.number, state.writer, state.wall)
        return cls(objects.address, *found, part=part, since=since)

    @classmethod
    def restored(cls, objects: Objects, state: StoredState) -> Standing:
        """Return the standing of a folder into which a whole state was copied."""
        return cls.of(objects, state, since=state.number + 1)

    def write(self, folder: Path) -> None:
        """Write the file."""
        write_text(folder / STANDING, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Standing | None:
        """Return the standing of a folder; ``None`` if it was never mirrored."""
        try:
            facts = json.loads((folder / STANDING).read_text())
            names = {"store": str, "run": str, "number": int, "writer": str, "part": str}
            numbers = {"wall": float, "backlog_bytes": int, "since": int}
            return cls(**{name: kind(facts[name]) for name, kind in (names | numbers).items()})
        except (OSError, *NOT_JSON):
            return None


def require_continues(objects: Objects, state: StoredState | None, folder: Path | None) -> None:
    """Check that a run folder continues the run in a store, or that the store has none.

    Args:
        objects: The store.
        state: The newest state in the store.
        folder: The run folder; ``None``: a new run begins.

    Raises:
        ConfigError: The store has another run, or a newer state of this one.
    """
    if state is None:
        return
    standing, store = None if folder is None else Standing.read(folder), objects.address
    of_folder = standing and (standing.store, standing.run, standing.part)
    if standing is not None and of_folder == (store, state.run, ""):
        if state.number == standing.number or state.writer == standing.writer:
            return
        raise ConfigError(
            f"store={store!r} has state {state.number} of this run, written on {state.host}, but "
            f"{folder} continues state {standing.number}: continue from the store with ddiloco "
            f"train --resume {store} --set run.folder=…, or choose another store with --set "
            "run.store=…"
        )
    raise ConfigError(
        f"store={store!r} already has a run, {state.name!r} from {state.host}: continue it with "
        f"ddiloco train --resume {store}, or choose another address with --set run.store=…"
    )


@dataclass(slots=True)
class _Opened:
    """A new or changed file of the state that is being taken."""

    path: str
    source: BinaryIO
    nbytes: int
    mtime_ns: int
    mark: str
    kept: tuple[tuple[str, int], ...]  # pieces of earlier states that stay

    @property
    def begin(self) -> int:
        return sum(nbytes for _, nbytes in self.kept)


class Mirror:
    """Mirrors one run folder; only one thread may call its methods.

    Args:
        folder: The run folder.
        objects: The store.
        name: The name of the run.
        part: The name of the part, for a folder without shard 0.

    Attributes:
        number: The newest state that this process has written or found; 0 if there is none.
        backlog_bytes: Bytes of the folder that are not in a written state, as of the last look.
        sent_bytes: Bytes that this process has uploaded.
        is_replaced: Whether another process continues the run from the store.
        parts: The newest states of the parts, by name.
    """

    def __init__(self, folder: Path, objects: Objects, name: str, part: str = "") -> None:
        self.folder = folder
        self.objects = objects
        self.name = name
        self.part = part
        self.parts: dict[str, StoredState] = {}
        self.writer = runtime().unique_id()[:12]
        self.number = 0
        self.backlog_bytes = 0
        self.sent_bytes = 0
        self.is_replaced = False
        self._run = ""
        self._files: dict[str, StoredFile] = {}
        self._kept: list[StoredState] = []
        self._condemned: list[tuple[float, str]] = []
        self._standing: Standing | None = None
        self._uploaded: list[str] = []  # since the newest state
        self._serial = itertools.count(1)
        self._orphans_deleted = False
        self._since = 0
        self._of_run: list[StoredState] = []  # for a part: the newest states of the run
        self._found_first: int | None = None  # the newest of them when this process began
        self._abandoned: list[str] = []  # parts of processes before a resume

    @property
    def state(self) -> StoredState | None:
        """The newest state that this process has written or found."""
        return self._kept[-1] if self._kept else None

    @property
    def is_divided(self) -> bool:
        """Whether several mirrors write the run's states."""
        return bool(self.part or self.parts)

    @property
    def is_ahead(self) -> bool:
        """Whether this part waits, because no state of the run names its newest states."""
        return bool(self.part) and self.number - self._named(self._of_run[-1:]) >= UNNAMED_MAX

    def begin(self) -> None:
        """Read where the store stands, before the first state.

        Raises:
            ConfigError: The store has another run, or it refuses this process.
            StorageError: The store is unreachable.
        """
        state, standing = newest_state(self.objects), Standing.read(self.folder)
        try:
            require_continues(self.objects, state, self.folder)
        except ConfigError:
            self.is_replaced = True
            raise
        self._run = runtime().unique_id() if state is None else state.run
        if state is not None:
            self.number, self._files, self._kept = state.number, dict(state.files), [state]
            self._since = 0 if standing is None else standing.since
            self._standing = Standing.of(self.objects, state, since=self._since)

    def look(self) -> int:
        """Update `backlog_bytes` from the sizes of all files, and return it."""
        self.backlog_bytes = 0
        for group in _GROUPS:
            for path in self._listed(group):
                with contextlib.suppress(OSError):
                    found = (self.folder / path).stat()
                    self.backlog_bytes += self._missing_bytes(path, found)
        return self.backlog_bytes

    def note_backlog(self) -> None:
        """Write the backlog to `STANDING`, for the metrics of shard 0."""
        if self._standing is not None:
            with contextlib.suppress(StorageError):  # the disk is full: no reason to stop
                replace(self._standing, backlog_bytes=self.backlog_bytes).write(self.folder)

    def write(self, *, last: bool = False) -> bool:
        """Upload what is new, and write the next state; return whether a state was written.

        A part writes a state even if nothing is new, which shows that its mirror runs. It writes
        none while it waits for shard 0's mirror.

        Args:
            last: Whether the processes of the folder have ended. A part then waits no longer.

        Raises:
            ConfigError: The store refuses this process, or another one has written the next state.
            StorageError: The store is unreachable, or the folder cannot be read. A later call tries
                again, and what was uploaded is not uploaded again.
        """
        if self.part:
            if not self._read_run(last) or (self.is_ahead and not last):
                self.look()
                return False
        else:
            if not self._run:
                self.begin()
            # Before the own files, so that no part is newer than the coordinator's state.
            self._read_parts()
        self._upload_many_ahead()
        wall, files, opened = runtime().wall(), dict[str, StoredFile](), list[_Opened]()
        try:
            for group in _GROUPS:
                self._open_group(group, files, opened)
            self.backlog_bytes = sum(each.nbytes - each.begin for each in opened)
            files |= self._upload(opened)
        finally:
            _close(opened)
        files, parts = _combined(files, self.parts)
        unchanged = not opened and self._kept and self._kept[-1].files == files
        if unchanged and (last or not self.part):
            return False
        self._create(wall, files, parts)
        return True

    def end(self) -> None:
        """Delete what no state in use needs, without a grace time: the run is over."""
        if self._kept:
            self._delete(self._needed(), math.inf)

    def _read_parts(self) -> None:
        """Read the newest states of the parts."""
        found, self._abandoned = dict[str, StoredState](), []
        for name in self.objects.folders(PARTS):
            state = newest_state(self.objects, self.parts.get(name), name)
            if state is not None and state.after < self._since:
                self._abandoned.append(name)
            elif state is not None and state.run == self._run:
                found[name] = state
        self.parts = found

    def _read_run(self, last: bool) -> bool:
        """Read the newest states of the run; return whether this part can write its own.

        A new part waits for a state that is newer than those it found. So it belongs to a run whose
        shard 0 is mirrored now, and not to an earlier run at the same address.

        Raises:
            ConfigError: The run continues elsewhere, or it is another run.
            StorageError: The store is unreachable, or the part has ended before shard 0's mirror
                wrote a state.
        """
        known = {_manifest(each.number): each for each in self._of_run}
        self._of_run = []
        for name in _manifests(self.objects)[-STATES_KEPT:]:
            if name not in known:
                text = self.objects.get(name)
                if text is None:  # replaced in the meantime; only newer ones matter
                    continue
                known[name] = StoredState.read(text, f"{self.objects.address}/{name}")
            self._of_run.append(known[name])
        newest = self._of_run[-1] if self._of_run else None
        if not self._run and not self._begin_part(newest):
            if last:
                raise StorageError(
                    f"store={self.objects.address!r} has no new state from shard 0, so it cannot "
                    f"have part {self.part}: mirror the folder of shard 0 first"
                )
            return False
        if newest is None:
            raise StorageError(
                f"store={self.objects.address!r} no longer has the states of this run: restore the "
                "deleted objects, or choose another address with --set run.store=…"
            )
        if self.part in newest.parts:
            self._since = self._since or newest.number
        elif self._since and newest.number >= self._since:
            self.is_replaced = True
            raise ConfigError(
                f"store={self.objects.address!r} has state {newest.number} from a process on "
                f"{newest.host}, without part {self.part}: it continues this run, so this mirror "
                "has stopped; end one of the two runs"
            )
        return True

    def _begin_part(self, newest: StoredState | None) -> bool:
        standing, number = Standing.read(self.folder), 0 if newest is None else newest.number
        place = (self.objects.address, newest and newest.run, self.part)
        if standing is not None and (standing.store, standing.run, standing.part) == place:
            self._since = standing.since
        else:
            if self._found_first is None:
                self._found_first = number
            if newest is None or number <= self._found_first:
                return False
        assert newest is not None
        if newest.name != self.name:
            self.is_replaced = True
            raise ConfigError(
                f"store={self.objects.address!r} has another run, {newest.name!r} from "
                f"{newest.host}: choose another address with --set run.store=…"
            )
        for name in _manifests(self.objects, self.part):
            if (text := self.objects.get(name)) is not None:
                self._kept.append(StoredState.read(text, f"{self.objects.address}/{name}"))
        if self._kept:
            self.number, self._files = self._kept[-1].number, dict(self._kept[-1].files)
            self._standing = Standing.of(self.objects, self._kept[-1], self.part, self._since)
        self._run = newest.run
        return True

    def _named(self, states: Iterable[StoredState]) -> int:
        """Return the oldest state of this part that states of the run name; 0 if none does."""
        named = (each.parts[self.part].number for each in states if self.part in each.parts)
        return min(named, default=0)

    def _listed(self, patterns: Iterable[str]) -> list[str]:
        """Return the paths of a group that belong to a state, in the order of its patterns."""
        found = [path for pattern in patterns for path in sorted(self.folder.glob(pattern))]
        whole = {path.parent for path in found if path.name == "manifest.json"}
        of_checkpoints = self.folder / "checkpoints"
        return [
            path.relative_to(self.folder).as_posix()
            for path in found
            # torch.distributed.checkpoint names all tensors in `.metadata`.
            if (path.name == ".metadata" or not path.name.startswith("."))
            and path.suffix != ".part"
            # A checkpoint of the run without a manifest is incomplete. Shard 0 has the manifests.
            and (self.part or path.parent.parent != of_checkpoints or path.parent in whole)
            and path.is_file()
        ]

    def _missing_bytes(self, path: str, found: os.stat_result) -> int:
        known = self._files.get(path)
        if known is None:
            return found.st_size
        if (known.nbytes, known.mtime_ns) == (found.st_size, found.st_mtime_ns):
            return 0
        return max(0, found.st_size - known.nbytes) if known.mark else found.st_size

    def _open_group(
        self, group: Sequence[str], files: dict[str, StoredFile], opened: list[_Opened]
    ) -> None:
        """Open the new and changed files of a group; add the others to ``files``.

        If a process has renamed or deleted a file meanwhile, the group is opened again. Otherwise a
        tape's text could be in two files of the state, or in none.
        """
        for _ in range(TRIES):
            same, new, before = dict[str, StoredFile](), list[_Opened](), self._listed(group)
            try:
                for path in before:
                    unchanged = self._open(path)
                    if isinstance(unchanged, StoredFile):
                        same[path] = unchanged
                    else:
                        new.append(unchanged)
                if self._listed(group) == before:
                    files |= same
                    opened += new
                    return
            except FileNotFoundError:
                pass
            except OSError as error:
                _close(new)
                raise StorageError(f"{self.folder} cannot be mirrored: {error}") from error
            _close(new)
        raise StorageError(f"{self.folder}/{group[0]} changes too fast to be mirrored")

    def _open(self, path: str) -> StoredFile | _Opened:
        known, place = self._files.get(path), self.folder / path
        if known is not None:
            found = place.stat()
            if (known.nbytes, known.mtime_ns) == (found.st_size, found.st_mtime_ns):
                return known
        source = place.open("rb", buffering=0)
        try:
            found = os.fstat(source.fileno())
            growing, nbytes = place.suffix in GROWING, found.st_size
            kept: tuple[tuple[str, int], ...] = ()
            if growing and known is not None and known.mark == _mark(source, known.nbytes):
                kept = _pieces_that_stay(known.pieces, nbytes)
            mark = _mark(source, nbytes) if growing else ""
            return _Opened(path, source, nbytes, found.st_mtime_ns, mark, kept)
        except OSError:
            source.close()
            raise

    def _upload_many_ahead(self) -> None:
        """Upload whole files without opening all of them at once, if many are new."""
        new = [
            path
            for group in _GROUPS
            for path in self._listed(group)
            if path not in self._files and Path(path).suffix not in GROWING
        ]
        open_files_allowed(2 * OPEN_FILES_MAX)
        for first in range(0, len(new) - OPEN_FILES_MAX, OPEN_FILES_MAX):
            opened: list[_Opened] = []
            try:
                for path in new[first : first + OPEN_FILES_MAX]:
                    with contextlib.suppress(FileNotFoundError):
                        if isinstance(each := self._open(path), _Opened):
                            opened.append(each)
                self._files |= self._upload(opened)
            finally:
                _close(opened)

    def _upload(self, opened: Sequence[_Opened]) -> dict[str, StoredFile]:
        """Upload opened files; remember each one, so that a failed upload continues after it."""
        done: dict[str, StoredFile] = {}

        def upload(each: _Opened) -> None:
            nbytes, pieces = each.nbytes - each.begin, each.kept
            if nbytes:
                flat = each.path.replace("/", ".")
                place = f"{_place(self.part)}{OBJECTS}/{self.writer}"
                name = f"{place}/{next(self._serial):08d}.{flat}"
                self._uploaded.append(name)
                self.objects.upload(name, _bytes_of(each.source, each.begin, nbytes), nbytes)
                pieces = (*pieces, (name, nbytes))
            file = done[each.path] = StoredFile(pieces, each.mtime_ns, each.mark)
            # Not part of a written state yet, but part of the next one if the file stays the same.
            self._files[each.path] = file
            self.backlog_bytes = max(0, self.backlog_bytes - nbytes)
            self.sent_bytes += nbytes

        small = [each for each in opened if each.nbytes - each.begin <= SMALL_BYTES]
        with ThreadPoolExecutor(SMALL_AT_ONCE, thread_name_prefix="ddiloco-store") as pool:
            for _ in pool.map(upload, small):
                pass
        for each in opened:
            if each.nbytes - each.begin > SMALL_BYTES:
                upload(each)
        return done

    def _create(
        self, wall: float, files: dict[str, StoredFile], parts: dict[str, StoredPart]
    ) -> None:
        """Write the manifest, and then delete what no kept state needs."""
        number, after = self.number + 1, self._of_run[-1].number if self._of_run else 0
        facts = (self._run, self.name, self.writer, socket.gethostname(), wall, after)
        state = StoredState(number, *facts, files, parts)
        name = _manifest(number, self.part)
        if not self.objects.create(name, state.to_json()):
            text = self.objects.get(name)
            found = StoredState.read(text, name) if text is not None else None
            if found is None or found.writer != self.writer:
                self.is_replaced = True
                with contextlib.suppress(ConfigError, StorageError):  # no state can name them
                    self.objects.delete(self._uploaded)
                host = "another process" if found is None else f"a process on {found.host}"
                what = f"state {number}" + (f" of part {self.part}" if self.part else "")
                raise ConfigError(
                    f"store={self.objects.address!r} has {what} from {host}: it continues "
                    "this run, so this mirror has stopped; end one of the two runs"
                )
            state = found  # the answer to an earlier attempt was lost
        self.number, self._files = number, dict(state.files)
        self._standing = Standing.of(self.objects, state, self.part, self._since)
        self._standing.write(self.folder)
        self._forget(state)

    def _forget(self, state: StoredState) -> None:
        """Delete objects that no kept state needs, after a grace time."""
        self._kept.append(state)
        oldest = self._named(self._of_run) if self.part else state.number - STATES_KEPT + 1
        dropped = [each for each in self._kept if each.number < oldest]
        self._kept = [each for each in self._kept if each.number >= oldest]
        needed, now = self._needed(), time.monotonic()
        unneeded = [name for name in self._uploaded if name not in needed]
        for old in dropped:
            # The manifest first: a reader must not find one whose objects are gone.
            unneeded.append(_manifest(old.number, self.part))
            of_parts = tuple(map(_place, state.parts))  # a part deletes its own objects
            unneeded += sorted(n for n in old.objects - needed if not n.startswith(of_parts))
        self._uploaded = []
        self._condemned += [(now, name) for name in unneeded]
        self._delete(needed, now - GRACE_SECONDS)

    def _needed(self) -> set[str]:
        return set[str]().union(*(each.objects for each in self._kept))

    def _delete(self, needed: set[str], before: float) -> None:
        """Delete what was condemned before a time of the monotonic clock, and orphans.

        Orphans are deleted after the first state of this process and at the end of the run.
        """
        due = [name for since, name in self._condemned if since <= before]
        # Without the permission to delete, or with the store unreachable, old objects stay: no
        # state depends on that, and the next state tries again.
        with contextlib.suppress(ConfigError, StorageError):
            if not self._orphans_deleted or math.isinf(before):
                self._delete_orphans(needed)
            self.objects.delete(due)
            self._condemned = self._condemned[len(due) :]

    def _delete_orphans(self, needed: set[str]) -> None:
        """Delete what other processes have left that wrote to this address before.

        A process that continues from the newest state uploads its objects after it. So what is not
        older than that state stays. Some stores have times in whole seconds.
        """
        place, newest = _place(self.part), _manifest(self.number, self.part)
        kept = needed | {_manifest(each.number, self.part) for each in self._kept}
        kept |= {name for _, name in self._condemned}
        found = list[StoredObject]()
        for at in (place, *map(_place, self._abandoned)):
            for folder in (MANIFESTS, OBJECTS):
                found += self.objects.listed(f"{at}{folder}")
        written = max((each.modified for each in found if each.name == newest), default=0.0)
        mine = f"{place}{OBJECTS}/{self.writer}/"  # may become part of the next state
        orphans = (each.name for each in found if each.modified < written)
        self.objects.delete([n for n in orphans if n not in kept and not n.startswith(mine)])
        self._orphans_deleted = True


def _place(part: str) -> str:
    return f"{PARTS}/{part}/" if part else ""


def _manifests(objects: Objects, part: str = "") -> list[str]:
    """Return the names of all manifests of a run or of a part, in order."""
    return sorted(each.name for each in objects.listed(f"{_place(part)}{MANIFESTS}"))


def _combined(
    own: dict[str, StoredFile], parts: Mapping[str, StoredState]
) -> tuple[dict[str, StoredFile], dict[str, StoredPart]]:
    """Return the files of a run from all folders, and the parts that have some of them.

    The files of a shard or learner are from one folder: the one with its newest file.
    """
    if not parts:
        return own, {}
    sources = {"": own, **{name: state.files for name, state in parts.items()}}
    newest: dict[str, tuple[int, str]] = {}
    for source, files in sources.items():
        for path, file in files.items():
            owner = process_of_file(path)
            if owner not in newest or newest[owner][0] < file.mtime_ns:
                newest[owner] = file.mtime_ns, source
    newest[""] = 0, ""  # files of the whole run are those of shard 0's folder
    chosen: dict[str, StoredFile] = {}
    used: dict[str, StoredPart] = {}
    for source, files in sources.items():
        mine = {p: file for p, file in files.items() if newest[process_of_file(p)][1] == source}
        chosen |= mine
        if source and mine:
            state = parts[source]
            used[source] = StoredPart(state.number, state.host, state.wall)
    shards = {path.split("/")[1] for path in chosen if path.startswith("durable/")}
    for folder in {path.rpartition("/")[0] for path in chosen if path.startswith("checkpoints/")}:
        expected = {f"{folder}/{shard}.safetensors" for shard in shards}
        # A part may be older than the manifest. Such a checkpoint of the run is incomplete.
        if "/" in folder and not {f"{folder}/manifest.json", *expected} <= chosen.keys():
            chosen = {p: file for p, file in chosen.items() if not p.startswith(f"{folder}/")}
    return chosen, used


def process_of_file(path: str) -> str:
    """Return the shard or learner that writes a file; empty for a file of the whole run.

    >>> process_of_file("tape/shard-1-standby.jsonl"), process_of_file("coordinator/00000001.json")
    ('shard-1', '')
    """
    first, _, rest = path.partition("/")
    if first not in ("audit", "claims", "checkpoints", "durable", "learners", "logs", "tape"):
        return ""
    name = rest.rpartition("/")[2] if first == "checkpoints" else rest.partition("/")[0]
    name = name if first == "learners" else name.partition(".")[0]
    shard = re.match(r"shard-\d+(?=-standby$|$)", name)
    return shard[0] if shard else "" if name in _OF_THE_RUN else name


_OF_THE_RUN = ("coordinator", "coordinator-standby", "launcher", "logger", "manifest", "mirror")
"""Names of tapes, logs and files of checkpoints that are of no shard or learner."""


def _manifest(number: int, part: str = "") -> str:
    return f"{_place(part)}{MANIFESTS}/{number:08d}.json"


def _pieces_that_stay(
    pieces: Sequence[tuple[str, int]], nbytes: int
) -> tuple[tuple[str, int], ...]:
    """Return the pieces that a file of this size keeps; the rest becomes one new piece.

    >>> _pieces_that_stay([("a", 8), ("b", 2), ("c", 1)], 12)
    (('a', 8),)
    """
    kept = list(pieces)
    fresh = nbytes - sum(each for _, each in kept)
    while fresh and kept and kept[-1][1] <= min(fresh, PIECE_BYTES_MAX - 1):
        fresh += kept.pop()[1]
    return tuple(kept)


def _mark(source: BinaryIO, nbytes: int) -> str:
    """Return the digest of both ends of a file's first bytes."""
    first, last = MARK_BYTES
    ends = os.pread(source.fileno(), min(first, nbytes), 0)
    begin = max(0, nbytes - last)
    ends += os.pread(source.fileno(), nbytes - begin, begin)
    return xxhash.xxh3_64_hexdigest(ends)


def _close(opened: Iterable[_Opened]) -> None:
    for each in opened:
        each.source.close()


def _bytes_of(source: BinaryIO, begin: int, nbytes: int) -> Iterator[bytes]:
    """Yield some bytes of an open file, which may grow or be deleted meanwhile."""
    end = begin + nbytes
    while begin < end:
        piece = os.pread(source.fileno(), min(READ_BYTES, end - begin), begin)
        if not piece:
            raise StorageError("a file has become shorter while it was mirrored: it is read again")
        yield piece
        begin += len(piece)
