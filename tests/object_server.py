"""Servers of S3, GCS and Azure, and a proxy before each that is slow or away on demand.

moto serves S3, and Azurite serves Azure. GCS has S3's requests with other conditions and another
quoting, which the proxy translates for moto.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import importlib.util
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

import pytest

from free_ports import free_ports

BUCKET = "bucket-of-tests"

Cloud = Literal["s3", "gs", "az"]

AZURE_VERSION = "2021-08-06"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = base64.b64encode(b"a key of the tests").decode()


def _require(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install -c constraints.txt --group dev")


def _azurite() -> str:
    """Return the program that serves Azure, which `make test` installs where there is npm."""
    places = [str(Path(sys.prefix) / "node_modules/.bin"), None]
    found = next(filter(None, (shutil.which("azurite-blob", path=each) for each in places)), None)
    if found is None:
        pytest.skip("azurite is not installed: npm install --prefix .venv azurite")
    return found


@dataclass
class ObjectServer:
    """A server with one bucket.

    Attributes:
        cloud: The scheme of its addresses.
        port: The port of the proxy, which processes use.
        away: Whether the proxy accepts no connection and cuts open ones.
        delay_seconds: How long the proxy holds each piece of a request back.
        refusal: The status and the error code with which the proxy answers instead of the server,
            such as ``"400 ExpiredToken"``.
    """

    cloud: Cloud
    direct: int
    port: int
    away: bool = False
    delay_seconds: float = 0.0
    refusal: str = ""
    _open: list[socket.socket] = field(default_factory=list)
    _creating: threading.Lock = field(default_factory=threading.Lock)
    """Held from a request that must create an object until its answer: moto's check is not atomic,
    as that of every cloud is."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process finds the server."""
        url = f"http://127.0.0.1:{self.port}"
        if self.cloud == "gs":
            return {"GOOGLE_BASE_URL": url, "GOOGLE_BEARER_TOKEN": "secret"}
        if self.cloud == "az":
            return {
                "AZURE_STORAGE_ENDPOINT": f"{url}/{ACCOUNT}",
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            }
        return {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

    def address(self, folder: str, bucket: str = BUCKET) -> str:
        return f"{self.cloud}://{bucket}/{folder}"

    def go_away(self) -> None:
        self.away = True
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def come_back(self) -> None:
        self.away = False

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # the test is over
            if self.away:
                connection.close()
                continue
            threading.Thread(target=self._pass_on, args=(connection,), daemon=True).start()

    def _pass_on(self, connection: socket.socket) -> None:
        with connection, socket.create_connection(("127.0.0.1", self.direct)) as server:
            self._open += [connection, server]
            with contextlib.suppress(OSError), contextlib.ExitStack() as creating:
                while not self.away:
                    ready, _, _ = select.select([connection, server], [], [], 0.2)
                    for each in ready:
                        piece = each.recv(1 << 16)
                        if not piece:
                            return
                        if each is connection and self.refusal:
                            connection.sendall(_refused(*self.refusal.split()))
                            return
                        if each is connection:
                            time.sleep(self.delay_seconds)
                            piece = _as_s3(piece) if self.cloud == "gs" else piece
                            if b"if-none-match: *" in piece.lower():
                                creating.enter_context(self._creating)
                        else:
                            creating.close()
                        (server if each is connection else connection).sendall(piece)


def _refused(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
    head = f"HTTP/1.1 {status} Refused\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"{head}\r\n\r\n{body}".encode()


def _as_s3(piece: bytes) -> bytes:
    """Return a request of GCS's client as one of S3's, or a piece of a body unchanged."""
    first, end, rest = piece.partition(b"\r\n")
    method, _, target = first.partition(b" ")
    if not target.endswith(b" HTTP/1.1"):
        return piece
    path, query = target.removesuffix(b" HTTP/1.1").decode().partition("?")[::2]
    path = quote(unquote(path)) + (query and f"?{query}")
    rest = rest.replace(b"x-goog-if-generation-match: 0\r\n", b"if-none-match: *\r\n", 1)
    return b"%s %s HTTP/1.1%s%s" % (method, path.encode(), end, rest)


@contextlib.contextmanager
def object_server(cloud: Cloud = "s3") -> Iterator[ObjectServer]:
    """Run a server with the bucket `BUCKET` until the block ends."""
    _require("obstore")
    direct = free_ports(1)[0]
    environment = dict(os.environ)
    if cloud == "az":
        command = [_azurite(), "--blobHost", "127.0.0.1", "--blobPort", str(direct)]
        command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"]
        environment["AZURITE_ACCOUNTS"] = f"{ACCOUNT}:{ACCOUNT_KEY}"
    else:
        _require("moto")
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(direct)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with (
        subprocess.Popen(command, env=environment, **silent) as process,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        server = ObjectServer(cloud, direct, listener.getsockname()[1])
        try:
            _make_bucket(cloud, direct)
            threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
            yield server
        finally:
            server.go_away()
            process.terminate()


def _make_bucket(cloud: Cloud, port: int) -> None:
    url = f"http://127.0.0.1:{port}/{BUCKET}"
    headers: dict[str, str] = {}
    if cloud == "az":
        url = f"http://127.0.0.1:{port}/{ACCOUNT}/{BUCKET}?restype=container"
        headers = _signed(f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container")
    request = urllib.request.Request(url, method="PUT", headers=headers)
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.2)


def _signed(resource: str) -> dict[str, str]:
    """Return the headers of a request to Azure that writes a resource without content."""
    headers = {
        "x-ms-date": email.utils.formatdate(usegmt=True),
        "x-ms-version": AZURE_VERSION,
    }
    lines = [f"{name}:{value}" for name, value in headers.items()]
    text = "\n".join(["PUT", *[""] * 11, *lines, resource])
    digest = hmac.digest(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256)
    signature = base64.b64encode(digest).decode()
    return {**headers, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
