"""Certificates for a run: an authority of its own, in a folder, and what it signs.

FOLDER/authority.pem    the authority's certificate: every process that dials trusts it
FOLDER/authority.key    what signs: it stays where the certificates are made
FOLDER/syncer.pem, .key     of the shards, for their hosts
FOLDER/NAME.pem, .key       of the process of this id, such as learner-0

A renewed certificate keeps its key, so that one file alone changes while processes run.
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
"""Names of this machine, which every syncer's certificate has."""

AUTHORITY_DAYS = 3650
BACKDATED = timedelta(minutes=5)
"""Certificates are valid a little before they are made: clocks of other machines may be behind."""

Key = ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Listed:
    """One certificate of a folder."""

    name: str
    names: tuple[str, ...]  # hosts, addresses and ids that it is for
    ends: datetime
    has_key: bool

    @property
    def days_left(self) -> float:
        return (self.ends - datetime.now(UTC)) / timedelta(days=1)


class CertificateFolder:
    """A folder with an authority and the certificates that it has signed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, hosts: Sequence[str], days: int) -> None:
        """Makes an authority, and the syncer's certificate.

        Raises:
            ConfigError: there is an authority already, or a host is none.
            StorageError: a file cannot be written.
        """
        if self._pem(AUTHORITY).exists():
            raise ConfigError(
                f"{self._pem(AUTHORITY)} is there already, and nothing is overwritten: use add or "
                "renew, or give another folder"
            )
        alternatives = list(map(_host, dict.fromkeys([*hosts, *LOCAL])))
        with _told(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        key, name = ec.generate_private_key(ec.SECP256R1()), _named("decoupled-diloco authority")
        self._write_key(AUTHORITY, key)
        self._write(AUTHORITY, _sign_itself(name, key, AUTHORITY_DAYS))
        self._issue(SYNCER, [*alternatives, x509.DNSName(SHARDS)], days)

    def add(self, names: Sequence[str], days: int) -> None:
        """Makes a certificate for each of these ids.

        Raises:
            ConfigError: one is there already, or can be no id; then none is made.
            StorageError: a file cannot be read or written.
        """
        for name in names:
            if not PRINCIPAL.fullmatch(name) or name in (AUTHORITY, SYNCER):
                raise ConfigError(
                    f"{name!r} can be no id: use letters, digits, '.', '_' or '-', as in learner-0"
                )
            if self._pem(name).exists() or self._key(name).exists():
                raise ConfigError(
                    f"{self._pem(name)} is there already, and nothing is overwritten: use renew, "
                    "or remove it and its key"
                )
        for name in dict.fromkeys(names):
            self._issue(name, [x509.DNSName(name)], days)

    def renew(self, names: Sequence[str], days: int, hosts: Sequence[str] = ()) -> list[str]:
        """Signs certificates again, with the keys and names that they have; returns which.

        Args:
            names: Which; default: all but the authority's own.
            hosts: Further ones of the syncer.

        Raises:
            ConfigError: there is none of that name, or its life would be too long.
            StorageError: a file cannot be read or written.
        """
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
            more = list(map(_host, hosts)) if name == SYNCER else []
            kept = _alternatives(self._certificate(name))
            self._issue(name, [*kept, *(each for each in more if each not in kept)], days)
        return chosen

    def listing(self) -> list[Listed]:
        """All certificates, the authority's first."""
        if not self._pem(AUTHORITY).exists():
            raise ConfigError(
                f"{self.path} has no authority.pem: make one with ddiloco certs create-ca "
                f"{self.path} --name HOST"
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
                f"days={days} is longer than the authority lives, to "
                f"{authority.not_valid_after_utc:%Y-%m-%d}: lower it, or ddiloco certs "
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
                f"{path} cannot be read: {error.strerror}: certificates are made where the "
                "authority's key is"
            ) from None
        except (ValueError, TypeError):
            raise StorageError(f"{path} is no private key without a passphrase") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise StorageError(f"{path} is not of the kind that this command makes")
        return key

    def _write(self, name: str, certificate: x509.Certificate) -> None:
        text = certificate.public_bytes(serialization.Encoding.PEM).decode()
        write_text(self._pem(name), text)

    def _write_key(self, name: str, key: Key) -> None:
        """A new file that nobody else can read, from the first byte on."""
        data = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        with _told(self._key(name)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(self._key(name), flags, 0o600), "wb") as file:
                file.write(data)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Makes what the system says of a file one sentence."""
    try:
        yield
    except DilocoError:
        raise
    except FileExistsError:
        raise ConfigError(
            f"{path} is there already, and nothing is overwritten: remove it, or give another "
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


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _host(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    if not name.isascii() or not name or "/" in name or ":" in name:
        raise ConfigError(
            f"--name {name!r} is no host: give a name or an address without http:// and port"
        )
    return x509.DNSName(name)


def hosts_of(path: Path) -> list[str]:
    """The names and addresses that a file's certificate is for, its first one's.

    Raises:
        StorageError: it cannot be read.
    """
    return [str(each.value) for each in _alternatives(_read(path))]


def _read(path: Path) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        _alternatives(certificate)  # they are parsed only when they are asked for
        return certificate
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, x509.InvalidVersion, x509.DuplicateExtension):
        raise StorageError(f"{path} is no certificate: remove it") from None


def _alternatives(certificate: x509.Certificate) -> list[x509.GeneralName]:
    with suppress(x509.ExtensionNotFound):
        return list(
            certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        )
    return []
