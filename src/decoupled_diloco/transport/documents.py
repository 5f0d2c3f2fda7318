"""Small documents that a server gives to those who hold a secret: plain GETs beside the two planes.

The transport does not know what they are; a `Query` answers. Used for the event tape, which
`ddiloco status` and its like read from a running syncer.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode, urlsplit

from yarl import URL

from decoupled_diloco.errors import ConfigError, ProtocolError, TransportError
from decoupled_diloco.transport.tls import (
    Tls,
    hung_up_problem,
    require_used,
    tls_problem,
)
from decoupled_diloco.transport.tokens import refusal_error
from decoupled_diloco.transport.ways import headers_for, proxy_for

ANSWER_SECONDS = 10.0
"""How long a server may take to answer, as long as a control connection may be silent."""

ANSWER_BYTES_MAX = 64 << 20
"""More than any honest answer."""


class NoSuchDocumentError(Exception):
    """The query names nothing; its text says what there is."""


@dataclass(frozen=True)
class Document:
    """An answer: bytes, and a few facts about them."""

    body: bytes
    facts: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/octet-stream"


Query = Callable[[Mapping[str, str]], Awaitable[Document]]
"""Answers a request's parameters; raises `NoSuchDocumentError`."""

FACT_PREFIX = "X-Fact-"


def fetch(
    address: str, path: str, query: Mapping[str, str], token: str | None, tls: Tls | None = None
) -> Document:
    """Gets a document from a server; one attempt, on a connection of its own.

    Raises:
        ConfigError: The address is none, or the token none, or a file of ``tls`` cannot be used.
        AccessError: The server refuses the token, or one side the other's certificate.
        ProtocolError: It does not know the document.
        TransportError: Nobody answers.
    """
    connection, prefix, headers = _connection(address, tls)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request("GET", f"{prefix}{path}?{urlencode(query)}", headers=headers)
        answer = connection.getresponse()
        body = answer.read(ANSWER_BYTES_MAX + 1)
    except (OSError, OverflowError, http.client.HTTPException) as error:
        problem = tls_problem(error, address) or _hung_up(error, address, tls)
        if problem is not None:
            raise problem from None
        raise TransportError(
            f"cannot reach the syncer at {address}: {_in_words(error)}: is it running, is this its "
            "address, and can this machine reach it?"
        ) from None
    except ValueError:  # the secret itself is not repeated
        raise ConfigError(
            "the token has characters that no token has: check --token-file"
        ) from None
    finally:
        connection.close()
    if answer.status != 200:
        reason = answer.getheader("X-Reason") or answer.reason
        raise refusal_error(answer.status, reason, address)
    if len(body) > ANSWER_BYTES_MAX:
        raise ProtocolError(f"{address} answers with more than {ANSWER_BYTES_MAX >> 20} MiB")
    prefix = FACT_PREFIX.lower()
    facts = {
        name[len(prefix) :].lower(): value
        for name, value in answer.getheaders()
        if name.lower().startswith(prefix)
    }
    return Document(body, facts)


def read_object(document: Document, where: str) -> dict[str, Any]:
    """A document that is a JSON object."""
    try:
        value = json.loads(document.body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ProtocolError(f"{where} does not answer like a syncer of this version")
    return value


def _connection(
    address: str, tls: Tls | None
) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """A connection, what goes before each path, and headers: those of a proxy, if one is asked."""
    require_used(tls, address)
    url = _server_of(address)
    proxy = proxy_for(url)
    via, headers = proxy or url, {} if proxy is None else headers_for(proxy)
    host, port = via.host or "", via.port
    if url.scheme == "http":
        plain = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
        return plain, str(url.origin()) if proxy else "", headers
    context = ssl.create_default_context() if tls is None else tls.new_context()
    connection = http.client.HTTPSConnection(host, port, timeout=ANSWER_SECONDS, context=context)
    if proxy is not None:
        connection.set_tunnel(url.host or "", url.port, headers)
    return connection, "", {}


def _server_of(address: str) -> URL:
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        host.encode("idna")  # What no name can be would be found out only when it is looked up.
        if parts.scheme in ("http", "https") and host and parts.port != 0:
            http.client.HTTPConnection(host, parts.port)  # It knows what else no host can be.
            return URL(address)
        problem = "write http://HOST:PORT"
    except (ValueError, http.client.InvalidURL) as error:
        problem = str(error)
    raise ConfigError(f"{address!r} is no address of a syncer: {problem}")


def _hung_up(error: Exception, address: str, tls: Tls | None) -> TransportError | None:
    """What a server means that hung up without a word, if that is about encryption."""
    url = URL(address)
    if not isinstance(error, ConnectionResetError) or proxy_for(url) is not None:
        return None  # `RemoteDisconnected` is such an error, too
    shown = tls.new_context() if tls is not None and tls.certificate is not None else None
    return asyncio.run(hung_up_problem(url, address, shown))


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_SECONDS:g} s"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
