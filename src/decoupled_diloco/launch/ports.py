"""Ports for shards to listen on."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

from decoupled_diloco.config.addresses import url_of
from decoupled_diloco.errors import TransportError

ANY = "Choose other ports with --set syncer.port=…, or any free ones with syncer.port=0"


def free_ports(host: str, wanted: Sequence[int], choose: str = ANY) -> list[int]:
    """Return the wanted ports, with a free port instead of each 0.

    Args:
        host: The address to listen on.
        wanted: The ports.
        choose: The end of an error message: how to choose other ports.

    Raises:
        TransportError: A port is taken, or the host is not an address of this machine.
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
                    f"cannot listen on {where}: {error.strerror}: {_fix(error, choose)}"
                ) from error
            ports.append(each.getsockname()[1])
        return ports


def _fix(error: OSError, choose: str) -> str:
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        return f"is another run still running? {choose}"
    return "set syncer.host to an address of this machine, or 0.0.0.0 for all of them"
