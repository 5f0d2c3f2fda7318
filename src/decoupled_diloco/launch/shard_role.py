"""What the process of a shard does."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.addresses import on_this_machine
from decoupled_diloco.config.plugins import plugin_versions
from decoupled_diloco.launch.gc_pauses import Survivors
from decoupled_diloco.launch.processes import open_tape, process_of
from decoupled_diloco.launch.run_logger import RunLogger, until_logged
from decoupled_diloco.launch.secrets import (
    accepted_tokens,
    own_tls,
    served_tls,
    token_of_a_reader,
)
from decoupled_diloco.monitor.metric_table import INSTALL, METRICS_PATH
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.show.page.feed import Feed
from decoupled_diloco.show.page.site import Access, Site
from decoupled_diloco.storage.claims import CLAIMS, ClaimStore
from decoupled_diloco.storage.shared_folder import shards_that_move
from decoupled_diloco.syncer import checkpoint_requests
from decoupled_diloco.syncer.checkpoint_requests import CHECKPOINT_PATH
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.syncer.tapes import TapeDocuments
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.reader import SPARE, open_files_allowed
from decoupled_diloco.tape.records import versions
from decoupled_diloco.tape.samples import TookOver
from decoupled_diloco.tape.sources import TAPE_PATH
from decoupled_diloco.transport.documents import Document, NoSuchDocumentError
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Client, OnChannel, Server
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tls import LiveTls, TLSConfig
from decoupled_diloco.transport.tokens import Tokens, is_loopback
from decoupled_diloco.units import MIB

if TYPE_CHECKING:
    from decoupled_diloco.monitor.shard_metrics import ShardMetrics

logger = logging.getLogger(__name__)

CONNECTIONS_PER_LEARNER = 4
"""Control channels to coordinator and shard, and two for bodies."""

OpenTape = Callable[..., TapeWriter]
"""See `processes.open_tape`."""


def run_shard(
    config: RunConfig,
    shard: int,
    *,
    port: int,
    addresses: tuple[str, ...],
    folder: Path,
    token: str | None,
    standby: bool = False,
    linger: bool = False,
) -> None:
    """Serves one shard until the run is over, or SIGTERM or SIGINT.

    One that lingers stays when the run is over, until a signal: it says so at `/healthz`, and tells
    who comes late.

    Where the shard has a standby, this process waits for its turn before it listens.

    Raises:
        LeaseError: the other process acts for the shard now.
        Error: the port is taken, or state on disk cannot be read or written.
        KeyboardInterrupt: it was told to end.
    """
    tokens = accepted_tokens(config, token)
    own, served = own_tls(config, f"shard-{shard}"), served_tls(config)
    for files in (own, served):
        if files is not None:
            LiveTls(files)  # waits until they fit, before a lease could run out meanwhile
    warn_if_readable(config, token)
    asking = token_of_a_reader(config, token)
    limits = limits_here(config.run.learners)

    def server(on_channel: OnChannel) -> HttpServer:
        return HttpServer(
            host=config.syncer.host,
            port=port,
            tokens=tokens,
            on_channel=on_channel,
            health=lambda: role.acting.health(),
            about=lambda: role.acting.describe(),
            queries={
                TAPE_PATH: role.tape_documents(),
                CHECKPOINT_PATH: role.checkpoint_asked,
                METRICS_PATH: role.metrics,
            },
            pool_bytes=config.syncer.pool_mib * MIB,
            limits=limits,
            tls=served,
            website=website_of(role, tokens, asking, own),
        )

    wanted = shard == 0 and bool(config.run.trackers)
    role = ShardRole(
        config,
        shard,
        addresses=addresses,
        folder=folder,
        standby=standby,
        linger=linger,
        server=server,
        client=lambda: HttpClient(token=token, tls=own, locator=shards_that_move(folder)),
        open_tape=open_tape,
        logger=RunLogger(config.run.trackers, addresses, folder, asking, own) if wanted else None,
    )
    survivors = Survivors()
    survivors.begin()
    try:
        finished = asyncio.run(role.run())
    finally:
        survivors.end()
    if not finished:
        # Only the end of the run is a success: the supervisor starts this process again.
        raise KeyboardInterrupt


@dataclass
class ShardRole:
    """One process of a shard, on this machine or on a virtual one."""

    config: RunConfig
    shard: int
    addresses: tuple[str, ...]
    folder: Path
    standby: bool  # whether another process is meant to be first
    server: Callable[[OnChannel], Server]
    client: Callable[[], Client]
    open_tape: OpenTape
    linger: bool = False  # whether it serves on when the run is over
    logger: RunLogger | None = None  # what it starts to log the run
    process: Shard | None = None  # the shard, once it is this process's turn
    shard_lease: ShardLease | NoStandby = NO_STANDBY
    _tapes: list[TapeWriter] = field(default_factory=list)
    _metrics: ShardMetrics | None = None  # from the first scrape on

    @property
    def name(self) -> str:
        return process_of(self.shard, standby=self.standby)

    @property
    def acting(self) -> Shard:
        """The shard, which serves."""
        assert self.process is not None, "it listens only once it acts for its shard"
        return self.process

    @property
    def _files(self) -> dict[str, str]:
        """Two processes that act for one shard in turns have a tape each."""
        files = {f"shard-{self.shard}": self.name}
        if self.shard == 0:
            files["coordinator"] = "coordinator" + self.name.removeprefix("shard-0")
        return files

    async def run(self) -> bool:
        """Serves; returns whether the run is over."""
        try:
            return await (self._take_turn() if self.config.syncer.standby else self._serve())
        finally:
            for tape in self._tapes:
                tape.close()

    async def _take_turn(self) -> bool:
        """Waits for the shard's claim and serves by it."""
        name, lease_seconds = self.name, self.config.syncer.lease_seconds
        folder = self.folder / CLAIMS / f"shard-{self.shard}"
        store = ClaimStore(folder, runtime().unique_id(), lease_seconds, name)
        facts = {"machine": "lease", "waits": self.standby}
        told = {"nonce": store.nonce, "lease_seconds": store.lease_seconds}
        tape = self.open_tape(self.folder, f"{name}.claims", {**facts, **told})
        shard_lease = self.shard_lease = ShardLease(store, tape, waits=self.standby)
        finished = False
        _when_told_to_end(shard_lease.give_up)
        logger.info("%s waits for its claim in %s", name, store.folder)
        try:
            if await shard_lease.gained():
                finished = await self._serve()
            else:
                finished = shard_lease.run_over
        finally:
            await shard_lease.end(finished=finished)
        return finished

    async def _serve(self) -> bool:
        tape = self._begin_tape(
            f"shard-{self.shard}",
            {
                "machine": "shard",
                "shard": self.shard,
                "settings": self.config.public(),
                "versions": versions(),
                "plugins": plugin_versions(),
            },
        )
        shard_lease = self.shard_lease
        if isinstance(shard_lease, ShardLease):
            taken = TookOver(self.name, self.shard, shard_lease.number, shard_lease.waited_seconds)
            tape.sample(now(), taken)
        process = self.process = Shard(
            self.config,
            self.shard,
            addresses=self.addresses,
            folder=self.folder,
            server=self.server,
            client=self.client(),
            tape=tape,
            coordinator_tape=partial(self._begin_tape, "coordinator") if self.shard == 0 else None,
            shard_lease=shard_lease,
            linger=self.linger,
            last=self._until_logged if self.config.run.trackers else None,
        )
        _when_told_to_end(process.stop)
        if self.logger is None:
            await process.run()
        else:
            try:
                await process.run(self.logger.start)
            finally:
                await self.logger.stop()
        return process.finished

    async def _until_logged(self) -> None:
        """The shards serve their tapes until the logger has read them to the end."""
        if self.logger is not None:
            await self.logger.ended()
        elif not self.linger:
            await until_logged(self.addresses[0])

    def _begin_tape(self, who: str, header: Mapping[str, Any]) -> TapeWriter:
        self._tapes.append(self.open_tape(self.folder, who, header, file=self._files[who]))
        return self._tapes[-1]

    def tape_documents(self) -> TapeDocuments:
        """What gives readers elsewhere this process's tapes."""
        paths = {who: self.folder / "tape" / f"{file}.jsonl" for who, file in self._files.items()}
        return TapeDocuments(self.config.run.name, self.shard, self.addresses, paths)

    async def metrics(self, query: Mapping[str, str]) -> Document:
        """Answers a scrape."""
        try:
            from decoupled_diloco.monitor.shard_metrics import ShardMetrics
        except ImportError:
            raise NoSuchDocumentError(f"metrics need prometheus-client: {INSTALL}") from None
        if self._metrics is None:
            self._metrics = ShardMetrics(self.acting.watched())
        return await self._metrics(query)

    async def checkpoint_asked(self, query: Mapping[str, str]) -> Document:
        """Answers a request for a checkpoint of the run, or about one."""
        return checkpoint_requests.answer(self.acting.host, query)


def warn_if_readable(config: RunConfig, token: str | None) -> None:
    """Tells that a token that goes over a network in plain text can be read on the way."""
    syncer = config.syncer
    has_token = token is not None or syncer.principals_file is not None
    encrypted = config.tls.serves or any(each.startswith("https://") for each in syncer.addresses)
    if has_token and not encrypted and not is_loopback(syncer.host):
        logger.warning(
            "host=%r serves plain HTTP: whoever is on the way can read tokens and what is trained: "
            "set [tls] (ddiloco certs), or use a VPN or a tunnel",
            syncer.host,
        )


def website_of(role: ShardRole, tokens: Tokens, token: str | None, own: TLSConfig | None) -> Site:
    """The page of the run; its process reads the other shards' tapes with ``token``."""
    syncer = role.config.syncer
    told = {
        "folder": str(role.folder.absolute()),
        "tapes": [
            [process_of(shard, standby=standby) for standby in (False, True)]
            for shard in range(syncer.shards)
        ],
        "shards": list(map(on_this_machine, role.addresses)),
        "token": token,
        "tls": None if own is None else [each and str(each) for each in astuple(own)],
    }
    feed = Feed(told) if role.shard == 0 else None

    def ending() -> dict[str, object]:
        how = "finished" if role.acting.finished else "stopped"
        return {"how": how, "step": role.acting.health()["clock"], "folder": str(role.folder)}

    return Site(Access(tokens), feed, role.addresses[0], ending)


def _when_told_to_end(end: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)


def limits_here(learners: int) -> Limits:
    """A server's limits, with as many connections as this system lets a process have."""
    limits = Limits()
    # All learners may dial at once, and none of them has shown anything at first.
    limits = replace(limits, strangers=limits.strangers + CONNECTIONS_PER_LEARNER * learners)
    allowed = open_files_allowed(limits.connections)
    if allowed is None:
        return limits
    connections = max(1, allowed - SPARE)
    if connections < CONNECTIONS_PER_LEARNER * learners:
        logger.warning(
            "this system allows a process %d open files: too few for the connections of %d "
            "learners, %d each: raise the limit with `ulimit -Hn`",
            allowed,
            learners,
            CONNECTIONS_PER_LEARNER,
        )
    return replace(
        limits, connections=connections, strangers=min(limits.strangers, max(1, connections // 2))
    )
