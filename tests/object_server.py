"""A server of S3 (moto) in a process, and a proxy before it that is slow or away on demand."""

from __future__ import annotations

import contextlib
import importlib.util
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from free_ports import free_ports

BUCKET = "bucket-of-tests"


def require_moto() -> None:
    for name in ("obstore", "moto"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -c constraints.txt 'moto[server]'")


@dataclass
class ObjectServer:
    """A server with one bucket.

    Attributes:
        port: The port of the proxy, which processes use.
        away: Whether the proxy accepts no connection and cuts open ones.
        delay_seconds: How long the proxy holds each piece of a request back.
        refusal: The status and the error code with which the proxy answers instead of the server,
            such as ``"400 ExpiredToken"``.
    """

    direct: int
    port: int
    away: bool = False
    delay_seconds: float = 0.0
    refusal: str = ""
    _open: list[socket.socket] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process finds the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }

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
            with contextlib.suppress(OSError):
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
                        (server if each is connection else connection).sendall(piece)


def _refused(status: str, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>"
    head = f"HTTP/1.1 {status} Refused\r\nContent-Length: {len(body)}\r\nConnection: close"
    return f"{head}\r\n\r\n{body}".encode()


@contextlib.contextmanager
def object_server() -> Iterator[ObjectServer]:
    """Run a server with the bucket `BUCKET` until the block ends."""
    require_moto()
    direct = free_ports(1)[0]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(direct)]
    with (
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        try:
            _make_bucket(f"http://127.0.0.1:{direct}/{BUCKET}")
            server = ObjectServer(direct, listener.getsockname()[1])
            threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
            yield server
        finally:
            server.go_away()
            process.terminate()


def _make_bucket(url: str) -> None:
    request = urllib.request.Request(url, method="PUT")
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except urllib.error.URLError:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.2)
