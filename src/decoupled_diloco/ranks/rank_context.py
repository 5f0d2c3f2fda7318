"""The backend of a rank: the other ranks, and connections to them and to the syncer.

The ranks of a real learner use `RankSurroundings`. Simulated ranks override parts of it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from decoupled_diloco.learner.sharded_state import ShardedState
from decoupled_diloco.ranks.group import Collectives, RankGroup
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Client, OnChannel, Server
from decoupled_diloco.transport.tls import TLSConfig
from decoupled_diloco.transport.tokens import Tokens, is_loopback


class RankState(Protocol):
    """Saves and restores the ranks' state; see `ShardedState`."""

    def save(self, folder: Path) -> Future[Any]: ...

    def load(self, folder: Path, ranks: int) -> None: ...


class RankSurroundings:
    """The backend of a real rank: torch.distributed and HTTP.

    Attributes:
        group: The ranks of this learner.

    Raises:
        ConfigError, TransportError: See `RankGroup`.
    """

    group: Collectives

    def __init__(self) -> None:
        self._ranks = self.group = RankGroup()

    def sharded_state(self, module: nn.Module, stateful: Mapping[str, Any]) -> RankState:
        """Return the object that saves and restores this rank's part of checkpoints."""
        return ShardedState(module, stateful, self._ranks.checkpoints)

    def host(self) -> str:
        """Return an id that is equal for ranks that reach each other over loopback.

        On Linux it identifies the running kernel and the network namespace. The host name is only
        used elsewhere, because machines with the same image may have the same name.
        """
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
        except OSError:  # not Linux
            return socket.gethostname()

    def client(
        self,
        principal: str,
        token: str | None,
        trusted: Sequence[str] = (),
        tls: TLSConfig | None = None,
        *,
        within: bool = False,
    ) -> Client:
        """Return a sync rank's client.

        Args:
            principal: The name under which it connects.
            token: The auth token, or the key of rank 0's server.
            trusted: Addresses that may receive the token.
            tls: Certificates; ``None``: no TLS.
            within: The client connects to rank 0 of this learner and not to the syncer. It then
                logs no warning about a plain connection: collectives are not encrypted either.
        """
        return HttpClient(
            token=token, trusted=trusted, principal=principal, tls=tls, told_plain=within
        )

    def server(self, hosts: Sequence[str], key: str, on_channel: OnChannel) -> Server:
        """Return rank 0's server for the other sync ranks, which need the key."""
        # Any network may reach it if there are several hosts: the key protects it.
        host = "127.0.0.1" if len(set(hosts)) == 1 else "0.0.0.0"
        return HttpServer(host=host, tokens=Tokens(run_token=key), on_channel=on_channel)

    def addresses(self, server: Server) -> list[str]:
        """Return the possible addresses of a started server, for the other sync ranks."""
        host, port = server.address.removeprefix("http://").rsplit(":", 1)
        names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
        names = [host] if is_loopback(host) else [*filter(None, names)]
        return [f"http://{name}:{port}" for name in dict.fromkeys(names)]
