"""Run the process of a shard."""

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
from decoupled_diloco.config.signing_keys import SigningKey
from decoupled_diloco.launch.gc_pauses import Survivors
from decoupled_diloco.launch.processes import (
    MIRROR,
    MIRROR_INTERRUPTED_SECONDS,
    MIRROR_SECONDS,
    claims_of,
    open_tape,
    process_of,
)
from decoupled_diloco.launch.run_logger import (
    LOOK_SECONDS,
    Companion,
    run_logger,
    run_mirror,
    until_logged,
)
from decoupled_diloco.launch.run_mirror import copy_newest_state, shards_in
from decoupled_diloco.launch.secrets import (
    accepted_tokens,
    own_tls,
    served_tls,
    signing_key_of,
    token_of_a_reader,
)
from decoupled_diloco.monitor.metric_table import INSTALL, METRICS_PATH
from decoupled_diloco.runtime import now, runtime
from decoupled_diloco.show.page.feed import Feed
from decoupled_diloco.show.page.site import Access, Site
from decoupled_diloco.storage.files import SPARE, open_files_allowed
from decoupled_diloco.storage.shared_folder import shards_that_move
from decoupled_diloco.syncer.coordinator_requests import (
    CHECKPOINT_PATH,
    STOP_PATH,
    answer_checkpoint,
    answer_stop,
)
from decoupled_diloco.syncer.durable import DURABLE
from decoupled_diloco.syncer.shard import Shard
from decoupled_diloco.syncer.shard_lease import NO_STANDBY, NoStandby, ShardLease
from decoupled_diloco.syncer.tapes import TapeDocuments
from decoupled_diloco.tape import TapeWriter
from decoupled_diloco.tape.records import versions
from decoupled_diloco.tape.restricted import RestrictedTape
from decoupled_diloco.tape.samples import TookOver
from decoupled_diloco.tape.sources import TAPE_PATH
from decoupled_diloco.transport.documents import Document, NoSuchDocumentError
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Client, OnChannel, Server
from decoupled_diloco.transport.limits import Limits
from decoupled_diloco.transport.tls import LiveTls, TLSConfig
from decoupled_diloco.transport.tokens import RequestRefusal, Tokens, is_loopback
from decoupled_diloco.units import MIB

if TYPE_CHECKING:
    from decoupled_diloco.monitor.shard_metrics import ShardMetrics

logger = logging.getLogger(__name__)

CONNECTIONS_PER_LEARNER = 4
"""Connections of one learner: control channels to coordinator and shard, and two for payloads."""

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
    """Serve one shard until the run ends or a SIGTERM or SIGINT arrives.

    If the shard has a standby, this process waits for the shard's lease before it listens.

    Args:
        config: The run's settings.
        shard: The number of the shard.
        port: The port to listen on.
        addresses: The addresses of all shards, as other machines dial them.
        folder: The run folder.
        token: The run's auth token, if one token is for the whole run.
        standby: Whether this process is the standby.
        linger: Continue to serve after the end of the run until a signal arrives. `/healthz`
            reports the end, and so do responses to late learners.

    Raises:
        LeaseError: The shard's other process has taken over its lease.
        ConfigError: The limit of `[privacy.dp]` is wrong, or cannot be computed here.
        DilocoError: The port is taken, or state on disk cannot be read or written.
        KeyboardInterrupt: The process received a signal before the end of the run.
    """
    if config.privacy.dp is not None:
        # The shard enforces the limit, so it must not take it on trust.
        config.privacy.dp.verify(discrete=config.privacy.secure_sums)
    tokens = accepted_tokens(config, token)
    signing_key = signing_key_of(config, shard, folder)
    own, served = own_tls(config, f"shard-{shard}"), served_tls(config)
    for files in (own, served):
        if files is not None:
            # Wait for a matching pair now: after the lease is taken, it could expire meanwhile.
            LiveTls(files)
    warn_if_readable(config, token)
    reader_token = token_of_a_reader(config, token)
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
            orders={STOP_PATH: role.stop_wanted},
            pool_bytes=config.syncer.pool_mib * MIB,
            limits=limits,
            tls=served,
            website=website_of(role, tokens, reader_token, own),
            restrict=role.restricted,
        )

    logger_of_run = mirror = None
    if shard == 0 and config.run.trackers:
        logger_of_run = run_logger(config.run.trackers, addresses, folder, reader_token, own)
    if config.run.store:
        mirror = run_mirror(folder)
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
        logger=logger_of_run,
        mirror=mirror,
        signing_key=signing_key,
    )
    survivors = Survivors()
    survivors.begin()
    try:
        finished = asyncio.run(role.run())
    finally:
        survivors.end()
    if not finished:
        # Only the end of the run is a success: after any other end the supervisor restarts it.
        raise KeyboardInterrupt


@dataclass
class ShardRole:
    """One process of a shard, on a real or virtual machine.

    Attributes:
        config: The run's settings.
        shard: The number of the shard.
        addresses: The addresses of all shards, as other machines dial them.
        folder: The run folder.
        standby: Whether this process is the standby.
        server: Creates the server.
        client: Creates the client of other shards.
        open_tape: Opens an event tape; see `processes.open_tape`.
        linger: Whether to serve after the end of the run.
        logger: Logs the run to trackers; only in shard 0 of a run without a launcher.
        mirror: Mirrors the run folder to an object store; only without a launcher, too. It runs if
            this shard is the first one in the folder.
        signing_key: Signs the shard's audit trail; `None`: it writes none.
        process: The shard, once this process acts for it.
        shard_lease: The shard's lease, if it has a standby.
    """

    config: RunConfig
    shard: int
    addresses: tuple[str, ...]
    folder: Path
    standby: bool
    server: Callable[[OnChannel], Server]
    client: Callable[[], Client]
    open_tape: OpenTape
    linger: bool = False
    logger: Companion | None = None
    mirror: Companion | None = None
    signing_key: SigningKey | None = None
    process: Shard | None = None
    shard_lease: ShardLease | NoStandby = NO_STANDBY
    _tapes: list[TapeWriter] = field(default_factory=list)
    _metrics: ShardMetrics | None = None  # created by the first scrape
    _views: dict[str, RestrictedTape] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return process_of(self.shard, standby=self.standby)

    @property
    def acting(self) -> Shard:
        """The shard; only valid while this process acts for it."""
        assert self.process is not None, "the server starts only when the process acts for a shard"
        return self.process

    @property
    def _files(self) -> dict[str, str]:
        """Tape file names; a shard's process and its standby write separate tapes."""
        files = {f"shard-{self.shard}": self.name}
        if self.shard == 0:
            files["coordinator"] = "coordinator" + self.name.removeprefix("shard-0")
        return files

    async def run(self) -> bool:
        """Serve, and return whether the run has ended."""
        try:
            return await (self._serve_with_lease() if self.config.syncer.standby else self._serve())
        finally:
            for tape in self._tapes:
                tape.close()

    async def _serve_with_lease(self) -> bool:
        """Wait for the shard's lease, and serve while this process holds it."""
        name, nonce = self.name, runtime().unique_id()
        store = claims_of(self.config, self.folder, self.shard, nonce, name)
        header = {
            "machine": "lease",
            "waits": self.standby,
            "nonce": store.nonce,
            "lease_seconds": store.lease_seconds,
        }
        tape = self.open_tape(self.folder, f"{name}.claims", header)
        shard_lease = self.shard_lease = ShardLease(store, tape, waits=self.standby)
        finished = False
        _on_stop_signal(shard_lease.give_up)
        logger.info("%s waits for its lease in %s", name, store.place)
        try:
            if await shard_lease.gained():
                if self.config.run.store and self.config.syncer.lease_store:
                    await asyncio.to_thread(copy_newest_state, self.config, self.folder)
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
                "sites": {s.name: s.learner_ids for s in self.config.sites},
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
            signing_key=self.signing_key,
        )
        _on_stop_signal(process.stop)

        starting: list[asyncio.Task[None]] = []

        def start() -> None:
            if self.logger is not None:
                self.logger.start()
            if self.mirror is not None:
                starting.append(asyncio.create_task(self._start_mirror(self.mirror)))

        try:
            await process.run(start)
        finally:
            over = process.finished
            for each in starting:
                each.cancel()
            if self.logger is not None:
                await self.logger.stop()
            if self.mirror is not None:
                await self.mirror.stop(MIRROR_SECONDS if over else MIRROR_INTERRUPTED_SECONDS)
        return process.finished

    async def _start_mirror(self, mirror: Companion) -> None:
        """Start the mirror of the run folder, unless another shard's process there does so."""
        # When a shard has weights, all shards have opened their tapes, also those in this folder.
        while self.shard and not any(  # noqa: ASYNC110
            self.folder.glob(f"{DURABLE}/shard-{self.shard}/*.safetensors")
        ):
            await asyncio.sleep(LOOK_SECONDS)
        if self.shard in shards_in(self.folder)[:1]:
            mirror.start()

    async def _until_logged(self) -> None:
        """Wait until the logger has read the tapes to the end: shards serve them until then."""
        if self.logger is not None:
            await self.logger.ended()
        elif not self.linger:
            await until_logged(self.addresses[0])

    def _begin_tape(self, process: str, header: Mapping[str, Any]) -> TapeWriter:
        self._tapes.append(self.open_tape(self.folder, process, header, file=self._files[process]))
        return self._tapes[-1]

    def tape_documents(self) -> TapeDocuments:
        """Return the handler of requests for this process's tapes."""
        files = self._files
        if self.shard == 0:
            files[MIRROR] = MIRROR  # another process writes it, if the run has a store
        paths = {name: self.folder / "tape" / f"{file}.jsonl" for name, file in files.items()}
        return TapeDocuments(self.config.run.name, self.shard, self.addresses, paths)

    async def metrics(self, query: Mapping[str, str]) -> Document:
        """Answer a scrape.

        Raises:
            NoSuchDocumentError: prometheus-client is not installed.
        """
        try:
            from decoupled_diloco.monitor.shard_metrics import ShardMetrics
        except ImportError:
            raise NoSuchDocumentError(f"metrics need prometheus-client: {INSTALL}") from None
        if self._metrics is None:
            self._metrics = ShardMetrics(self.acting.watched())
        return await self._metrics(query)

    def restricted(self, names: tuple[str, ...], path: str, document: Document) -> Document:
        """Return what a peer may see of an answer; see `transport.documents.Restrict`."""
        parties = self.config.privacy.agreed
        party = None if parties is None else parties.viewer(names)
        if party is None:
            return document
        if path != TAPE_PATH:
            raise RequestRefusal(
                403,
                f"party {party.name!r} sees its own learners only, and {path} shows all of them: "
                'use ddiloco status, or agree on sees = "all" in parties.toml',
            )
        if "next" not in document.facts:
            return document  # the list of the tapes
        known = self._views.setdefault(
            party.name, RestrictedTape(party.has, self.config.learner_ids)
        )
        # break: other-lanes-sent
        return replace(document, body=known.lines(document.body))

    async def checkpoint_asked(self, query: Mapping[str, str]) -> Document:
        """Answer a request to create a checkpoint of the run, or for its state."""
        return answer_checkpoint(self.acting.host, query)

    async def stop_wanted(self, names: tuple[str, ...]) -> Document:
        """End the run in order, if the peer with these names may."""
        return answer_stop(self.acting.host, names, self.config.privacy.agreed)


def warn_if_readable(config: RunConfig, token: str | None) -> None:
    """Log a warning if tokens are sent over a network without encryption."""
    syncer = config.syncer
    has_token = token is not None or syncer.principals_file is not None
    encrypted = config.tls.serves or any(each.startswith("https://") for each in syncer.addresses)
    if has_token and not encrypted and not is_loopback(syncer.host):
        logger.warning(
            "host=%r serves plain HTTP: others on the network can read tokens and weights: "
            "set [tls] (ddiloco certs), or use a VPN or a tunnel",
            syncer.host,
        )


def website_of(role: ShardRole, tokens: Tokens, token: str | None, own: TLSConfig | None) -> Site:
    """Return the live page of the run; its process reads the other shards' tapes with ``token``."""
    syncer = role.config.syncer
    arguments = {
        "folder": str(role.folder.absolute()),
        "tapes": [
            [process_of(shard, standby=standby) for standby in (False, True)]
            for shard in range(syncer.shards)
        ],
        "shards": list(map(on_this_machine, role.addresses)),
        "token": token,
        "tls": None if own is None else [each and str(each) for each in astuple(own)],
    }
    parties, learners = role.config.privacy.agreed, role.config.learner_ids

    def feed_of(names: tuple[str, ...]) -> Feed:
        """Return the feed of a viewer; each party that sees its own learners only has another."""
        party = None if parties is None else parties.viewer(names)
        name = "" if party is None else party.name
        if name not in feeds:
            own = None if party is None else {"own": party.learners, "learners": learners}
            feeds[name] = Feed({**arguments, "party": own})
        return feeds[name]

    feeds: dict[str, Feed] = {}

    def ending() -> dict[str, object]:
        how = "finished" if role.acting.finished else "stopped"
        return {"how": how, "step": role.acting.health()["clock"], "folder": str(role.folder)}

    return Site(Access(tokens), feed_of if role.shard == 0 else None, role.addresses[0], ending)


def _on_stop_signal(end: Callable[[], None]) -> None:
    """Call a function on SIGTERM and SIGINT, instead of an earlier one."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)


def limits_here(learners: int) -> Limits:
    """Return a server's limits, with the connections that this system allows a process."""
    limits = Limits()
    # All learners may dial at once, and a new connection is unauthenticated at first.
    limits = replace(limits, strangers=limits.strangers + CONNECTIONS_PER_LEARNER * learners)
    allowed = open_files_allowed(limits.connections)
    if allowed is None:
        return limits
    connections = max(1, allowed - SPARE)
    if connections < CONNECTIONS_PER_LEARNER * learners:
        logger.warning(
            "the limit of %d open files is too low for %d learners with %d connections each: "
            "raise it with `ulimit -Hn`",
            allowed,
            learners,
            CONNECTIONS_PER_LEARNER,
        )
    return replace(
        limits, connections=connections, strangers=min(limits.strangers, max(1, connections // 2))
    )
