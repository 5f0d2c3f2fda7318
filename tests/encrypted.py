"""Certificates that tests use, made by the command's own code."""

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
from decoupled_diloco.transport.tls import ServerTls, Tls

PAST = timedelta(days=-400)
FUTURE = timedelta(days=400)


@functools.cache
def folder() -> Path:
    """One folder for all tests of this process, which only read it."""
    path = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return made(path)


def made(path: Path, *names: str, host: str = "syncer.example") -> Path:
    """A folder with an authority, a syncer's certificate and learners'."""
    found = CertificateFolder(path)
    found.begin([host], 30)
    found.add(names or ("learner-0", "learner-1", "evaluator"), 30)
    return path


def served(path: Path, *, mutual: bool = False, name: str = "syncer") -> ServerTls:
    """What a server shows."""
    authority = path / "authority.pem" if mutual else None
    return ServerTls(path / f"{name}.pem", path / f"{name}.key", authority)


def dialled(path: Path, name: str | None = None) -> Tls:
    """What a client trusts, and shows."""
    if name is None:
        return Tls(path / "authority.pem")
    return Tls(path / "authority.pem", path / f"{name}.pem", path / f"{name}.key")


def tables(path: Path) -> dict[str, str]:
    """`[tls]` with certificates for both sides."""
    return {
        "certificate": f"{path}/syncer.pem",
        "key": f"{path}/syncer.key",
        "authority": f"{path}/authority.pem",
        "client_authority": f"{path}/authority.pem",
        "clients": str(path),
    }


@contextmanager
def another_day(later: timedelta) -> Iterator[None]:
    """Certificates are made as if it were so much later."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime.now(UTC) + later

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "datetime", Shifted)
        yield
