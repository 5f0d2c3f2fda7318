"""What a rank asks of its surroundings: the other ranks, and how it reaches them and the syncer.

The ranks of a real learner have `RankSurroundings`; virtual ones override what they replace.
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
    """What checkpoints of the ranks are made of: see `ShardedState`."""

    def save(self, folder: Path) -> Future[Any]: ...

    def load(self, folder: Path, ranks: int) -> None: ...


class RankSurroundings:
    """A real rank's: torch.distributed and HTTP.

    Attributes:
        group: The ranks of this learner.

    Raises:
        ConfigError, TransportError: See `RankGroup`.
    """

    group: Collectives

    def __init__(self) -> None:
        self._ranks = self.group = RankGroup()

    def sharded_state(self, module: nn.Module, stateful: Mapping[str, Any]) -> RankState:
        """What checkpoints are made of."""
        return ShardedState(module, stateful, self._ranks.checkpoints)

    def host(self) -> str:
        """What ranks have in common that reach one another by loopback: kernel and network.

        Not a name, where Linux tells better: machines of one image may all be called the same.
        """
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
        except OSError:  # no Linux
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
        """A carrier's, to the syncer, or within the learner to rank 0: as plain as collectives."""
        return HttpClient(
            token=token, trusted=trusted, principal=principal, tls=tls, told_plain=within
        )

    def server(self, hosts: Sequence[str], key: str, on_channel: OnChannel) -> Server:
        """Rank 0's, for the other carriers; the key opens it."""
        host = "127.0.0.1" if len(set(hosts)) == 1 else "0.0.0.0"  # it has a key
        return HttpServer(host=host, tokens=Tokens(run_token=key), on_channel=on_channel)

    def addresses(self, server: Server) -> list[str]:
        """Where the other carriers may find it, once it has started."""
        host, port = server.address.removeprefix("http://").rsplit(":", 1)
        names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
        names = [host] if is_loopback(host) else [*filter(None, names)]
        return [f"http://{name}:{port}" for name in dict.fromkeys(names)]
