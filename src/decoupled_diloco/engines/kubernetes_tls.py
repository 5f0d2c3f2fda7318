"""Certificates in a cluster: which file becomes what of which Secret, and where a pod has it.

```
Secret RUN-tls       ca.crt, tls.crt, tls.key, client-ca.crt   what the shards show and trust
Secret RUN-clients   learner-N.pem, learner-N.key, evaluator…  what those show that dial them
```

The names of the first are those of Kubernetes and of cert-manager. A pod that dials gets `ca.crt`
of it, and no key of the shards. One of a learner alone (JobSet, TrainJob), and the evaluator's, get
their own two files of the second; the pods of an Indexed Job are all made alike, and get all. A
Secret that changes changes in running pods, too: no file is mounted by `subPath`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
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
"""Folder in the launch folder: `kubectl` reads no file outside of it."""

SECRET_BYTES_MAX = 1_000_000
"""Kubernetes takes a Secret of a MiB."""

_OF_SHARDS = {
    "certificate": "tls.crt",
    "key": "tls.key",
    "authority": "ca.crt",
    "client_authority": "client-ca.crt",
}
"""What each setting of [tls] is called in the shards' Secret."""


def secret_files(config: RunConfig) -> dict[str, dict[str, Path]]:
    """Of each Secret its entries, and the files that they are made of."""
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
    """What makes the Secrets, for kustomize."""
    return [
        {
            "name": secret,
            "type": "kubernetes.io/tls" if "tls.key" in files else "Opaque",
            "files": [f"{key}={COPIES}/{copy_of(key)}" for key in files],
        }
        for secret, files in secret_files(config).items()
    ]


def copy_of(key: str) -> str:
    """What an entry's file is called in the launch folder: as `ddiloco certificates` does.

    >>> copy_of("tls.key"), copy_of("learner-0.pem")
    ('syncer.key', 'learner-0.pem')
    """
    names = {"tls.crt": "syncer.pem", "tls.key": "syncer.key", "ca.crt": "authority.pem"}
    return {**names, "client-ca.crt": "client_authority.pem"}.get(key, key)


def pod_settings(config: RunConfig, role: str) -> dict[str, str]:
    """Where a process finds its files, as it is told by ``--set``."""
    tls = config.tls
    if role == "syncer":
        given = {each: key for each, key in _OF_SHARDS.items() if getattr(tls, each)}
        return {f"tls.{each}": f"{MOUNTED}/{key}" for each, key in given.items()}
    told = {"tls.authority": f"{MOUNTED}/ca.crt"} if tls.authority else {}
    return told | ({"tls.clients": MOUNTED} if tls.clients else {})


def volume(config: RunConfig, role: str, alone: str = "") -> list[Manifest]:
    """The volume of a pod; none without certificates.

    Args:
        role: "syncer", or what dials.
        alone: The id that the pod dials with, if all pods of its kind do.
    """
    told, name = pod_settings(config, role), config.run.name
    if not told:
        return []
    if role == "syncer":
        secret = {"secretName": f"{name}-tls", "defaultMode": 0o440}
        return [{"name": "tls", "secret": secret}]
    sources: list[Manifest] = []
    if "tls.authority" in told:
        items = [{"key": "ca.crt", "path": "ca.crt"}]
        sources.append({"secret": {"name": f"{name}-tls", "items": items}})
    if "tls.clients" in told:
        source: Manifest = {"name": f"{name}-clients"}
        if alone:
            own = (f"{alone}.pem", f"{alone}.key")
            source["items"] = [{"key": key, "path": key} for key in own]
        sources.append({"secret": source})
    return [{"name": "tls", "projected": {"defaultMode": 0o440, "sources": sources}}]


def require_certificates(config: RunConfig, addresses: Iterable[str]) -> None:
    """Looks at the files of [tls] before a pod does.

    Raises:
        ConfigError: one lacks, is not valid, or does not name a shard; or the settings have pods
            show nothing where something is asked for.
    """
    tls = config.tls
    if tls.serves and tls.authority is None:
        raise ConfigError(
            "certificate in [tls] without authority does not go with Kubernetes, whose names no "
            "public authority signs: give authority, too"
        )
    if tls.client_authority is not None and tls.clients is None:
        raise ConfigError(
            "client_authority in [tls] without clients does not go with Kubernetes: set clients "
            "to the folder with a certificate for each learner and for the evaluator"
        )
    for name in _dialling(config):
        own = own_tls(config, name)
        if own is not None:
            LiveTls(own)
    served = served_tls(config)
    if served is not None:
        LiveTls(served)
        _require_named(served.certificate, [urlsplit(each).hostname or "" for each in addresses])
    for secret, files in secret_files(config).items():
        size = sum(path.stat().st_size for path in files.values())
        if size > SECRET_BYTES_MAX:
            raise ConfigError(
                f"the Secret {secret} would have {size} bytes, and Kubernetes takes "
                f"{SECRET_BYTES_MAX}: leave clients and client_authority in [tls] out, so that "
                "tokens decide"
            )


def _require_named(certificate: Path, dialled: Iterable[str]) -> None:
    from decoupled_diloco.launch.certificates import hosts_of  # of the extra tls, as `LiveTls` said

    names = hosts_of(certificate)
    absent = [host for host in dialled if not any(_covers(name, host) for name in names)]
    if absent:
        above = {f"'*.{host.partition('.')[2]}'" for host in absent if not _is_address(host)}
        told = sorted(above) + [host for host in absent if _is_address(host)]
        raise ConfigError(
            f"certificate={str(certificate)!r} in [tls] does not name {absent[0]}, where a shard "
            "is dialled: ddiloco certificates renew FOLDER syncer "
            + " ".join(f"--name {each}" for each in told)
        )


def _covers(name: str, host: str) -> bool:
    """As a client decides: ``*`` stands for the first part of a name.

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
    if config.run.evaluator:
        yield EVALUATOR
