"""Ports that shards are to listen on."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

from decoupled_diloco.config.addresses import url_of
from decoupled_diloco.errors import TransportError

ANY = "Choose other ports with --set syncer.port=…, or any free ones with syncer.port=0"


def free_ports(host: str, wanted: Sequence[int], choose: str = ANY) -> list[int]:
    """The same ports; in the place of 0, one that is free.

    Args:
        host: Where to listen.
        wanted: The ports.
        choose: How to choose other ones, in words.

    Raises:
        TransportError: one is taken, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        ports = []
        for port in wanted:
            each = stack.enter_context(socket.socket(family))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                each.bind((host, port))
                each.listen()
            except OSError as error:
                where = url_of(host, port).removeprefix("http://")
                raise TransportError(
                    f"a shard cannot listen on {where}: {error.strerror}: {_way_out(error, choose)}"
                ) from error
            ports.append(each.getsockname()[1])
        return ports


def _way_out(error: OSError, choose: str) -> str:
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return f"is another run still there? {choose}"
    return "set syncer.host to an address of this machine, or 0.0.0.0 for all of them"
