"""Routing of requests to a server: encrypted or not, directly or through a proxy.

Proxies come from the usual environment variables, as `urllib.request` reads them: ``http_proxy``,
``https_proxy`` and ``no_proxy``, in lowercase or uppercase. ``no_proxy`` may also list networks, as
``10.0.0.0/8``. This machine is never reached through a proxy.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.transport.tokens import is_loopback


def way_to(
    target: URL, headers: Mapping[str, str], context: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """Return the keyword arguments of an aiohttp request that select the route.

    Args:
        headers: Headers of the request itself.
        context: TLS context for encrypted connections; None trusts the system's CAs.
    """
    way: dict[str, Any] = {"headers": dict(headers)}
    if target.scheme == "https":
        way["ssl"] = context or True
    proxy = proxy_for(target)
    if proxy is not None:
        way["proxy"] = proxy.with_user(None)
        # aiohttp sends `proxy_headers` only to open a tunnel. In plain text, the proxy reads the
        # headers of each request instead.
        if target.scheme == "https":
            way["proxy_headers"] = headers_for(proxy)
        else:
            way["headers"] |= headers_for(proxy)
    return way


def headers_for(proxy: URL) -> dict[str, str]:
    """Return the headers that authenticate this client to a proxy."""
    if proxy.user is None:
        return {}
    credentials = f"{proxy.user}:{proxy.password or ''}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(credentials).decode()}"}


def proxy_for(target: URL) -> URL | None:
    """Return the proxy for a server, or ``None`` to dial it directly.

    Raises:
        ConfigError: The environment variable is not of the form ``http://HOST:PORT``.
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
        shown = proxy.with_user(None) if proxy.host else "its value"  # without the password
        raise ConfigError(
            f"{target.scheme}_proxy: {shown} is not of the form http://HOST:PORT: correct it in "
            f"the environment, or add {host} to no_proxy"
        )
    return proxy


def _is_exempt(host: str, port: int | None) -> bool:
    """Whether ``no_proxy`` lists this host by address or network, or by name with a port."""
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
