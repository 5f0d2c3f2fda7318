"""Certificates for a run: a folder with a CA and the certificates that it has signed.

FOLDER/authority.pem    the CA certificate: every process that dials trusts it
FOLDER/authority.key    the CA key: it stays where the certificates are created
FOLDER/syncer.pem, .key     for the shards on their hosts
FOLDER/NAME.pem, .key       for the process with this id, such as learner-0

A renewed certificate keeps its key, so only one file changes while processes run.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from decoupled_diloco.errors import ConfigError, DilocoError, StorageError
from decoupled_diloco.storage.files import write_text
from decoupled_diloco.transport.tokens import PRINCIPAL, SHARDS

AUTHORITY, SYNCER = "authority", "syncer"
LOCAL = ("localhost", "127.0.0.1", "::1")
"""Names of this machine, which every syncer's certificate contains."""

AUTHORITY_DAYS = 3650
DAYS_MAX = 36500
"""The longest lifetime of a certificate. Dates end with the year 9999."""

BACKDATED = timedelta(minutes=5)
"""Certificates are valid from this long before their creation: other clocks may be behind."""

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Listed:
    """One certificate of a folder.

    Attributes:
        name: Name of its file, without the suffix.
        names: Hosts, addresses and ids that it is for.
        ends: When it expires.
        has_key: Whether its key is in the folder too.
    """

    name: str
    names: tuple[str, ...]
    ends: datetime
    has_key: bool

    @property
    def days_left(self) -> float:
        return (self.ends - datetime.now(UTC)) / timedelta(days=1)


class CertificateFolder:
    """A folder with a CA and the certificates that it has signed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, hosts: Sequence[str], days: int) -> None:
        """Create a CA and the syncer's certificate.

        Args:
            hosts: Names and addresses of the syncer; names of this machine are added.
            days: Lifetime of the syncer's certificate.

        Raises:
            ConfigError: The folder already has a CA, a host is not valid, or ``days`` exceeds the
                lifetime of the CA.
            StorageError: A file cannot be written.
        """
        _require_days(days, AUTHORITY_DAYS - 1, f", as the CA expires after {AUTHORITY_DAYS} days")
        if self._pem(AUTHORITY).exists():
            raise ConfigError(
                f"{self._pem(AUTHORITY)} already exists, and no file is overwritten: use add or "
                "renew, or choose another folder"
            )
        alternatives = list(map(_host, dict.fromkeys([*hosts, *LOCAL])))
        with _readable_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        key, name = ec.generate_private_key(ec.SECP256R1()), _named("decoupled-diloco authority")
        self._write_key(AUTHORITY, key)
        self._write(AUTHORITY, _sign_itself(name, key, AUTHORITY_DAYS))
        self._issue(SYNCER, [*alternatives, x509.DNSName(SHARDS)], days)

    def add(
        self,
        names: Sequence[str],
        days: int,
        hosts: Sequence[str] = (),
        represents: Sequence[str] = (),
    ) -> None:
        """Create a certificate for each of these ids.

        Args:
            names: The ids.
            days: Lifetime of the certificates.
            hosts: For a relay: names and addresses at which it is reached; names of its machine are
                added.
            represents: For a relay: the ids that it represents.

        Raises:
            ConfigError: An id already has a certificate or is not valid, a host is not valid, or
                ``days`` is too long; then none is created.
            StorageError: A file cannot be read or written.
        """
        _require_days(days)
        for name in (*names, *represents):
            _require_id(name)
        more = _of_relay(represents, [*hosts, *LOCAL] if represents or hosts else [])
        for name in names:
            if self._pem(name).exists() or self._key(name).exists():
                raise ConfigError(
                    f"{self._pem(name)} already exists, and no file is overwritten: use renew, or "
                    "remove it and its key"
                )
        for name in dict.fromkeys(names):
            self._issue(name, [x509.DNSName(name), *more], days)

    def renew(
        self,
        names: Sequence[str],
        days: int,
        hosts: Sequence[str] = (),
        represents: Sequence[str] = (),
    ) -> list[str]:
        """Sign certificates again, with their existing keys and names.

        Args:
            names: The certificates. Default: all except the CA certificate.
            days: Their new lifetime.
            hosts: Additional names and addresses for the first of ``names``. Default: for the
                syncer's certificate.
            represents: Additional ids for the first of ``names``, the certificate of a relay.

        Returns:
            The names of the renewed certificates.

        Raises:
            ConfigError: A certificate does not exist, an id or a host is not valid, or ``days`` is
                too long.
            StorageError: A file cannot be read or written.
        """
        _require_days(days)
        for name in represents:
            _require_id(name)
        more, extended = _of_relay(represents, hosts), (*names, SYNCER)[0]
        if more and extended == AUTHORITY:
            raise ConfigError("the certificate of the CA names no host: name another certificate")
        known = [each.name for each in self.listing()]
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{self.path} has no certificate {name!r}: it has {', '.join(known)}"
                )
        chosen = list(dict.fromkeys(names)) or [name for name in known if name != AUTHORITY]
        for name in chosen:
            if name == AUTHORITY:
                old, key = self._certificate(name), self._private(name)
                self._write(name, _sign_itself(old.subject, key, days))
                continue
            kept = _alternatives(self._certificate(name))
            added = [each for each in more if name == extended and each not in kept]
            self._issue(name, [*kept, *added], days)
        return chosen

    def listing(self) -> list[Listed]:
        """Return all certificates, the CA certificate first.

        Raises:
            ConfigError: The folder has no CA.
            StorageError: A file cannot be read.
        """
        if not self._pem(AUTHORITY).exists():
            raise ConfigError(
                f"{self.path} has no authority.pem: create a CA with ddiloco certs create-ca "
                f"{self.path} --host HOST"
            )
        names = sorted(path.stem for path in self.path.glob("*.pem"))
        names.sort(key=lambda name: name != AUTHORITY)
        found = []
        for name in names:
            certificate = self._certificate(name)
            alternatives = tuple(str(each.value) for each in _alternatives(certificate))
            ends, has_key = certificate.not_valid_after_utc, self._key(name).exists()
            found.append(Listed(name, alternatives, ends, has_key))
        return found

    def _issue(self, name: str, alternatives: Iterable[x509.GeneralName], days: int) -> None:
        authority, signer = self._certificate(AUTHORITY), self._private(AUTHORITY)
        ends = datetime.now(UTC) + timedelta(days=days)
        if ends > authority.not_valid_after_utc:
            raise ConfigError(
                f"days={days} exceeds the lifetime of the CA, which expires on "
                f"{authority.not_valid_after_utc:%Y-%m-%d}: lower days, or run ddiloco certs "
                f"renew {self.path} {AUTHORITY} first"
            )
        key = self._private(name) if self._key(name).exists() else None
        if key is None:
            key = ec.generate_private_key(ec.SECP256R1())
            self._write_key(name, key)
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(_named(name), authority.subject, key, ends)
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        builder = builder.add_extension(_use(signs=False), critical=True)
        of_signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
        builder = builder.add_extension(of_signer, critical=False)
        self._write(name, builder.sign(signer, hashes.SHA256()))

    def _pem(self, name: str) -> Path:
        return self.path / f"{name}.pem"

    def _key(self, name: str) -> Path:
        return self.path / f"{name}.key"

    def _certificate(self, name: str) -> x509.Certificate:
        return _read(self._pem(name))

    def _private(self, name: str) -> Key:
        path = self._key(name)
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except OSError as error:
            raise StorageError(
                f"{path} cannot be read: {error.strerror}: create certificates in the folder that "
                "has the CA's key"
            ) from None
        except (ValueError, TypeError):
            raise StorageError(
                f"{path} is not a private key without a passphrase: restore the file"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise StorageError(
                f"{path} is not an elliptic-curve key, as this command creates: restore the file"
            )
        return key

    def _write(self, name: str, certificate: x509.Certificate) -> None:
        text = certificate.public_bytes(serialization.Encoding.PEM).decode()
        write_text(self._pem(name), text)

    def _write_key(self, name: str, key: Key) -> None:
        """Create a file that no other user can read at any time."""
        data = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        with _readable_errors(self._key(name)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(self._key(name), flags, 0o600), "wb") as file:
                file.write(data)


@contextmanager
def _readable_errors(path: Path) -> Iterator[None]:
    """Convert the system's errors for a file into a `DilocoError` with a readable sentence."""
    try:
        yield
    except DilocoError:
        raise
    except FileExistsError:
        raise ConfigError(
            f"{path} already exists, and no file is overwritten: remove it, or choose another "
            "folder"
        ) from None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Key, ends: datetime
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - BACKDATED)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _sign_itself(name: x509.Name, key: Key, days: int) -> x509.Certificate:
    builder = _builder(name, name, key, datetime.now(UTC) + timedelta(days=days))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_use(signs=True), critical=True)
    return builder.sign(key, hashes.SHA256())


def _use(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _require_days(days: int, most: int = DAYS_MAX, why: str = "") -> None:
    if not 1 <= days <= most:
        raise ConfigError(f"--valid-days {days} is out of range: 1 to {most}{why}")


def _require_id(name: str) -> None:
    if name in (AUTHORITY, SYNCER):
        raise ConfigError(
            f"{name!r} is not a valid id: the name is reserved for the certificate of the "
            f"{'CA' if name == AUTHORITY else 'syncer'}; use the name of a process, such "
            "as learner-0"
        )
    if not PRINCIPAL.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid id: use letters, digits, '.', '_' or '-', as in learner-0"
        )


def _of_relay(represents: Iterable[str], hosts: Iterable[str]) -> list[x509.GeneralName]:
    ids = [x509.DNSName(each) for each in dict.fromkeys(represents)]
    return [*ids, *map(_host, dict.fromkeys(hosts))]


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    if not name.isascii() or not name or "/" in name or ":" in name:
        raise ConfigError(
            f"--host {name!r} is not a valid host: pass a name or an address without http:// and "
            "port"
        )
    return x509.DNSName(name)


def hosts_of(path: Path) -> list[str]:
    """Return the names and addresses of the first certificate in a file.

    Raises:
        StorageError: It cannot be read.
    """
    return [str(each.value) for each in _alternatives(_read(path))]


def _read(path: Path) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        _alternatives(certificate)  # extensions are parsed lazily: raise parse errors here
        return certificate
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension):
        raise StorageError(f"{path} is not a certificate: remove it") from None


def _alternatives(certificate: x509.Certificate) -> list[x509.GeneralName]:
    with suppress(x509.ExtensionNotFound):
        return list(
            certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
    return []
