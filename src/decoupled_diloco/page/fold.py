"""The process that folds a run's tape for its page.

``python -m decoupled_diloco.page.fold``: the syncer starts it while somebody looks. It is told on
its standard input where the run is, writes messages (see `feed`), and ends when that is closed. It
has the lowest priority: training and merging go first.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from decoupled_diloco.config.addresses import alternatives
from decoupled_diloco.errors import Error
from decoupled_diloco.observe.reader import tape_files
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.run_model import RunModel
from decoupled_diloco.observe.sources import FolderSource, Source, SyncerSource
from decoupled_diloco.observe.status import RunStatus, status_of
from decoupled_diloco.page.document import PageChanges, state_of_page
from decoupled_diloco.page.history import PageHistory
from decoupled_diloco.transport.tls import Tls

LOOK_SECONDS = 1.0
"""From one look at the tape to the next."""

STATES_EVERY = 30
"""After so many changes the whole state is told once more, for those who come later."""

NICENESS = 10


class Places:
    """Where the run can be read: in its folder, if all shards write there, or from the shards.

    The folder has the learners' own tapes, too, and what the launcher did.
    """

    def __init__(
        self,
        folder: Path,
        names: list[list[str]],
        addresses: tuple[str, ...],
        token: str | None,
        tls: Tls | None = None,
    ) -> None:
        self._folder, self._names = folder, names
        every = tuple(each for shard in addresses for each in alternatives(shard))
        self._remote = SyncerSource(every, token, tls)
        self._local: FolderSource | None = None

    def source(self) -> Source:
        """The folder from the moment at which all shards have a tape in it."""
        if self._local is None and self._all_here():
            self._local = FolderSource(self._folder)
        return self._local or self._remote

    def _all_here(self) -> bool:
        here = {path.stem for path in tape_files(self._folder)}
        return all(here.intersection(names) for names in self._names)


class LiveFold:
    """Keeps the page's state up to date, and writes it."""

    def __init__(self, places: Places, out: BinaryIO) -> None:
        self._places, self._out = places, out
        self._source: Source | None = None
        self._generation = 0
        self._problem = ""
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._run, self._history = RunModel(), PageHistory()
        self._changes: PageChanges | None = None
        self._thinned = self._told = 0
        self._reading = False

    def look(self) -> None:
        """Takes in what is new, and tells of it; of a long tape also while it is read."""
        source = self._places.source()
        if source is not self._source:
            self._source, self._generation = source, source.generation
            self._begin_anew()
        try:
            records: Iterable[Record] = (
                source.stream() if isinstance(source, FolderSource) else source.poll()
            )
            if source.generation != self._generation:
                self._generation = source.generation
                self._begin_anew()
            self._take(records)
            self._problem = ""
        except Error as error:
            self._problem = str(error)
        status = self._status()
        if self._run.records:
            self._history.follow(self._run, status.as_of - self._run.started_wall)
        self._tell(status)

    def _take(self, records: Iterable[Record]) -> None:
        run, history, told_at = self._run, self._history, time.monotonic()
        for record in records:
            run.take(record)
            if history.due <= run.duration:
                history.follow(run, run.duration)
                if time.monotonic() - told_at > LOOK_SECONDS:
                    self._tell(status_of(run, run.latest), reading=True)
                    told_at = time.monotonic()

    def _status(self) -> RunStatus:
        source = self._source
        assert source is not None
        problems = [*([self._problem] if self._problem else []), *source.problems()]
        return status_of(self._run, source.now(), problems)

    def _tell(self, status: RunStatus, *, reading: bool = False) -> None:
        """Writes the state, or what has changed of it; ``reading``: there is more of the tape."""
        state = state_of_page(self._run, status, self._history)
        state["run"]["whole"] = isinstance(self._source, FolderSource)
        state["run"]["reading"] = reading
        whole = self._reading and not reading  # many rows are old then
        self._reading = reading
        if self._changes is None or self._history.thinned != self._thinned or whole:
            self._thinned = self._history.thinned
            self._changes = PageChanges(state)
            self._write(b"F", state)
            return
        self._write(b"D", self._changes.to(state))
        self._told += 1
        if self._told % STATES_EVERY == 0:
            self._write(b"K", state)

    def _write(self, kind: bytes, message: dict[str, Any]) -> None:
        text = json.dumps(message, separators=(",", ":"), allow_nan=False)
        self._out.write(kind + b" " + text.encode() + b"\n")
        self._out.flush()


def main() -> None:
    told = json.loads(sys.stdin.buffer.readline())
    os.nice(NICENESS)
    tls = Tls(*told["tls"]) if told.get("tls") else None
    places = Places(Path(told["folder"]), told["tapes"], tuple(told["shards"]), told["token"], tls)
    fold = LiveFold(places, sys.stdout.buffer)
    while True:
        fold.look()
        if select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            return


if __name__ == "__main__":
    main()
