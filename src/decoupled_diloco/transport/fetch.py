"""Fetch a small document from a server, for commands and readers that have no event loop."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
from collections.abc import Mapping
from typing import Any, Literal

from yarl import URL

from decoupled_diloco.errors import ConfigError, DilocoError, ProtocolError, TransportError
from decoupled_diloco.transport.documents import FACT_PREFIX, Document
from decoupled_diloco.transport.routing import way_to
from decoupled_diloco.transport.tls import TLSConfig, require_used
from decoupled_diloco.transport.tokens import is_secret, refusal_error

ANSWER_SECONDS = 10.0
"""Time that a server may take to answer, equal to the allowed silence of a control connection."""

ANSWER_BYTES_MAX = 64 << 20
"""Largest answer that is read; larger than any legitimate answer."""


def fetch(
    address: str,
    path: str,
    query: Mapping[str, str],
    token: str | None,
    tls: TLSConfig | None = None,
    *,
    method: Literal["GET", "POST"] = "GET",
) -> Document:
    """Fetch a document from a server: one attempt, on a separate connection.

    POST gives the server an order.

    Raises:
        ConfigError: The address or the token is not valid, or a file of ``tls`` cannot be used.
        AccessError: The server rejects the token, or one side rejects the other's certificate.
        ProtocolError: The document does not exist.
        TransportError: The server does not answer.
    """
    require_used(tls, address)
    url = _server_of(address)
    if token is not None and not is_secret(token):  # the secret itself is not repeated
        raise ConfigError("the token has invalid characters: check --auth-token-file")
    where = url.with_path(path).with_query(dict(query))
    return asyncio.run(_fetch(method, address, where, token, tls))


async def _fetch(
    method: str, address: str, url: URL, token: str | None, tls: TLSConfig | None
) -> Document:
    # A late import: it takes a third of a second, and many commands only read files.
    import aiohttp

    from decoupled_diloco.transport import http_client

    context = None if tls is None else tls.new_context()
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    limits = aiohttp.ClientTimeout(sock_connect=ANSWER_SECONDS, sock_read=ANSWER_SECONDS)
    session = http_client.new_session()
    try:
        async with session.request(
            method,
            url,
            timeout=limits,
            allow_redirects=False,
            **way_to(url, headers, context),
        ) as answer:
            body = await http_client.read_answer(answer, ANSWER_BYTES_MAX)
    except DilocoError:
        raise
    except (aiohttp.ClientError, OSError) as error:
        shown = context if tls is not None and tls.cert is not None else None
        problem = await http_client.encryption_problem(error, url, address, shown)
        if problem is not None:
            raise problem from None
        if isinstance(error, TimeoutError):
            words = f"no answer within {ANSWER_SECONDS:g} s"
        elif isinstance(getattr(error, "os_error", None), socket.gaierror):
            words = "no such host"
        else:
            words = http_client.in_words(error)
        raise TransportError(
            f"cannot reach the syncer at {address}: {words}: is it running, is this its "
            "address, and can this machine reach it?"
        ) from None
    finally:
        await http_client.close_session(session)
        if url.scheme == "https":  # failed handshakes must also finish before the loop closes
            await asyncio.sleep(http_client.GOODBYE_SECONDS)
    if answer.status != 200:
        reason = answer.headers.get("X-Reason") or answer.reason or ""
        raise refusal_error(answer.status, reason, address)
    if body is None:
        raise ProtocolError(f"the answer of {address} is larger than {ANSWER_BYTES_MAX >> 20} MiB")
    prefix = FACT_PREFIX.lower()
    facts = {
        name.lower().removeprefix(prefix): value
        for name, value in answer.headers.items()
        if name.lower().startswith(prefix)
    }
    return Document(body, facts)


def read_object(document: Document, where: str) -> dict[str, Any]:
    """Return a document that is a JSON object.

    Raises:
        ProtocolError: It is not.
    """
    try:
        value = json.loads(document.body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ProtocolError(f"the answer of {where} is not that of a syncer of this version")
    return value


def _server_of(address: str) -> URL:
    try:
        url = URL(address)
        host = url.host or ""
        host.encode("idna")  # An invalid name would otherwise be detected only by the lookup.
        if ":" in host:
            ipaddress.ip_address(host.partition("%")[0])
        if url.scheme in ("http", "https") and host and " " not in host and url.port != 0:
            return url.origin()
        problem = "write http://HOST:PORT"
    except ValueError as error:
        problem = str(error)
    raise ConfigError(f"{address!r} is not a valid syncer address: {problem}")
