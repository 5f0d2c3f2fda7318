"""Find the syncer through a shared run folder, for runs on machines that are not known beforehand.

The syncer, or each of its shards, writes its address to the folder. The other processes read it
there each time they dial, because a queue may restart the syncer on another machine while training
continues.
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
from decoupled_diloco.errors import ConfigError, DilocoError, StorageError, TransportError
from decoupled_diloco.storage.coordinator_states import CoordinatorStates
from decoupled_diloco.storage.files import NOT_JSON, write_text

logger = logging.getLogger(__name__)

ADDRESSES = "addresses"
"""The file with the addresses of the shards."""

HOST = "host"
"""The file with the host name of the syncer's machine."""

PLACES = "places"
"""The folder with one file per relay, and per shard if each shard is started on a separate machine.
The file has a line for each address that the process has had, the newest last."""

RELAY = "relay-"
"""Start of the name of a relay's process and file."""

_RELAYS = "://relay.invalid/"
"""Marks the address of a relay in this run, wherever it runs; see `relay_address`."""

WAIT_SECONDS = 0.5
"""Interval at which a process checks whether the syncer has been started."""


def shared_addresses(run: Path) -> tuple[str, ...]:
    """Return the addresses of the shards, for a process on any machine that shares the run folder.

    Blocks until the shards have been started. With a queue this may take hours.
    """
    logged = False
    while not ((run / ADDRESSES).exists() or read_places(run)):
        if not logged:
            logger.info("waiting for the syncer, which will write its addresses to %s", run)
        logged = True
        time.sleep(WAIT_SECONDS)
    return _views(run, read_places(run))[0]


def relay_address(site: str, scheme: str) -> str:
    """Return the address of a site's relay for a client with a `SharedFolder`, which replaces it.

    A client may have it before the relay starts, and keeps it when the relay moves.

    >>> relay_address("site-a", "http")
    'http://relay.invalid/site-a'
    """
    return f"{scheme}{_RELAYS}{site}"


def _views(run: Path, places: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the addresses as seen from this machine, the syncer's machine and any machine.

    Shards that record their places have the same address from everywhere, so there is one view.
    """
    if places:
        return (tuple(of_shard[-1] for of_shard in places),)
    host, addresses = (run / HOST).read_text().strip(), read_addresses(run)
    inside = tuple(map(on_this_machine, addresses))
    outside = tuple(reached_by(address, url_of(host, None)) for address in addresses)
    return inside if host == socket.gethostname() else outside, inside, outside


def shards_that_move(run: Path) -> SharedFolder | None:
    """Return a locator of the other shards if they record their places, otherwise ``None``."""
    return SharedFolder(run) if read_places(run) else None


class SharedFolder:
    """A `transport.interface.Locator` that reads addresses from the run folder.

    It also translates addresses received from processes on other machines of the run.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        # For each address ever recorded: the shard, and the index among the address's alternatives.
        self._place: dict[str, tuple[int, int]] = {}
        self._newest: tuple[str, ...] = ()
        self._relays: dict[str, str] = {}

    async def locate(self) -> list[str]:
        # A read from a shared file system can take seconds and must not block the event loop.
        await asyncio.to_thread(self._refresh)
        shards = [one for address in self._newest for one in alternatives(address)]
        return [*shards, *self._relays.values()]

    def now(self, address: str) -> str:
        _, is_relay, site = address.partition(_RELAYS)
        if is_relay and site not in self._relays:
            raise TransportError(f"the relay of site {site!r} has not started yet")
        if is_relay:
            return self._relays[site]
        if address not in self._place:
            return address
        shard, index = self._place[address]
        return alternatives(self._newest[shard])[index]

    def _refresh(self) -> None:
        try:
            places = read_places(self._run)
            views = _views(self._run, places)
            self._relays = {
                path.name.removeprefix(RELAY): path.read_text().split()[-1]
                for path in (self._run / PLACES).glob(f"{RELAY}*")
            }
        except (
            DilocoError,
            OSError,
        ):  # the file system is briefly unavailable: keep the last addresses
            return
        self._newest = views[0]
        # Another process may send an address that a shard had before this process started. Current
        # addresses come last, because another shard may listen on a port that one has left.
        former = [(shard, place) for shard, of in enumerate(places) for place in of[:-1]]
        for shard, address in [*former, *(pair for view in views for pair in enumerate(view))]:
            for index, one in enumerate(alternatives(address)):
                self._place[one] = (shard, index)


def write_addresses(run: Path, addresses: Sequence[str]) -> None:
    """Write the addresses of the shards, in order. With port 0 no other record of them exists."""
    write_text(run / HOST, socket.gethostname() + "\n")
    write_text(run / ADDRESSES, "\n".join(addresses) + "\n")


def write_place(run: Path, process: str, address: str) -> None:
    """Record the new address of a shard or a relay, which others find through the run folder."""
    (run / PLACES).mkdir(exist_ok=True)
    path = run / PLACES / process
    before = path.read_text() if path.exists() else ""
    write_text(path, f"{before}{address}\n")


def read_places(run: Path) -> tuple[tuple[str, ...], ...]:
    """Return the addresses that each shard has had, the newest last; empty if none are recorded.

    The result ends before the first shard that has not been started yet.
    """
    found: list[tuple[str, ...]] = []
    while (path := run / PLACES / f"shard-{len(found)}").exists():
        found.append(tuple(path.read_text().split()))
    return tuple(found)


def recorded_end(run: Path) -> str:
    """Return a message that a run has ended, if its folder records that; otherwise empty.

    A run whose budget was raised since then has not ended: it continues when its syncer restarts.
    """
    try:
        document = CoordinatorStates(run).read()
        if document is None:
            return ""
        then, now = json.loads(document["settings"]), tomllib.loads((run / RUN_FILE).read_text())
        if document["state"]["phase"] != "finished" or _budget_of(then) != _budget_of(now):
            return ""
    except (OSError, *NOT_JSON):
        return ""
    return (
        f"the run in {run} has ended, and its weights are in that folder: for another run, start "
        "the syncer first; to continue this run, raise its budget and start the syncer with "
        "--resume"
    )


def _budget_of(settings: Mapping[str, Any]) -> tuple[Any, Any]:
    run = settings["run"]
    return run.get("max_steps"), run.get("max_tokens")


def read_addresses(run: Path) -> tuple[str, ...]:
    """Return the addresses of the shards of a run on this machine, as of its last start.

    Raises:
        ConfigError: The folder does not exist.
        StorageError: It is not a run folder, or the run was never started.
    """
    if not run.exists():
        raise ConfigError(
            f"{run} does not exist: use the folder of a run that was started on this machine, or "
            "http://HOST:PORT"
        )
    try:
        places = read_places(run)
        if places:
            return tuple(of_shard[-1] for of_shard in places)
        return tuple((run / ADDRESSES).read_text().split())
    except DilocoError:
        raise
    except (OSError, ValueError) as error:
        raise StorageError(
            f"{run} has no address of a syncer ({reason_of(error)}): use the folder of a run that "
            "was started on this machine, or http://HOST:PORT"
        ) from error


def reason_of(error: OSError | ValueError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "its content is invalid"
