"""The process that folds a run's tape for its page: ``python -m decoupled_diloco.show.page.fold``.

The syncer starts it while a page is open. It reads the location of the run from its standard input,
writes messages (see `feed`), and ends when its input is closed. It runs at low priority, because
training and merging are more important.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from decoupled_diloco.config.addresses import alternatives
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.protocol.quotas import is_one_of
from decoupled_diloco.run_model import RunModel
from decoupled_diloco.show.page.document import PageChanges, state_of_page
from decoupled_diloco.show.page.history import PageHistory
from decoupled_diloco.show.status import RunStatus, status_of
from decoupled_diloco.tape.reader import tape_files
from decoupled_diloco.tape.records import Record
from decoupled_diloco.tape.restricted import RestrictedTape
from decoupled_diloco.tape.sources import FolderSource, Source, SyncerSource
from decoupled_diloco.transport.tls import TLSConfig

LOOK_SECONDS = 1.0
"""Interval between two reads of the tape."""

STATES_EVERY = 30
"""Number of changes after which the whole state is sent again, for new viewers."""

NICENESS = 10


class Places:
    """Sources of the run: its folder, if all shards write there, otherwise the shards.

    The folder also has the learners' own tapes, and the launcher's.
    """

    def __init__(
        self,
        folder: Path,
        names: list[list[str]],
        addresses: tuple[str, ...],
        token: str | None,
        tls: TLSConfig | None = None,
    ) -> None:
        self._folder, self._names = folder, names
        every = tuple(each for shard in addresses for each in alternatives(shard))
        self._remote = SyncerSource(every, token, tls)
        self._local: FolderSource | None = None

    def source(self) -> Source:
        """Return the folder as soon as all shards have a tape in it, otherwise the shards."""
        if self._local is None:
            here = {path.stem for path in tape_files(self._folder)}
            if all(here.intersection(names) for names in self._names):
                self._local = FolderSource(self._folder)
        return self._local or self._remote


class LiveFold:
    """Keeps the page's state up to date, and writes it."""

    def __init__(
        self, places: Places, out: BinaryIO, restricted: RestrictedTape | None = None
    ) -> None:
        self._places, self._out = places, out
        self._restricted = restricted
        self._source: Source | None = None
        self._generation = 0
        self._problem = ""
        self._restart()

    def _restart(self) -> None:
        self._run, self._history = RunModel(), PageHistory()
        self._changes: PageChanges | None = None
        self._thinned = self._changes_sent = 0
        self._reading = False

    def poll(self) -> None:
        """Read new records and send the changes; for a long tape also while reading it."""
        source = self._places.source()
        if source is not self._source:
            self._source, self._generation = source, source.generation
            self._restart()
        try:
            records: Iterable[Record] = (
                source.stream() if isinstance(source, FolderSource) else source.poll()
            )
            if source.generation != self._generation:
                self._generation = source.generation
                self._restart()
            self._take(records)
            self._problem = ""
        except DilocoError as error:
            self._problem = str(error)
        problems = [*([self._problem] if self._problem else []), *source.problems()]
        status = status_of(self._run, source.now(), problems)
        if self._run.records:
            self._history.follow(self._run, status.as_of - self._run.started_wall)
        self._send(status)

    def _take(self, records: Iterable[Record]) -> None:
        run, history, sent_at = self._run, self._history, time.monotonic()
        for each in records:
            record = each if self._restricted is None else self._restricted.record(each)
            if record is None:
                continue
            run.take(record)
            if history.due <= run.duration:
                history.follow(run, run.duration)
                if time.monotonic() - sent_at > LOOK_SECONDS:
                    self._send(status_of(run, run.latest), reading=True)
                    sent_at = time.monotonic()

    def _send(self, status: RunStatus, *, reading: bool = False) -> None:
        """Write the state, or its changes; ``reading``: the tape has not been read to its end."""
        state = state_of_page(self._run, status, self._history)
        state["run"]["whole"] = isinstance(self._source, FolderSource)
        state["run"]["reading"] = reading
        whole = self._reading and not reading  # many rows are outdated at this point
        self._reading = reading
        if self._changes is None or self._history.thinned != self._thinned or whole:
            self._thinned = self._history.thinned
            self._changes = PageChanges(state)
            self._write(b"F", state)
            return
        self._write(b"D", self._changes.to(state))
        self._changes_sent += 1
        if self._changes_sent % STATES_EVERY == 0:
            self._write(b"K", state)

    def _write(self, kind: bytes, message: dict[str, Any]) -> None:
        text = json.dumps(message, separators=(",", ":"), allow_nan=False)
        self._out.write(kind + b" " + text.encode() + b"\n")
        self._out.flush()


def main() -> None:
    given = json.loads(sys.stdin.buffer.readline())
    os.nice(NICENESS)
    tls = TLSConfig(*given["tls"]) if given.get("tls") else None
    folder, tapes, shards = Path(given["folder"]), given["tapes"], tuple(given["shards"])
    places = Places(folder, tapes, shards, given["token"], tls)
    party = given.get("party")
    restricted = None
    if party is not None:
        restricted = RestrictedTape(partial(is_one_of, party["own"]), party["learners"])
    fold = LiveFold(places, sys.stdout.buffer, restricted)
    while True:
        fold.poll()
        if select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            return


if __name__ == "__main__":
    main()
