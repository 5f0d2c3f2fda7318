"""Addresses of shards and of object stores: validation, wildcard hosts, and standbys.

A syncer that listens on all interfaces (``host="0.0.0.0"`` or ``"::"``) cannot determine at which
of its addresses a learner reaches it. It advertises the wildcard, and each learner replaces the
wildcard by the host that it has dialed itself.

A shard with a standby has several addresses, and one of them answers. They are written as one
text, with ``|`` between them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from decoupled_diloco.errors import ConfigError, a_kind

BETWEEN = "|"
"""Separator between the addresses of a shard and of its standby."""


def url_of(host: str, port: int | None, scheme: str = "http") -> str:
    """Return the URL of a host and a port.

    >>> url_of("syncer", 7070), url_of("::1", 7070)
    ('http://syncer:7070', 'http://[::1]:7070')
    """
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}" + ("" if port is None else f":{port}")


def require_address(address: object) -> None:
    """Check that a value can be the address of a shard.

    Raises:
        ConfigError: It is not ``http://HOST:PORT`` or ``https://HOST:PORT``.

    >>> require_address("http://syncer:7070")
    """
    problem = address_problem(address)
    if problem:
        shown = without_password(address) if isinstance(address, str) else address
        raise ConfigError(
            f"syncer={shown!r} is not a URL: write it as 'http://host:port' ({problem})"
        )


def address_problem(address: object) -> str:
    """Return why a value is not the address of a shard; empty if it is one."""
    if not isinstance(address, str):
        return f"it is {a_kind(address)}"
    if address != address.strip() or any(
        each.isspace() or not each.isprintable() for each in address
    ):
        return "it has blanks"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return str(error).lower()
    if parts.scheme not in ("http", "https"):
        return "it does not begin with http:// or https://"
    if parts.username is not None or parts.password is not None:
        return "it has a user name or password: use auth_token= or --auth-token-file instead"
    if parts.netloc.endswith(":") or port == 0:
        return "its port is not 1 to 65535"
    if parts.query or parts.fragment:
        return "it has a query or a fragment"
    return _host_problem(host)


def _host_problem(host: str) -> str:
    if not host:
        return "it has no host"
    if ":" in host:
        try:
            ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return f"{host} is not an IPv6 address"
        return ""
    try:
        host.encode("idna")
    except UnicodeError:
        return "a label of its host is empty or longer than 63 characters"
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(labels):
        return "a label of its host is empty, or the host is longer than 253 characters"
    if labels[-1].isdigit():
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return f"{host} is not an IPv4 address"
    if any(each in "\\^`{}|<>\"'!$&()*+,;=~@" for each in host):
        return "its host has characters that are not valid in a host name"
    return ""


STORES = ("s3", "gs", "az", "file", "memory")
"""Schemes of object stores."""

_NO_SECRETS = (
    "set the credentials in the environment (AWS_…, GOOGLE_…, AZURE_…), or give the machine a role"
)


def is_url(text: str) -> bool:
    """Whether a text is a URL, of an object store or of anything else, and not a path.

    >>> is_url("s3://bucket/x"), is_url("runs/x"), is_url("s3:/bucket")
    (True, False, True)
    """
    return re.match(r"[a-z][a-z0-9+.-]+:/", text, re.IGNORECASE) is not None


def is_store(text: str) -> bool:
    """Whether a text is an address of an object store, apart from mistakes in it.

    >>> is_store("s3://bucket/x"), is_store("http://syncer:7070"), is_store("runs/x")
    (True, False, False)
    """
    return is_url(text) and not text.lower().startswith(("http:", "https:"))


def require_store(name: str, address: str, end: str = "") -> None:
    """Check that a text is an address of an object store.

    Args:
        name: The setting or argument, for the message.
        address: The text.
        end: What follows the value in the message, as ``")"`` after an argument.

    Raises:
        ConfigError: It is not an address, or it has credentials.

    >>> require_store("store", "s3://bucket/runs/x")
    """
    shown = f"{name}={without_password(address).partition('?')[0]!r}{end}"
    known = ", ".join(f"{scheme}://" for scheme in STORES)
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise ConfigError(
            f"{shown} is not an address ({error}): write s3://BUCKET/PREFIX"
        ) from None
    if parts.scheme not in STORES or "://" not in address:
        raise ConfigError(f"{shown} is not an object store: use one of {known}")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ConfigError(f"{shown} has a user name, password or query: {_NO_SECRETS}")
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ConfigError(f"{shown} is not an absolute path: write file:///FOLDER")
    if parts.scheme != "file" and not parts.netloc:
        raise ConfigError(f"{shown} has no bucket: write {parts.scheme}://BUCKET/PREFIX")
    wrong = next((each for each in parts.path.strip("/").split("/") if each in (".", "..")), None)
    if wrong or "//" in parts.path.rstrip("/") or not address.isprintable() or " " in address:
        raise ConfigError(
            f"{shown} has '{wrong or 'a blank or an empty folder'}' in its path: take it out"
        )


def without_password(text: str) -> str:
    """Return the text with ``***`` instead of the user name and password of each address in it.

    >>> without_password("http://me:secret@syncer:7070 is away")
    'http://***@syncer:7070 is away'
    """
    return _USER.sub(r"\1***@", text)


_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s'\"|]*@", re.IGNORECASE)


def alternatives(address: str) -> tuple[str, ...]:
    """Return the addresses of one shard; only one of them answers at a time.

    >>> alternatives("http://a:7070|http://b:7070")
    ('http://a:7070', 'http://b:7070')
    """
    return tuple(address.split(BETWEEN))


def relays_among(given: Sequence[str], shards: Sequence[str]) -> tuple[str, ...]:
    """Return those of the given addresses that are not addresses of shards.

    >>> relays_among(["http://relay:7080", "http://a:7070"], ["http://a:7070|http://b:7070"])
    ('http://relay:7080',)
    """
    known = {one for each in shards for one in alternatives(each)}
    return tuple(each for each in given if each not in known)


def reached_by(address: str, dialled: str) -> str:
    """Return the address with the host of ``dialled`` instead of a wildcard.

    >>> reached_by("http://0.0.0.0:7071", "http://syncer:7070")
    'http://syncer:7071'
    >>> reached_by("http://10.0.0.1:7071", "http://syncer:7070")
    'http://10.0.0.1:7071'
    """
    return _replace_wildcard(address, lambda version: urlsplit(dialled).hostname or "")


def on_this_machine(address: str) -> str:
    """Return the address that processes of the same machine dial.

    >>> on_this_machine("http://[::]:7070"), on_this_machine("http://0.0.0.0:7070")
    ('http://[::1]:7070', 'http://127.0.0.1:7070')
    """
    return _replace_wildcard(address, lambda v: "127.0.0.1" if v == 4 else "::1")


def everywhere(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses with a wildcard host, which each learner replaces; see this module.

    >>> everywhere(["http://127.0.0.1:7070"])
    ('http://0.0.0.0:7070',)
    """
    return tuple(_each(address, lambda one: _with_host(one, "0.0.0.0")) for address in addresses)


def from_elsewhere(address: str) -> str:
    """Return the address to show to users, with an address of this machine for a wildcard."""
    return _replace_wildcard(address, _host_of_this_machine)


def _each(address: str, change: Callable[[str], str]) -> str:
    return BETWEEN.join(map(change, alternatives(address)))


def _replace_wildcard(address: str, host: Callable[[int], str]) -> str:
    """Return the address with ``host(4)`` or ``host(6)`` instead of a wildcard of that version."""

    def changed(one: str) -> str:
        version = _wildcard_version(one)
        return one if version is None else _with_host(one, host(version))

    return _each(address, changed)


def _host_of_this_machine(version: int) -> str:
    v4, v6 = (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")
    family, far = v4 if version == 4 else v6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # sends nothing; the kernel only chooses the source address
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _with_host(address: str, host: str) -> str:
    parts = urlsplit(address)
    return url_of(host, parts.port, parts.scheme)


def _wildcard_version(address: str) -> int | None:
    """Return 4 or 6 if the host of the address means all interfaces; `None` otherwise."""
    try:
        host = ipaddress.ip_address(urlsplit(address).hostname or "")
    except ValueError:
        return None
    return host.version if host.is_unspecified else None
