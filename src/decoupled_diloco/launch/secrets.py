"""Auth tokens and certificates of each process: one token for the run or one per id."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.config.resume import RUN_FILE
from decoupled_diloco.config.signing_keys import SigningKey, create_signing_key, load_signing_key
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.run_folder import TOKEN, read_token
from decoupled_diloco.syncer.audit_trail import AUDIT
from decoupled_diloco.transport.tls import ServerTLSConfig, TLSConfig
from decoupled_diloco.transport.tokens import Tokens


def accepted_tokens(config: RunConfig, token: str | None) -> Tokens:
    """Return the tokens that a shard accepts: one per id with `principals_file`, or ``token``."""
    path, certificates = config.syncer.principals_file, config.tls.client_ca_cert is not None
    if path is None:
        return Tokens(token, certificates=certificates)
    relays = config.represented()
    return Tokens(principals=read_principals(path), certificates=certificates, relays=relays)


def require_relay_certificates(config: RunConfig) -> None:
    """Check that each relay's certificate names all processes that the relay represents.

    Raises:
        ConfigError: One does not, or `clients` in `[tls]` has no certificate for a relay.
    """
    folder = config.tls.clients
    if folder is None or config.tls.client_ca_cert is None or not config.sites:
        return
    from decoupled_diloco.launch.certificates import hosts_of  # needs the extra `tls`

    for relay, names in config.represented().items():
        own_tls(config, relay)  # raises if the relay has no certificate
        certificate = folder / f"{relay}.pem"
        missing = ",".join(sorted(set(names) - set(hosts_of(certificate))))
        if missing:
            raise ConfigError(
                f"the certificate {certificate} does not name {missing}, which [[sites]] lists for "
                f"site {relay!r}: run ddiloco certs renew {folder} {relay} --represents {missing}"
            )


def signing_key_of(config: RunConfig, shard: int, folder: Path) -> SigningKey | None:
    """Return the key that signs a shard's audit trail; `None`: the run has no parties.

    Without a key in the settings, a shard creates its own in the run folder.

    Raises:
        ConfigError: The key cannot be read, or parties.toml names another one.
        StorageError: It cannot be written.
    """
    path, privacy = config.syncer.signing_key, config.privacy
    if path is None and not privacy.members:
        return None
    if path is None:
        path = folder / AUDIT / f"shard-{shard}.key"
        if not path.exists():
            with suppress(ConfigError):  # the standby has just created it
                create_signing_key(path)
        key = load_signing_key(path)
    else:
        key = load_signing_key(path)
    if privacy.syncer_key is not None and key.public != privacy.syncer_key:
        raise ConfigError(
            f"signing key {str(path)!r} belongs to {key.public}, but parties.toml has "
            f"syncer_key={str(privacy.syncer_key)!r}: set signing_key in [syncer] to the key that "
            "the parties have agreed on"
        )
    return key


def needs_token(config: RunConfig) -> bool:
    """Whether the launcher must create a token if the user provides none."""
    return config.tls.client_ca_cert is None


def served_tls(config: RunConfig, own: TLSConfig | None = None) -> ServerTLSConfig | None:
    """Return the certificate of a server and the CA of its clients; `None` for plain HTTP.

    Args:
        config: The run's settings.
        own: The files of a relay. With its own certificate it needs no key of the shards.
    """
    tls = config.tls
    cert, key = (own.cert, own.key) if own and own.cert else (tls.cert, tls.key)
    if cert is None or key is None:
        return None
    return ServerTLSConfig(Path(cert), Path(key), tls.client_ca_cert)


def own_tls(config: RunConfig, name: str, given: TLSConfig | None = None) -> TLSConfig | None:
    """Return the CA that this process trusts and the certificate that it presents.

    A shard presents its server certificate.

    Args:
        config: The run's settings.
        name: The id of the process.
        given: Files from the command line, which override the settings.

    Raises:
        ConfigError: The folder of certificates has none for this id.
    """
    tls = config.tls
    authority: str | Path | None = tls.ca_cert
    certificate: str | Path | None = None
    key: str | Path | None = None
    if name.startswith("shard-"):
        certificate, key = (tls.cert, tls.key) if tls.client_ca_cert else (None, None)
    elif tls.clients is not None and (given is None or given.cert is None):
        certificate, key = tls.clients / f"{name}.pem", tls.clients / f"{name}.key"
        if not Path(certificate).exists():
            raise ConfigError(
                f"clients={str(tls.clients)!r} in [tls] has no {name}.pem: create it with ddiloco "
                f"certs add FOLDER {name}, or pass --cert and --key"
            )
    if given is not None:
        authority = given.ca_cert or authority
        certificate, key = given.cert or certificate, given.key or key
    return TLSConfig(authority, certificate, key) if authority or certificate else None


def own_token(config: RunConfig, name: str, token_file: Path | None = None) -> str | None:
    """Return the auth token of the process with this id; `None` if there is none.

    Args:
        config: The run's settings.
        name: The id of the process.
        token_file: A file from the command line, which overrides the settings.

    Raises:
        ConfigError: A file cannot be read, or has no secret for this id.
    """
    path = config.syncer.principals_file
    if token_file is not None or path is None:
        return read_token(token_file or config.syncer.token_file)
    principals = read_principals(path)
    require_principals(path, principals, [name])
    return principals[name]


def own_token_file(
    config: RunConfig, name: str, token_file: Path | None, folder: Path
) -> Path | None:
    """Return the file with the auth token of this id, for a user's program that reads it.

    If one file has the secrets of all ids, the secret of this id is copied into the run folder.

    Raises:
        ConfigError: A file cannot be read, or has no secret for this id.
    """
    secret = own_token(config, name, token_file)  # raises before the program starts
    if token_file is not None or config.syncer.principals_file is None:
        return token_file or config.syncer.token_file
    assert secret is not None
    path = folder / "tokens" / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret + "\n")
    return path


def token_of_a_reader(config: RunConfig, token: str | None) -> str | None:
    """Return a token for a process on shard 0's machine that only reads: one that may see all."""
    path, parties = config.syncer.principals_file, config.privacy.agreed
    if token is not None or path is None:
        return token
    principals = read_principals(path)
    names = (name for name in principals if parties is None or parties.viewer([name]) is None)
    return principals[next(names, next(iter(principals)))]


def secrets_in(
    folder: Path, token_file: Path | None, given: TLSConfig | None
) -> tuple[str | None, TLSConfig | None]:
    """Return the token and TLS files for a command on the syncer's machine.

    They come from the settings in a run folder. With certificates, the command uses the shards'.

    Args:
        folder: The run folder.
        token_file: Overrides the settings.
        given: TLS files that override the settings.

    Raises:
        ConfigError: A file cannot be read.
    """
    if not (folder / RUN_FILE).is_file():
        return read_token(token_file), given
    config = load_config(folder / RUN_FILE, plugins=False)
    created = folder / TOKEN
    path = token_file or config.syncer.token_file or (created if created.exists() else None)
    return token_of_a_reader(config, read_token(path)), own_tls(config, "shard-0", given)


def require_principals(path: Path, principals: Mapping[str, str], names: Iterable[str]) -> None:
    """Check that all of these ids have a secret.

    Raises:
        ConfigError: One has none.
    """
    for name in names:
        if name not in principals:
            raise ConfigError(
                f"principals_file={str(path)!r} has no secret for {name!r}: add a line "
                f'{name} = "…" with a different secret'
            )


def read_principals(path: Path) -> dict[str, str]:
    """Return the secret of each id in a file.

    Raises:
        ConfigError: The file cannot be read, or has other lines than ``id = "secret"``.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"principals_file={str(path)!r} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        # Syntax errors of TOML and of UTF-8. The text is secret, so the message does not quote it.
        raise ConfigError(
            f'principals_file={str(path)!r} is not TOML: write a line id = "secret" for each id'
        ) from error
    if not table or not all(isinstance(secret, str) for secret in table.values()):
        raise ConfigError(
            f'principals_file={str(path)!r} must hold a line id = "secret" for each id, and '
            "nothing else"
        )
    return table
