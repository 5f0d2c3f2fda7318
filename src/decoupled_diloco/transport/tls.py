"""Encrypted connections with certificates from files, which may be renewed while a process runs.

Settings name files, never their contents. Each new connection checks whether the files have
changed. A renewed certificate is therefore used at once. If the new one is broken, the previous one
stays in use.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from yarl import URL

from decoupled_diloco.errors import AccessError, ConfigError, TransportError
from decoupled_diloco.runtime import now

logger = logging.getLogger(__name__)

DAY_SECONDS = 86_400.0
TELL_SECONDS = 7 * DAY_SECONDS
"""A certificate that expires sooner than this is reported in the log."""

CHECK_SECONDS = 3600.0
"""Interval at which a process that opens no connection checks its files and the date."""

EXCHANGE_SECONDS = 20.0
"""Time after a change of its files during which a starting process waits for a matching pair."""

DIAGNOSIS_SECONDS = 2.0

RENEW = "renew it (ddiloco certs renew FOLDER)"

_NAME_CODES = (62, 63, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, EMAIL, IP_ADDRESS
_STRANGER_CODES = (2, 18, 19, 20, 21)  # the issuer is unknown, or not trusted
_NOT_YET_CODE, _EXPIRED_CODE = 9, 10


class UnfitFilesError(ConfigError):
    """Files that cannot be used now, for example while a program replaces them one by one."""


@dataclass(frozen=True)
class TLSConfig:
    """CA and client certificate of a process that dials a syncer over ``https://``.

    The files may be replaced while the process runs: new connections use the new ones.

    Args:
        ca_cert: PEM file with the CA certificates that may have signed the syncer's certificate.
            Default: the CAs that the system trusts.
        cert: PEM file with this process's certificate, for a syncer that requires one. Its
            name is the id of the process, as ``learner-0``.
        key: PEM file with the private key of ``cert``, without a passphrase.

    Raises:
        ConfigError: Nothing is set, or only one of cert and key.
    """

    ca_cert: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            given, lacks = ("cert", "key") if self.key is None else ("key", "cert")
            raise ConfigError(
                f"{given}={str(getattr(self, given))!r} has no {lacks}: set both, or neither"
            )
        if self.ca_cert is None and self.cert is None:
            raise ConfigError(
                "TLSConfig() has neither ca_cert nor cert: set one, or leave tls out: an "
                "https:// address alone trusts the system's CAs"
            )

    def new_context(self) -> ssl.SSLContext:
        """Return the context for dialing.

        Raises:
            ConfigError: A file cannot be used.
        """
        if self.ca_cert is None:
            context = ssl.create_default_context()
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _trust(context, "ca_cert", Path(self.ca_cert))
        if self.cert is not None and self.key is not None:
            _show(context, Path(self.cert), Path(self.key))
        return context


@dataclass(frozen=True)
class ServerTLSConfig:
    """Certificate of a process that listens, and the CA of the clients that it accepts.

    Args:
        cert: PEM file with its certificate, and any intermediate certificates up to the CA.
        key: PEM file with the private key.
        client_ca_cert: File with the CAs of the clients. Default: clients need no certificate.
    """

    cert: Path
    key: Path
    client_ca_cert: Path | None = None

    def new_context(self) -> ssl.SSLContext:
        """Return the context for listening.

        A client certificate is optional in the handshake: a client without one is admitted far
        enough to receive a readable rejection.

        Raises:
            ConfigError: A file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _show(context, self.cert, self.key)
        if self.client_ca_cert is not None:
            _trust(context, "client_ca_cert", self.client_ca_cert)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


class LiveTls:
    """A TLS context that follows its files.

    A new certificate and its key are written one after the other. A process that starts in between
    waits until they match, up to `EXCHANGE_SECONDS` after the last change.

    Raises:
        ConfigError: A file cannot be used, or the certificate is not valid now.
    """

    def __init__(self, files: TLSConfig | ServerTLSConfig) -> None:
        self._files = files
        self._paths = [Path(path) for path in _values(files)]
        self._warned_at: dict[str, float] = {}
        self._stamps = self._read_stamps()
        self._context, self._ends = self._load_when_exchanged()

    def context(self) -> ssl.SSLContext:
        """Return the context of a new connection; reloads the files if they have changed."""
        stamps = self._read_stamps()
        if stamps != self._stamps:
            # Kept even if loading fails, so that a broken file is reported once per change.
            self._stamps = stamps
            try:
                self._context, self._ends = self._load()
            except ConfigError as error:
                logger.warning("%s: the previous files stay in use", error)
            else:
                logger.info("new certificates from %s are in use", self._paths[0].parent)
        return self._context

    @property
    def ends_at(self) -> float | None:
        """Expiry of this process's certificate in seconds since the epoch; None without one."""
        self.context()  # A renewed certificate counts at once.
        return self._ends

    @property
    def left_seconds(self) -> float | None:
        """Seconds until this process's certificate expires; ``None`` without one."""
        ends_at = self.ends_at
        return None if ends_at is None else ends_at - time.time()

    @property
    def shows(self) -> bool:
        """Whether this process has a certificate."""
        return self._ends is not None

    async def watch(self) -> None:
        """Log a warning once per day while this process's certificate is about to expire."""
        while True:
            left_seconds = self.left_seconds
            if left_seconds is not None:
                self.warn_of_expiry(f"the certificate {self._files.cert}", left_seconds)
            await asyncio.sleep(CHECK_SECONDS)

    def warn_of_expiry(self, what: str, left_seconds: float) -> None:
        """Log a warning, at most once per day for each `what`, if its certificate expires soon."""
        warned = self._warned_at.get(what)
        if left_seconds > TELL_SECONDS or (warned is not None and now() - warned < DAY_SECONDS):
            return
        self._warned_at[what] = now()
        hours, past = abs(left_seconds) / 3600, left_seconds < 0
        when = f"expired {hours:.0f} hours ago" if past else f"expires in {hours:.0f} hours"
        logger.warning("%s %s: %s; it is loaded without a restart", what, when, RENEW)

    def _load_when_exchanged(self) -> tuple[ssl.SSLContext, float | None]:
        deadline, warned = now() + EXCHANGE_SECONDS, False
        while True:
            # Before the load: a change during it must be noticed by the next connection.
            self._stamps = self._read_stamps()
            try:
                return self._load()
            except UnfitFilesError as error:
                if now() > deadline or not self._have_just_changed():
                    raise
                if not warned:
                    logger.warning("%s; waiting, because the files have just changed", error)
                warned = True
            time.sleep(0.1)

    def _have_just_changed(self) -> bool:
        # By ctime, because programs that copy files may preserve the modification time.
        found = [found for found in map(_found, self._paths) if found is not None]
        changed_at = max((each.st_ctime for each in found), default=0.0)
        return time.time() - changed_at < EXCHANGE_SECONDS

    def _load(self) -> tuple[ssl.SSLContext, float | None]:
        context = self._files.new_context()
        certificate = self._files.cert
        return context, None if certificate is None else _end_of(Path(certificate))

    def _read_stamps(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _values(files: TLSConfig | ServerTLSConfig) -> Iterator[str | Path]:
    for field in fields(files):
        value = getattr(files, field.name)
        if value is not None:
            yield value


def _stamp(path: Path) -> tuple[int, int, int] | None:
    found = _found(path)
    return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


def _found(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _read(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnfitFilesError(
            f"{what}={str(path)!r} cannot be read: {error.strerror}: correct the path, or create "
            "one with ddiloco certs"
        ) from None


def _trust(context: ssl.SSLContext, what: str, path: Path) -> None:
    data = _read(what, path)
    try:
        context.load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise UnfitFilesError(
            f"{what}={str(path)!r} contains no PEM certificate: use the file that begins with "
            "-----BEGIN CERTIFICATE-----"
        ) from None


def _show(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _read("cert", certificate)
    _read("key", key)

    def passphrase() -> str:
        raise ConfigError(f"key={str(key)!r} has a passphrase, which is not supported: remove it")

    try:
        context.load_cert_chain(certificate, key, passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UnfitFilesError(
                f"key={str(key)!r} does not match cert={str(certificate)!r}: use a "
                "certificate and a key that were created together"
            ) from None
        raise UnfitFilesError(
            f"cert={str(certificate)!r} and key={str(key)!r} are not a PEM certificate and "
            "its key: correct the files"
        ) from None


def _end_of(path: Path) -> float:
    """Return the expiry of a certificate chain, in seconds since the epoch.

    Raises:
        ConfigError: It has expired or is not valid yet; or the extra `tls` is not installed.
    """
    try:
        from cryptography import x509
    except ImportError:
        raise ConfigError(
            "certificates need the extra tls: run pip install -e '.[tls]' in the clone"
        ) from None
    data = _read("cert", path)
    try:
        chain = x509.load_pem_x509_certificates(data)
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(
            f"cert={str(path)!r} cannot be read ({error!s:.100}): create it again"
        ) from None
    begins = max(each.not_valid_before_utc for each in chain)
    ends = min(each.not_valid_after_utc for each in chain)
    today = datetime.now(UTC)
    if today > ends:
        raise ConfigError(f"cert={str(path)!r} expired on {ends:%Y-%m-%d}: {RENEW}")
    if today < begins:
        raise ConfigError(
            f"cert={str(path)!r} is not valid before {begins:%Y-%m-%d %H:%M} UTC: correct "
            "this machine's clock, or create a new one"
        )
    return ends.timestamp()


def names_of(transport: asyncio.BaseTransport | None) -> tuple[str, ...] | None:
    """Return the names in the peer's certificate; ``None`` if it presented none.

    These are the DNS names of its subjectAltName, or its common name if there are none.
    """
    certificate = peer_certificate(transport)
    if not certificate:
        return None
    names = [str(value) for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"]
    if not names:
        parts = (part for each in certificate.get("subject", ()) for part in each)
        names = [str(value) for kind, value in parts if kind == "commonName"]
    return tuple(names)


def peer_certificate(transport: Any) -> Mapping[str, Any]:
    """Return the verified certificate of a connection's peer; empty without one."""
    return (transport.get_extra_info("peercert") if transport is not None else None) or {}


def left_seconds_of(certificate: Mapping[str, Any]) -> float:
    """Return the seconds until a peer's certificate expires."""
    return ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()


def tls_problem(error: BaseException, where: str) -> TransportError | None:
    """Return a description of a TLS failure; ``None`` if the error has another cause.

    A failure that only another file or address can fix is an `AccessError`, which is not retried.
    An expired certificate is a plain `TransportError`, because the other side may renew it.
    """
    cause = _ssl_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _unverified(cause, where)
    if cause is None:
        return None
    reason = cause.reason or str(cause)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return AccessError(f"{where} does not use TLS: write http://, or configure a certificate")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return AccessError(
            f"{where} rejects this process's certificate ({reason.lower()}): use one that is "
            "signed by the syncer's client_ca_cert"
        )
    return TransportError(f"{where}: TLS handshake failed ({reason})")


def _ssl_cause(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None:
        # aiohttp's errors are also ssl.SSLErrors; the original error is in an attribute.
        inner = getattr(error, "certificate_error", None) or getattr(error, "os_error", None)
        if inner is None and isinstance(error, ssl.SSLError):
            return error
        error = inner or error.__cause__
    return None


def _unverified(error: ssl.SSLCertVerificationError, where: str) -> TransportError:
    code, words = error.verify_code, error.verify_message.rstrip(".")
    if code == _EXPIRED_CODE:
        return TransportError(f"the certificate of {where} has expired: {RENEW} there")
    if code == _NOT_YET_CODE:
        return TransportError(
            f"the certificate of {where} is not valid yet: compare the clocks of both machines"
        )
    if code in _NAME_CODES:
        return AccessError(
            f"the certificate of {where} is for another name ({words}): dial a name in the "
            "certificate, or add this one (ddiloco certs renew FOLDER syncer --host HOST)"
        )
    if code in _STRANGER_CODES:
        return AccessError(
            f"the certificate of {where} is not signed by a CA that is trusted here ({words}): "
            "pass the syncer's authority.pem (--ca-cert, or TLSConfig(ca_cert=…))"
        )
    return AccessError(f"the certificate of {where} is not accepted ({words})")


def require_used(tls: TLSConfig | None, address: str) -> None:
    """Reject certificates for an unencrypted address.

    Raises:
        ConfigError: They would be ignored.
    """
    if tls is not None and not address.startswith("https://"):
        raise ConfigError(
            f"certificates would be ignored for {address}, which is not encrypted: write "
            "https://, or remove them"
        )


async def hung_up_problem(
    target: URL, where: str, shown: ssl.SSLContext | None
) -> AccessError | None:
    """Return why a server closed a connection without an answer, if TLS is the reason.

    The server closes without a message if a client uses plain text on an encrypted port, or
    presents a certificate that it rejects. Further attempts distinguish the cases.

    Args:
        shown: The context of the failed connection, if a certificate was presented.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if target.scheme == "http":
        if await _answers(target, context):
            return AccessError(
                f"{where} uses TLS: write https://, and pass its CA certificate if it has one"
            )
    elif (
        shown is not None and not await _answers(target, shown) and await _answers(target, context)
    ):
        return AccessError(
            f"{where} rejects this process's certificate: it has expired, or is not signed by the "
            "syncer's client_ca_cert: use another one, or renew it (ddiloco certs)"
        )
    return None


async def _answers(target: URL, context: ssl.SSLContext) -> bool:
    """Whether a server answers a request over a connection with this context."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(DIAGNOSIS_SECONDS):
            reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n")
            return bool(await reader.read(1))
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()
