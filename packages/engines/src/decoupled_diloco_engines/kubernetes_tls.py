"""Certificates in a cluster: the files in each Secret, and their paths in the pods.

```
Secret RUN-tls       ca.crt, tls.crt, tls.key, client-ca.crt   certificate, key and CAs of the
shards
Secret RUN-clients   learner-N.pem, learner-N.key, evaluator…, certificates and keys of clients and
                     SITE.pem, SITE.key                        relays
```

The names in the first Secret are those of Kubernetes and cert-manager. A client pod gets only
`ca.crt` from it, and none of the shards' keys. The pod of a single learner (JobSet, TrainJob), and
the evaluator's, gets its own two files from the second Secret. The pods of an Indexed Job have the
same template, so they get all files. A relay serves with its own certificate. Without one, its pod
gets the files of the shards. Changed Secrets are updated in running pods, because no file
is mounted by `subPath`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from decoupled_diloco.config import RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.launch.processes import EVALUATOR
from decoupled_diloco.launch.secrets import own_tls, served_tls
from decoupled_diloco.transport.tls import LiveTls

Manifest = dict[str, Any]

MOUNTED = "/etc/decoupled-diloco/tls"
COPIES = "tls"
"""Subfolder of the launch folder with copies, because `kubectl` reads no files outside of it."""

SECRET_BYTES_MAX = 1_000_000
"""Size limit of a Secret; that of Kubernetes is 1 MiB."""

_OF_SHARDS = {
    "cert": "tls.crt",
    "key": "tls.key",
    "ca_cert": "ca.crt",
    "client_ca_cert": "client-ca.crt",
}
"""Entry of the shards' Secret for each setting of [tls]."""


def secret_files(config: RunConfig) -> dict[str, dict[str, Path]]:
    """Return the entries of each Secret, and their source files."""
    tls, name = config.tls, config.run.name
    server = {key: getattr(tls, each) for each, key in _OF_SHARDS.items() if getattr(tls, each)}
    clients = tls.clients and {
        f"{dials}.{kind}": tls.clients / f"{dials}.{kind}"
        for dials in _dialling(config)
        for kind in ("pem", "key")
    }
    found = {f"{name}-tls": server, f"{name}-clients": clients or {}}
    return {secret: files for secret, files in found.items() if files}


def generators(config: RunConfig) -> list[Manifest]:
    """Return the secretGenerator entries for kustomize."""
    return [
        {
            "name": secret,
            "type": "kubernetes.io/tls" if "tls.key" in files else "Opaque",
            "files": [f"{key}={COPIES}/{copy_of(key)}" for key in files],
        }
        for secret, files in secret_files(config).items()
    ]


def copy_of(key: str) -> str:
    """Return the file name of an entry in the launch folder, as `ddiloco certs` uses it.

    >>> copy_of("tls.key"), copy_of("learner-0.pem")
    ('syncer.key', 'learner-0.pem')
    """
    names = {"tls.crt": "syncer.pem", "tls.key": "syncer.key", "ca.crt": "authority.pem"}
    return {**names, "client-ca.crt": "client_authority.pem"}.get(key, key)


def pod_settings(config: RunConfig, role: str) -> dict[str, str]:
    """Return the paths of a process's files, as settings for ``--set``."""
    paths = {f"tls.{each}": f"{MOUNTED}/{key}" for each, key in _of_shards(config, role).items()}
    has_own = config.tls.clients and role != "syncer"
    return paths | ({"tls.clients": MOUNTED} if has_own else {})


def _of_shards(config: RunConfig, role: str) -> dict[str, str]:
    """Return the entries of the shards' Secret that a role gets, by their settings."""
    if role == "syncer" or (role == "relay" and config.tls.clients is None):
        got = set(_OF_SHARDS)
    else:
        got = {"ca_cert", "client_ca_cert"} if role == "relay" else {"ca_cert"}
    return {
        each: key for each, key in _OF_SHARDS.items() if each in got and getattr(config.tls, each)
    }


def volume(config: RunConfig, role: str, alone: str = "") -> list[Manifest]:
    """Return the volume of a pod, or no volume without certificates.

    Args:
        config: The run's settings.
        role: "syncer", "relay", or the role of a client.
        alone: Id of the only client in this kind of pod; empty for pods that share a template.
    """
    paths, name = pod_settings(config, role), config.run.name
    if not paths:
        return []
    if "tls.key" in paths:
        secret = {"secretName": f"{name}-tls", "defaultMode": 0o440}
        return [{"name": "tls", "secret": secret}]
    sources: list[Manifest] = []
    if shown := _of_shards(config, role).values():
        items = [{"key": key, "path": key} for key in shown]
        sources.append({"secret": {"name": f"{name}-tls", "items": items}})
    if "tls.clients" in paths:
        source: Manifest = {"name": f"{name}-clients"}
        if alone:
            own = (f"{alone}.pem", f"{alone}.key")
            source["items"] = [{"key": key, "path": key} for key in own]
        sources.append({"secret": source})
    return [{"name": "tls", "projected": {"defaultMode": 0o440, "sources": sources}}]


def require_certificates(
    config: RunConfig, addresses: Iterable[str], relays: Mapping[str, str]
) -> None:
    """Check the files of [tls] before a pod uses them.

    Args:
        config: The run's settings.
        addresses: Addresses of the shards.
        relays: Address of each relay, by its name.

    Raises:
        ConfigError: A file is missing, invalid or too large, or does not name a shard or a relay.
            Or the settings require certificates of clients and provide none.
    """
    tls = config.tls
    if tls.serves and tls.ca_cert is None:
        raise ConfigError(
            "cert in [tls] needs ca_cert on Kubernetes, because no public CA signs "
            "cluster-internal names: set ca_cert, too"
        )
    if tls.client_ca_cert is not None and tls.clients is None:
        raise ConfigError(
            "client_ca_cert in [tls] needs clients on Kubernetes: set clients "
            "to the folder with a certificate for each learner and for the evaluator"
        )
    for name in _dialling(config):
        own = own_tls(config, name)
        if own is not None:
            LiveTls(own)
    served = served_tls(config)
    if served is not None:
        LiveTls(served)
        _require_named(served.cert, "syncer", addresses)
        for relay, address in relays.items():
            certificate = tls.clients / f"{relay}.pem" if tls.clients else served.cert
            _require_named(certificate, relay if tls.clients else "syncer", [address])
    for secret, files in secret_files(config).items():
        size = sum(path.stat().st_size for path in files.values())
        if size > SECRET_BYTES_MAX:
            raise ConfigError(
                f"Secret {secret} would have {size} bytes, more than {SECRET_BYTES_MAX}: leave "
                "clients and client_ca_cert in [tls] out, so that tokens are used for "
                "authentication"
            )


def _require_named(certificate: Path, owner: str, addresses: Iterable[str]) -> None:
    from decoupled_diloco.launch.certificates import hosts_of  # needs the extra `tls`

    names = hosts_of(certificate)
    hosts = [urlsplit(each).hostname or "" for each in addresses]
    absent = [host for host in hosts if not any(_covers(name, host) for name in names)]
    if absent:
        above = {f"'*.{host.partition('.')[2]}'" for host in absent if not _is_address(host)}
        missing = sorted(above) + [host for host in absent if _is_address(host)]
        raise ConfigError(
            f"{str(certificate)!r} in [tls] does not name {absent[0]}, the address of a shard or a "
            f"relay: ddiloco certs renew FOLDER {owner} "
            + " ".join(f"--host {each}" for each in missing)
        )


def _covers(name: str, host: str) -> bool:
    """Return a client's decision: ``*`` stands for the first part of a name.

    >>> _covers("*.syncer.ns.svc", "shard-0.syncer.ns.svc"), _covers("*.ns.svc", "a.b.ns.svc")
    (True, False)
    """
    name, host = name.lower(), host.lower()
    return name == host or (name.startswith("*.") and name[2:] == host.partition(".")[2])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _dialling(config: RunConfig) -> Iterator[str]:
    yield from config.learner_ids
    yield from (site.name for site in config.sites)
    if config.run.evaluator:
        yield EVALUATOR
