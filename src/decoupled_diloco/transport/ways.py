"""How a request gets to a server: encrypted or not, directly or by a proxy.

The environment names proxies, as it does for other programs: ``http_proxy``, ``https_proxy`` and
``no_proxy``, in small or capital letters, as `urllib.request` reads them. ``no_proxy`` may also
name networks, as ``10.0.0.0/8``. This machine is never reached through a proxy.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import ssl
from typing import Any
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.transport.tokens import is_loopback


def way_to(
    target: URL, context: ssl.SSLContext | None, server_name: str | None = None
) -> dict[str, Any]:
    """Arguments of a request of aiohttp's.

    Args:
        context: Of encrypted connections; None: as the system trusts.
        server_name: What the server's certificate must name; default: the host.
    """
    way: dict[str, Any] = {}
    if target.scheme == "https":
        way = {"ssl": context or True, "server_hostname": server_name}
    proxy = proxy_for(target)
    if proxy is not None:
        way |= {"proxy": proxy.with_user(None), "proxy_headers": headers_for(proxy)}
    return way


def headers_for(proxy: URL) -> dict[str, str]:
    """What a proxy wants to know of who asks it."""
    if proxy.user is None:
        return {}
    told = f"{proxy.user}:{proxy.password or ''}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(told).decode()}"}


def proxy_for(target: URL) -> URL | None:
    """The proxy on the way to a server; ``None``: it is dialled directly.

    Raises:
        ConfigError: The environment names something else than ``http://HOST:PORT``.
    """
    host = target.host or ""
    direct = is_loopback(host) or host.lower() == socket.gethostname().lower()
    if direct or _is_exempt(host, target.port) or proxy_bypass(f"{host}:{target.port}"):
        return None
    named = getproxies().get(target.scheme)
    if not named:
        return None
    try:
        proxy = URL(named if "://" in named else f"http://{named}")
    except ValueError:
        proxy = URL()
    if proxy.scheme != "http" or not proxy.host:
        shown = proxy.with_user(None) if proxy.host else "it"  # without its password
        raise ConfigError(
            f"{target.scheme}_proxy: {shown} is no http://HOST:PORT: correct it in the "
            f"environment, or put {host} into no_proxy"
        )
    return proxy


def _is_exempt(host: str, port: int | None) -> bool:
    """Whether ``no_proxy`` names this host by its number or network, or by a name with a port."""
    named = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    host = host.strip("[]").lower().rstrip(".")
    for entry in (each.strip().lower() for each in named.split(",")):
        if entry == "*":
            return True
        network, colon, only = entry.rpartition(":")
        if colon and only.isdigit() and (":" not in network or network.endswith("]")):
            if int(only) != port:
                continue
            entry = network
        name = entry.strip("[]").removeprefix("*").removeprefix(".").rstrip(".")
        if not name:
            continue
        if host == name or host.endswith("." + name) or _is_within(host, name):
            return True
    return False


def _is_within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False
