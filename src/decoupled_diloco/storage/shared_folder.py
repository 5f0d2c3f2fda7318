"""A run whose processes share its folder, on machines that nobody knows beforehand.

The syncer writes down where it listens, or each of its shards does. The others read it there, and
again whenever they dial: a queue may start the syncer anew on another machine, and training goes on
meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from decoupled_diloco.config.addresses import (
    alternatives,
    on_this_machine,
    reached_by,
    url_of,
)
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.errors import ConfigError, Error, StorageError
from decoupled_diloco.storage.files import write_text

logger = logging.getLogger(__name__)

ADDRESSES = "addresses"
"""The file that says where the shards listen."""

HOST = "host"
"""The file with the name of their machine, for those that share the run folder."""

PLACES = "places"
"""The folder in which each shard writes down where it listens, if each is started on a machine of
its own: a line for each of its places, the newest last."""

STATE = "coordinator.json"
"""The file with the coordinator's state, for readers."""

WAIT_SECONDS = 0.5
"""How often a process looks whether the syncer has been started."""


def shared_addresses(run: Path) -> tuple[str, ...]:
    """Where the shards listen, for a process of any machine that shares the run folder.

    Waits for as long as they have not been started: where a queue starts them that may be hours.
    """
    told = False
    while not ((run / ADDRESSES).exists() or read_places(run)):
        if not told:
            logger.info("waiting for the syncer, which writes down in %s where it is", run)
        told = True
        time.sleep(WAIT_SECONDS)
    return _views(run, read_places(run))[0]


def _views(run: Path, places: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """How a process of this machine dials them, of the syncer's, and of any.

    Shards that note their places are dialled alike from everywhere.
    """
    if places:
        return (tuple(of_shard[-1] for of_shard in places),)
    host, addresses = (run / HOST).read_text().strip(), read_addresses(run)
    inside = tuple(map(on_this_machine, addresses))
    outside = tuple(reached_by(address, url_of(host, None)) for address in addresses)
    return inside if host == socket.gethostname() else outside, inside, outside


def shards_that_move(run: Path) -> SharedFolder | None:
    """Where the others are, for a shard, if they note their places; ``None``: none moves."""
    return SharedFolder(run) if read_places(run) else None


class SharedFolder:
    """A `transport.base.Locator`: shards are where the run folder says that they are by now.

    An address that another process of the run tells, on whichever machine, is known, too.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._place: dict[str, tuple[int, int]] = {}  # of each address that was ever told
        self._newest: tuple[str, ...] = ()

    async def look(self) -> list[str]:
        await asyncio.to_thread(self._look)  # a shared file system may take its time
        return [one for address in self._newest for one in alternatives(address)]

    def now(self, address: str) -> str:
        if address not in self._place:
            return address
        shard, turn = self._place[address]
        return alternatives(self._newest[shard])[turn]

    def _look(self) -> None:
        try:
            places = read_places(self._run)
            views = _views(self._run, places)
        except (Error, OSError):  # the file system is away for a moment: as before
            return
        self._newest = views[0]
        # A shard may be told of at a place where it was before this process began. A port that one
        # shard has left may be another's by now.
        former = [(shard, place) for shard, of in enumerate(places) for place in of[:-1]]
        for shard, address in [*former, *(told for view in views for told in enumerate(view))]:
            for turn, one in enumerate(alternatives(address)):
                self._place[one] = (shard, turn)


def write_addresses(run: Path, addresses: Sequence[str]) -> None:
    """Keeps where the shards listen, in order: with port 0 nothing else tells."""
    write_text(run / HOST, socket.gethostname() + "\n")
    write_text(run / ADDRESSES, "\n".join(addresses) + "\n")


def write_place(run: Path, shard: int, address: str) -> None:
    """Notes that a shard, which others look for in the run folder, is started at an address."""
    (run / PLACES).mkdir(exist_ok=True)
    path = run / PLACES / f"shard-{shard}"
    before = path.read_text() if path.exists() else ""
    write_text(path, f"{before}{address}\n")


def read_places(run: Path) -> tuple[tuple[str, ...], ...]:
    """Where each shard has listened, in order, the newest place last; empty: they note it not.

    A shard that has not been started yet has no place; those behind it are left out.
    """
    found: list[tuple[str, ...]] = []
    while (path := run / PLACES / f"shard-{len(found)}").exists():
        found.append(tuple(path.read_text().split()))
    return tuple(found)


def recorded_end(run: Path) -> str:
    """The sentence that a run has ended, if its folder records that; otherwise empty.

    A run whose budget was raised since then continues when its syncer starts again.
    """
    try:
        kept = json.loads((run / STATE).read_text())
        then, now = json.loads(kept["settings"]), tomllib.loads((run / RUN_FILE).read_text())
        if kept["state"]["phase"] != "finished" or _budget_of(then) != _budget_of(now):
            return ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    return (
        f"the run in {run} has ended, and its weights are in that folder: for another run, start "
        "the syncer first; to continue this run, raise its budget and start the syncer with "
        "--resume"
    )


def _budget_of(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    run = settings["run"]
    return run.get("budget_steps"), run.get("budget_tokens")


def read_addresses(run: Path) -> tuple[str, ...]:
    """Where the shards of a run on this machine listen, or did when it was last started.

    Raises:
        ConfigError: There is no such folder.
        StorageError: It is no run folder, or the run was never started.
    """
    if not run.exists():
        raise ConfigError(
            f"{run} does not exist: give the folder of a run that was started on this machine, or "
            "http://HOST:PORT"
        )
    try:
        places = read_places(run)
        if places:
            return tuple(of_shard[-1] for of_shard in places)
        return tuple((run / ADDRESSES).read_text().split())
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{run} does not say where its syncer listens ({reason_of(error)}): give the folder of "
            "a run that was started on this machine, or http://HOST:PORT"
        ) from error


def reason_of(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is no such file"
