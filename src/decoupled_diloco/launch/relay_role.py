"""Run the process of a relay."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from decoupled_diloco.config import RunConfig
from decoupled_diloco.launch.processes import open_tape, relay_process
from decoupled_diloco.launch.secrets import accepted_tokens, served_tls
from decoupled_diloco.launch.shard_role import OpenTape, limits_here
from decoupled_diloco.learner.launched import client_in_run
from decoupled_diloco.relay.relay_process import RelayProcess
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Client, OnChannel, Server
from decoupled_diloco.transport.tls import TLSConfig
from decoupled_diloco.units import MIB

RELAYS = "relays"
"""Subfolder of a run folder with a folder for each relay."""


def run_relay(
    config: RunConfig,
    name: str,
    *,
    port: int,
    upstream: tuple[str, ...],
    folder: Path,
    token: str | None,
    shared: Path | None = None,
    tls: TLSConfig | None = None,
) -> None:
    """Serve as a relay until the run is over, or a SIGTERM or SIGINT arrives.

    Args:
        config: The run's settings.
        name: The name of the relay.
        port: The port to listen on.
        upstream: Addresses of shards or of other relays, in the order in which they are tried.
        folder: The run folder on this machine.
        token: The auth token.
        shared: The shards' run folder, if their addresses are read there whenever they are dialed.
        tls: CA and certificate. With a certificate, the relay also serves with it.

    Raises:
        DilocoError: The port is taken, or a shard rejects the relay.
        KeyboardInterrupt: The process received a signal.
    """
    tokens = accepted_tokens(config, token)

    def server(on_channel: OnChannel) -> HttpServer:
        return HttpServer(
            host=config.syncer.host,
            port=port,
            tokens=tokens,
            on_channel=on_channel,
            health=lambda: role.health(),
            pool_bytes=config.syncer.pool_mib * MIB,
            limits=limits_here(config.run.learners),
            tls=served_tls(config, tls),
        )

    role = RelayRole(
        config,
        name,
        upstream=upstream,
        folder=folder,
        server=server,
        client=lambda name: client_in_run(name, token, tls, folder=folder, shared=shared),
        open_tape=open_tape,
    )
    if not asyncio.run(role.run()):
        raise KeyboardInterrupt


@dataclass
class RelayRole:
    """One process of a relay, on a real or virtual machine.

    Attributes:
        config: The run's settings.
        name: The name of the relay.
        upstream: Addresses of shards or of other relays, in the order in which they are tried.
        folder: The run folder of this process.
        server: Creates the server.
        client: Creates a client that acts as this principal.
        open_tape: Opens an event tape; see `processes.open_tape`.
        process: The relay, once it runs.
    """

    config: RunConfig
    name: str
    upstream: tuple[str, ...]
    folder: Path
    server: Callable[[OnChannel], Server]
    client: Callable[[str], Client]
    open_tape: OpenTape
    process: RelayProcess | None = field(default=None)

    async def run(self) -> bool:
        """Serve until the run is over or a signal arrives, and return whether it is over."""
        header = {"machine": "relay", "relay": self.name, "settings": self.config.public()}
        tape = self.open_tape(self.folder, relay_process(self.name), header)
        process = self.process = RelayProcess(
            self.name,
            self.upstream,
            server=self.server,
            client=self.client,
            run=self.config.run.name,
            learners=next((s.learners for s in self.config.sites if s.name == self.name), ()),
            tape=tape,
            folder=self.folder / RELAYS / self.name,
            cache_bytes=self.config.syncer.pool_mib * MIB,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, process.stop)
        try:
            await process.run()
        finally:
            tape.close()
        return process.finished

    def health(self) -> dict[str, object]:
        """Return the answer at `/healthz`."""
        return {} if self.process is None else self.process.health()
