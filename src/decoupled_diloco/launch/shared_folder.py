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
from pathlib import Path

from decoupled_diloco.config.addresses import (
    alternatives,
    on_this_machine,
    reached_by,
    url_of,
)
from decoupled_diloco.errors import Error
from decoupled_diloco.launch.folder import ADDRESSES, HOST, read_addresses, read_places
from decoupled_diloco.transport.base import Channel, Client, Stats, TransferStats

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
    return _as_they_are(run)


def finding(client: Client, run: Path) -> Client:
    """A client of a shard, which finds the others by the run folder if they note their places."""
    return FindingClient(client, run) if read_places(run) else client


def _as_they_are(run: Path) -> tuple[str, ...]:
    places = read_places(run)
    if places:
        return tuple(of_shard[-1] for of_shard in places)
    host, addresses = (run / HOST).read_text().strip(), read_addresses(run)
    if host == socket.gethostname():
        return tuple(map(on_this_machine, addresses))
    return tuple(reached_by(address, url_of(host, None)) for address in addresses)


class FindingClient:
    """A client that finds shards where the run folder says that they are by now.

    Args:
        client: What really dials. It must show the token to all that the folder names.
        run: The run folder.

    See `transport.base.Client` for the methods.
    """

    def __init__(self, client: Client, run: Path) -> None:
        self._client = client
        self._run = run
        self._place: dict[str, tuple[int, int]] = {}  # of each address that was ever told
        self._newest: tuple[str, ...] = ()

    @property
    def stats(self) -> Stats:
        return self._client.stats

    @property
    def certificate_ends_at(self) -> float | None:
        return self._client.certificate_ends_at

    def trust(self, address: str) -> None:
        self._client.trust(address)

    async def connect(self, address: str, role: str, principal: str) -> Channel:
        await asyncio.to_thread(self._look)  # a shared file system may take its time
        return await self._client.connect(self._now(address), role, principal)

    async def put(
        self,
        url: str,
        body: memoryview,
        *,
        base: str = "",
        first: int = 0,
        total: int | None = None,
    ) -> TransferStats:
        return await self._client.put(url, body, base=self._now(base), first=first, total=total)

    async def get(
        self, url: str, out: memoryview, *, base: str = "", first: int = 0, total: int | None = None
    ) -> TransferStats:
        return await self._client.get(url, out, base=self._now(base), first=first, total=total)

    async def close(self) -> None:
        await self._client.close()

    def _look(self) -> None:
        try:
            newest, places = _as_they_are(self._run), read_places(self._run)
        except (Error, OSError):  # the file system is away for a moment: as before
            return
        if newest == self._newest:
            return
        self._newest = newest
        # A shard may be told of at a place where it was before this process began. A port that one
        # shard has left may be another's by now.
        former = [(s, each) for s, of_shard in enumerate(places) for each in of_shard[:-1]]
        for shard, address in [*former, *enumerate(newest)]:
            for turn, one in enumerate(alternatives(address)):
                self._place[one] = (shard, turn)
                self._client.trust(one)

    def _now(self, address: str) -> str:
        if address not in self._place:
            return address
        shard, turn = self._place[address]
        return alternatives(self._newest[shard])[turn]
