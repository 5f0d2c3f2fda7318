"""Socket options of the data plane."""

from __future__ import annotations

import asyncio
import socket

BBR = "bbr"
NEAR_RTT_SECONDS = 0.002
"""Below this BBR is not asked for: its pacing costs more than it gains on loopback or a LAN."""


def ask_for_congestion(transport: asyncio.BaseTransport | None, wanted: str | None) -> str:
    """Ask the kernel for a congestion control and return the one in use.

    A kernel that does not offer it keeps its default; the caller reports what is in use.

    Args:
        transport: A connected TCP transport.
        wanted: Name such as `bbr`; None keeps the kernel's default.
    """
    sock = transport.get_extra_info("socket") if transport is not None else None
    option = getattr(socket, "TCP_CONGESTION", None)
    if sock is None or option is None:
        return ""
    try:
        current = _name(sock.getsockopt(socket.IPPROTO_TCP, option, 16))
    except OSError:
        return ""
    if wanted is None or current == wanted:
        return current
    try:
        sock.setsockopt(socket.IPPROTO_TCP, option, wanted.encode())
    except OSError:
        return current
    return wanted


def _name(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("ascii", "replace")
