"""A run whose processes share its folder, on machines that nobody knows beforehand.

The syncer writes down where it listens, or each of its shards does. The others read it there, and
again whenever they dial: a queue may start the syncer anew on another machine, and training goes on
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from decoupled_diloco.config.addresses import (
    alternatives,
    on_this_machine,
    reached_by,
    url_of,
)
from decoupled_diloco.errors import Error
from decoupled_diloco.launch.folder import ADDRESSES, HOST, read_addresses, read_places

logger = logging.getLogger(__name__)

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
