"""Certificates for tests, created by the code of the command."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from decoupled_diloco.launch import certificates
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.transport.tls import ServerTLSConfig, TLSConfig

PAST = timedelta(days=-400)
FUTURE = timedelta(days=400)


@functools.cache
def folder() -> Path:
    """Return one read-only folder for all tests of this process."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return made(path)


def made(path: Path, *names: str, host: str = "syncer.example") -> Path:
    """Create a folder with a CA, a certificate for the syncer, and certificates for learners."""
    found = CertificateFolder(path)
    found.begin([host], 30)
    found.add(names or ("learner-0", "learner-1", "evaluator"), 30)
    return path


def served(path: Path, *, mutual: bool = False, name: str = "syncer") -> ServerTLSConfig:
    """Return the TLS files of a server."""
    authority = path / "authority.pem" if mutual else None
    return ServerTLSConfig(path / f"{name}.pem", path / f"{name}.key", authority)


def dialled(path: Path, name: str | None = None) -> TLSConfig:
    """Return the TLS files of a client: the CA, and its own certificate if it has a name."""
    if name is None:
        return TLSConfig(path / "authority.pem")
    return TLSConfig(path / "authority.pem", path / f"{name}.pem", path / f"{name}.key")


def tables(path: Path) -> dict[str, str]:
    """Return a `[tls]` table with certificates for both sides."""
    return {
        "cert": f"{path}/syncer.pem",
        "key": f"{path}/syncer.key",
        "ca_cert": f"{path}/authority.pem",
        "client_ca_cert": f"{path}/authority.pem",
        "clients": str(path),
    }


@contextmanager
def another_day(later: timedelta) -> Iterator[None]:
    """Create certificates as if the clock were shifted."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + later

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "datetime", Shifted)
        yield
