"""Sources of a run's records: its folder, its tape, or its running syncer.

Each call of `poll` returns the new records, ordered by wall-clock time. The tape of a running run
grows between calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from decoupled_diloco.config.addresses import alternatives, is_store, reached_by
from decoupled_diloco.errors import (
    AccessError,
    ConfigError,
    ProtocolError,
    StorageError,
    TransportError,
)
from decoupled_diloco.storage.mirror import StoredCopy
from decoupled_diloco.tape.reader import (
    Follower,
    check_name,
    check_readable,
    read_on_order,
    tape_files,
)
from decoupled_diloco.tape.records import FOLDER_NAME, SECONDS_MAX, Parser, Record
from decoupled_diloco.transport.fetch import fetch, read_object
from decoupled_diloco.transport.tls import TLSConfig, require_used

TAPE_PATH = "/tape"

NEW_RUNS_MAX = 3
"""Maximum number of times that a new run may replace the old one during one poll."""

_T = TypeVar("_T")


class Source(Protocol):
    """A run that can be read.

    Attributes:
        live: True for a running syncer, which does not serve the learners' tapes.
        generation: Increases when another run replaces this one; then all records are read again.
    """

    live: bool
    generation: int

    @property
    def stored(self) -> StoredCopy | None:
        """The copy that is read, for a run in an object store."""
        ...

    def poll(self) -> list[Record]:
        """Return the records since the last call.

        Raises:
            StorageError: The tape does not exist or cannot be read.
            TransportError: No syncer answers.
        """
        ...

    def now(self) -> float:
        """Return the wall-clock seconds of the machine that writes the tape."""
        ...

    def problems(self) -> list[str]:
        """Return one sentence for each file or address that cannot be read or reached."""
        ...


def open_source(
    text: str, token: str | None = None, tls: TLSConfig | None = None, *, detail: bool = False
) -> Source:
    """Open the source that a command line specifies.

    Args:
        text: A run folder, tape folder or tape file; the address of a run in an object store; or
            one or more addresses of a running syncer, ``http://host:port``, separated by commas.
            One shard is enough: it lists the others.
        token: The run's auth token, for a syncer.
        tls: The CA and the client certificate, for a syncer at ``https://``.
        detail: Request every step report from a syncer.

    Raises:
        Error: The path does not exist or is not a run.
    """
    if text.startswith(("http://", "https://")):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        addresses = tuple(each for part in parts for each in alternatives(part))
        return SyncerSource(addresses, token, tls, detail=detail)
    require_used(tls, text)
    if is_store(text):
        return StoreSource(text)
    return FolderSource(Path(text))


class FolderSource:
    """A run folder, a tape folder or a tape file on this machine."""

    live = False
    stored: StoredCopy | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._records = 0
        if not path.exists():
            raise ConfigError(
                f"{path} does not exist: use a run folder, a tape, or the address of a running "
                "syncer (http://HOST:PORT)"
            )
        self._follower = self._new()

    def _new(self) -> Follower:
        path = self.path
        begun = any((path / name).exists() for name in ("run.toml", "lock", FOLDER_NAME))
        if path.is_dir() and path.name != FOLDER_NAME and not (begun or tape_files(path)):
            raise StorageError(
                f"{path} is not a run folder: it has neither a tape nor run.toml; use the folder "
                "in the run's configuration"
            )
        check_name(path)
        return Follower(path)

    def stream(self, *, skim: bool = True) -> Iterator[Record]:
        """Yield the records of `poll` one by one; the caller must exhaust the iterator.

        Args:
            skim: Yield only the records of `excerpt`.
        """
        self._check_for_another_run()
        return self._follower.stream(skim=skim)

    def _check_for_another_run(self) -> None:
        if self._follower.replaced():
            self._follower = self._new()
            self.generation += 1
            self._records = 0

    def poll(self) -> list[Record]:
        self._check_for_another_run()
        records = self._follower.poll()
        self._records += len(records)
        if not self._records:
            check_readable(self.path, self._follower.problems)
        return records

    def now(self) -> float:
        return time.time()

    def problems(self) -> list[str]:
        return list(self._follower.problems)


class StoreSource(FolderSource):
    """The tapes of a run in an object store, as of its newest state."""

    def __init__(self, address: str) -> None:
        self.stored: StoredCopy = StoredCopy(address, FOLDER_NAME)
        super().__init__(self.stored.folder)

    def poll(self) -> list[Record]:
        self.stored.refresh()
        return super().poll()


class SyncerSource:
    """The shards of a running syncer, which serve their tapes."""

    live = True
    stored = None

    def __init__(
        self,
        addresses: tuple[str, ...],
        token: str | None,
        tls: TLSConfig | None = None,
        *,
        detail: bool = False,
    ) -> None:
        self.generation = 0
        self._addresses, self._token, self._tls = addresses, token, tls
        self._detail = "1" if detail else "0"
        self._shards: tuple[str, ...] = ()
        self._tapes: dict[int, tuple[str, ...]] = {}
        self._skew = 0.0
        self._offsets: dict[str, int] = {}
        self._identities: dict[str, str] = {}
        self._parsers: dict[str, Parser] = {}
        self._torn: list[str] = []
        self._silent: dict[str, str] = {}

    def poll(self) -> list[Record]:
        """Return the new records; all records of the new run if another run has replaced it."""
        for _ in range(NEW_RUNS_MAX):
            try:
                return self._poll()
            except _AnotherRun:
                self.generation += 1
                for known in (self._offsets, self._identities, self._parsers, self._tapes):
                    known.clear()
                self._shards = ()
        return []

    def _poll(self) -> list[Record]:
        self._shards = self._shards or _first_to_answer(self._find, self._addresses)
        records: list[Record] = []
        failures: list[TransportError] = []
        self._silent.clear()
        for shard, address in enumerate(self._shards):
            try:
                records += _first_to_answer(partial(self._read, shard), alternatives(address))
            except AccessError:
                raise
            except TransportError as error:
                failures.append(error)
                self._silent[address] = f"shard {shard} is unreachable: {error}"
        if failures and len(failures) == len(self._shards):
            raise failures[0]
        return sorted(records, key=read_on_order)

    def _find(self, address: str) -> tuple[str, ...]:
        """Return the addresses of all shards."""
        about = read_object(fetch(address, TAPE_PATH, {}, self._token, self._tls), address)
        shards, wall = _names(about, "shards", address), about.get("wall")
        if not isinstance(wall, int | float) or not abs(wall) < SECONDS_MAX:
            wall = time.time()
        # Times on the tape are from the syncer's clock, so `now` must be, too.
        self._skew = float(wall) - time.time()
        return tuple(reached_by(each, address) for each in shards)

    def _read(self, shard: int, address: str) -> list[Record]:
        if shard not in self._tapes:
            about = read_object(fetch(address, TAPE_PATH, {}, self._token, self._tls), address)
            self._tapes[shard] = _names(about, "tapes", address)
        tapes = self._tapes[shard]
        return [record for process in tapes for record in self._read_tape(address, process)]

    def _read_tape(self, address: str, process: str) -> list[Record]:
        parser = self._parsers.setdefault(process, Parser(Path(f"{address}/{process}"), self._torn))
        records: list[Record] = []
        while True:
            start = self._offsets.get(process, 0)
            query = {"process": process, "from": str(start), "detail": self._detail}
            document = fetch(address, TAPE_PATH, query, self._token, self._tls)
            following, size = _fact(document.facts, "next"), _fact(document.facts, "size")
            identity = document.facts.get("tape") or self._identities.get(process, "")
            # A shorter tape, or one with another identity, belongs to a new run. A tape that its
            # process has not begun has no identity yet.
            other = identity and self._identities.setdefault(process, identity) != identity
            if size < start or other:
                raise _AnotherRun
            records += filter(None, map(parser.parse, document.body.splitlines()))
            self._offsets[process] = following
            if following <= start:  # an answer holds a limited piece: repeat until the end
                return records

    def now(self) -> float:
        return time.time() + self._skew

    def problems(self) -> list[str]:
        return [*self._silent.values(), *self._torn]


class _AnotherRun(Exception):
    """The tape has been replaced by that of another run."""


def _first_to_answer(request: Callable[[str], _T], addresses: Iterable[str]) -> _T:
    """Return the answer of the first address that answers.

    Raises:
        TransportError: No address answers; the error of the first address.
    """
    failure: TransportError | None = None
    for address in addresses:
        try:
            return request(address)
        except AccessError:
            raise
        except TransportError as error:
            failure = failure or error
    assert failure is not None, "there is at least one address"
    raise failure


def _names(about: dict[str, Any], key: str, address: str) -> tuple[str, ...]:
    """Return the addresses of all shards, or the names of a shard's tapes."""
    found = about.get(key)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ProtocolError(f"the answer of {address} does not list its {key}")
    return tuple(found)


def _fact(facts: dict[str, str], name: str) -> int:
    text = facts.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ProtocolError(
            f"the syncer's answer has no valid {name!r} of its tape: check that the syncer has "
            "this version"
        )
    return int(text)
