"""Encrypted connections: certificates from files, which may be renewed while a process runs.

A process names files, never contents. Each new connection looks whether they have changed, so that
a renewed certificate is used at once, and a broken one leaves what was there before in use.
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
"""A certificate that ends sooner is told of in the log."""

LOOK_SECONDS = 3600.0
"""How often a process that opens no connection looks at its files and at the date."""

EXCHANGE_SECONDS = 20.0
"""How long after a change of its files a process that starts waits until they fit together."""

DIAGNOSIS_SECONDS = 2.0

RENEW = "renew it (ddiloco certificates renew FOLDER)"

_NAME_CODES = (62, 63, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, EMAIL, IP_ADDRESS
_STRANGER_CODES = (2, 18, 19, 20, 21)  # no issuer is known, or one that nobody trusts has signed
_NOT_YET_CODE, _EXPIRED_CODE = 9, 10


class UnfitFilesError(ConfigError):
    """Files that cannot be used, as while a program exchanges them one after the other."""


@dataclass(frozen=True)
class Tls:
    """What a process trusts, and shows, when it dials a syncer by ``https://``.

    The files may be replaced while the process runs: new connections use the new ones.

    Args:
        authority: File with the certificates of the authorities that may have signed the syncer's,
            PEM. Default: those that the system trusts.
        certificate: File with this process's own certificate, PEM, for a syncer that wants one. Its
            name is the id of the process, as ``learner-0``.
        key: File with the private key of ``certificate``, PEM, without a passphrase.

    Raises:
        ConfigError: Nothing is given, or only one of certificate and key.
    """

    authority: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            given, lacks = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise ConfigError(
                f"{given}={str(getattr(self, given))!r} has no {lacks}: give both, or none"
            )
        if self.authority is None and self.certificate is None:
            raise ConfigError(
                "Tls() has neither authority nor certificate: give one, or leave tls out: what the "
                "system trusts is trusted by an https:// address alone"
            )

    def new_context(self) -> ssl.SSLContext:
        """What dials.

        Raises:
            ConfigError: A file cannot be used.
        """
        if self.authority is None:
            context = ssl.create_default_context()
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            _trust(context, "authority", Path(self.authority))
        if self.certificate is not None and self.key is not None:
            _show(context, Path(self.certificate), Path(self.key))
        return context


@dataclass(frozen=True)
class ServerTls:
    """What a process that listens shows, and whose certificates it accepts.

    Args:
        certificate: File with its certificate, and those between it and the authority, PEM.
        key: File with the private key, PEM.
        client_authority: File with the authorities of those who dial. Default: they need none.
    """

    certificate: Path
    key: Path
    client_authority: Path | None = None

    def new_context(self) -> ssl.SSLContext:
        """What listens. Who shows no certificate gets in so far as to be told in a sentence.

        Raises:
            ConfigError: A file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        _show(context, self.certificate, self.key)
        if self.client_authority is not None:
            _trust(context, "client_authority", self.client_authority)
            context.verify_mode = ssl.CERT_OPTIONAL
        return context


class LiveTls:
    """A context that follows its files.

    A new certificate and its key are written one after the other. A process that starts in between
    waits until they fit: up to `EXCHANGE_SECONDS` after the last change.

    Raises:
        ConfigError: A file cannot be used, or the certificate is not valid now.
    """

    def __init__(self, files: Tls | ServerTls) -> None:
        self._files = files
        self._paths = [Path(path) for path in _values(files)]
        self._told: dict[str, float] = {}
        self._stamps = self._look()
        self._context, self._ends = self._load_when_exchanged()

    def context(self) -> ssl.SSLContext:
        """The context of a new connection."""
        stamps = self._look()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._context, self._ends = self._load()
            except ConfigError as error:
                logger.warning("%s: the files from before stay in use", error)
            else:
                logger.info("new certificates from %s are in use", self._paths[0].parent)
        return self._context

    @property
    def ends_at(self) -> float | None:
        """When the own certificate ends, in seconds since the epoch; ``None`` without one."""
        self.context()  # A renewed one counts at once.
        return self._ends

    @property
    def left_seconds(self) -> float | None:
        """Until the own certificate ends; ``None`` without one."""
        ends_at = self.ends_at
        return None if ends_at is None else ends_at - time.time()

    @property
    def shows(self) -> bool:
        """Whether there is a certificate of one's own."""
        return self._ends is not None

    async def watch(self) -> None:
        """Tells in the log, once a day, that the own certificate is about to end."""
        while True:
            left_seconds = self.left_seconds
            if left_seconds is not None:
                self.tell(f"the certificate {self._files.certificate}", left_seconds)
            await asyncio.sleep(LOOK_SECONDS)

    def tell(self, what: str, left_seconds: float) -> None:
        """Tells in the log, of one thing once a day, that it is about to end."""
        told = self._told.get(what)
        if left_seconds > TELL_SECONDS or (told is not None and now() - told < DAY_SECONDS):
            return
        self._told[what] = now()
        hours, past = abs(left_seconds) / 3600, left_seconds < 0
        when = f"has ended {hours:.0f} hours ago" if past else f"ends in {hours:.0f} hours"
        logger.warning("%s %s: %s; it is loaded without a restart", what, when, RENEW)

    def _load_when_exchanged(self) -> tuple[ssl.SSLContext, float | None]:
        deadline, told = now() + EXCHANGE_SECONDS, False
        while True:
            self._stamps = self._look()
            try:
                return self._load()
            except UnfitFilesError as error:
                if now() > deadline or not self._have_just_changed():
                    raise
                if not told:
                    logger.warning("%s; waiting: the files have just changed", error)
                told = True
            time.sleep(0.1)

    def _have_just_changed(self) -> bool:
        """By the file system's own times: programs that copy files keep those of the contents."""
        found = [found for found in map(_found, self._paths) if found is not None]
        changed_at = max((each.st_ctime for each in found), default=0.0)
        return time.time() - changed_at < EXCHANGE_SECONDS

    def _load(self) -> tuple[ssl.SSLContext, float | None]:
        context = self._files.new_context()
        certificate = self._files.certificate
        return context, None if certificate is None else _end_of(Path(certificate))

    def _look(self) -> list[tuple[int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _values(files: Tls | ServerTls) -> Iterator[str | Path]:
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
            f"{what}={str(path)!r} cannot be read: {error.strerror}: correct the path, or make one "
            "with ddiloco certificates"
        ) from None


def _trust(context: ssl.SSLContext, what: str, path: Path) -> None:
    data = _read(what, path)
    try:
        context.load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise UnfitFilesError(
            f"{what}={str(path)!r} holds no certificate in PEM: give the file that begins with "
            "-----BEGIN CERTIFICATE-----"
        ) from None


def _show(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _read("certificate", certificate)
    _read("key", key)

    def passphrase() -> str:
        raise ConfigError(f"key={str(key)!r} has a passphrase, which nobody could type: remove it")

    try:
        context.load_cert_chain(certificate, key, passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UnfitFilesError(
                f"key={str(key)!r} does not belong to certificate={str(certificate)!r}: give the "
                "two that were made together"
            ) from None
        raise UnfitFilesError(
            f"certificate={str(certificate)!r} and key={str(key)!r} are not a certificate and its "
            "key in PEM: correct the files"
        ) from None


def _end_of(path: Path) -> float:
    """When a certificate ends, in seconds since the epoch.

    Raises:
        ConfigError: It has ended, or has not begun; or what reads it is not installed.
    """
    try:
        from cryptography import x509
    except ImportError:
        raise ConfigError(
            "certificates need the extra tls: pip install 'decoupled-diloco[tls]' (in a clone: "
            "pip install -e '.[tls]')"
        ) from None
    try:
        chain = x509.load_pem_x509_certificates(_read("certificate", path))
    except (ValueError, x509.InvalidVersion) as error:
        raise ConfigError(
            f"certificate={str(path)!r} cannot be read ({error!s:.100}): make it anew"
        ) from None
    begins = max(each.not_valid_before_utc for each in chain)
    ends = min(each.not_valid_after_utc for each in chain)
    today = datetime.now(UTC)
    if today > ends:
        raise ConfigError(f"certificate={str(path)!r} has expired on {ends:%Y-%m-%d}: {RENEW}")
    if today < begins:
        raise ConfigError(
            f"certificate={str(path)!r} is not valid before {begins:%Y-%m-%d %H:%M} UTC: correct "
            "this machine's clock, or make a new one"
        )
    return ends.timestamp()


def names_of(transport: asyncio.BaseTransport | None) -> tuple[str, ...] | None:
    """The names in the certificate of who has dialled; ``None``: it has shown none.

    Those of its subjectAltName, or else its common name.
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
    """What the peer of a connection has shown, and was verified; empty: nothing."""
    return (transport.get_extra_info("peercert") if transport is not None else None) or {}


def left_seconds_of(certificate: Mapping[str, Any]) -> float:
    """Until a peer's certificate ends."""
    return ssl.cert_time_to_seconds(certificate["notAfter"]) - time.time()


def tls_problem(error: BaseException, where: str) -> TransportError | None:
    """What is wrong with an encrypted connection, in a sentence; ``None``: something else is.

    What only another file or address mends is an `AccessError`, which nobody repeats for ever
    without a word; a certificate that has ended is renewed at the other side, so it is not.
    """
    cause = _ssl_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return _unverified(cause, where)
    if cause is None:
        return None
    reason = cause.reason or str(cause)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
        return AccessError(f"{where} does not speak TLS: write http://, or give it a certificate")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return AccessError(
            f"{where} does not accept our certificate ({reason.lower()}): give one that the "
            "syncer's client_authority has signed"
        )
    return TransportError(f"{where}: no agreement on encryption ({reason})")


def _ssl_cause(error: BaseException | None) -> ssl.SSLError | None:
    while error is not None:
        # aiohttp's own errors count as such, too, and have what was found in an attribute.
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
            f"the certificate of {where} is for another name ({words}): dial a name that is in it, "
            "or add this one (ddiloco certificates renew FOLDER syncer --name HOST)"
        )
    if code in _STRANGER_CODES:
        return AccessError(
            f"the certificate of {where} is signed by no authority that is trusted here ({words}): "
            "give the syncer's authority.pem (--authority, or Tls(authority=…))"
        )
    return AccessError(f"the certificate of {where} is not accepted ({words})")


def require_used(tls: Tls | None, address: str) -> None:
    """Refuses certificates for an address that is not encrypted.

    Raises:
        ConfigError: They would be ignored.
    """
    if tls is not None and not address.startswith("https://"):
        raise ConfigError(
            f"certificates would be ignored for {address}, which is not encrypted: write "
            "https://, or leave them out"
        )


async def hung_up_problem(
    target: URL, where: str, shown: ssl.SSLContext | None
) -> AccessError | None:
    """Why a server hung up without an answer, if encryption is the reason: it is asked again.

    It hangs up without a word on who speaks plain text to an encrypted port, and on who shows a
    certificate that it does not accept.

    Args:
        shown: What was dialled with, if a certificate was shown.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if target.scheme == "http":
        if await _answers(target, context):
            return AccessError(
                f"{where} speaks TLS: write https://, and give its authority if it has one"
            )
    elif (
        shown is not None and not await _answers(target, shown) and await _answers(target, context)
    ):
        return AccessError(
            f"{where} does not accept our certificate: it has expired, or an authority has signed "
            "it that the syncer's client_authority does not name: give another one, or renew it "
            "(ddiloco certificates)"
        )
    return None


async def _answers(target: URL, context: ssl.SSLContext) -> bool:
    """Whether a server answers a request over an encrypted connection."""
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
