"""User-space wires with an echo server at the far end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from decoupled_diloco.errors import TransportError
from decoupled_diloco_lab.chaos.proxy import Links
from decoupled_diloco_lab.simulate.choices import Choices


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that sends back all data that it receives."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    yield server.getsockname()[1]
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links(seed=3)
    yield links
    links.close()


def connect(links: Links, port: int, process: str = "learner-0") -> socket.socket:
    if not links.wires(process, port):
        links.dial(process, (f"http://127.0.0.1:{port}",))
    connection = socket.create_connection((links.host(process), port), timeout=5.0)
    connection.settimeout(5.0)
    return connection


def echoed(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    got = b""
    while len(got) < len(data):
        piece = connection.recv(65536)
        if not piece:
            break
        got += piece
    return got


def silent(connection: socket.socket, seconds: float = 0.3) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) is None
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5.0)


def test_data_and_end_of_stream_are_forwarded(links: Links, echo: int) -> None:
    addresses = links.dial("learner-0", (f"http://127.0.0.1:{echo}",))
    assert addresses == (f"http://{links.host('learner-0')}:{echo}",)
    body = bytes(range(256)) * 4096
    with connect(links, echo) as connection:
        sender = threading.Thread(target=connection.sendall, args=(body,))
        sender.start()
        got = b""
        while len(got) < len(body):
            got += connection.recv(65536)
        sender.join()
        assert got == body
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b"", "the end of the stream is forwarded"


def test_a_cut_is_silent_and_stalled_data_arrives_when_it_heals(links: Links, echo: int) -> None:
    with connect(links, echo) as connection, connect(links, echo, "learner-1") as other:
        assert echoed(connection, b"a") == b"a"
        links.cut(links.wires("learner-0"), up=True, down=True)
        links.cut(links.wires("learner-0"), up=True, down=False)
        connection.sendall(b"b")
        assert silent(connection)
        assert echoed(other, b"x") == b"x", "another process's wire is not affected"
        links.heal(links.wires("learner-0"), up=True, down=True)
        assert silent(connection), "one cut of two is left"
        links.heal(links.wires("learner-0"), up=True, down=False)
        assert connection.recv(1) == b"b"


def test_a_cut_in_one_direction_lets_the_other_pass(links: Links, echo: int) -> None:
    with connect(links, echo) as connection:
        assert echoed(connection, b"a") == b"a"
        links.cut(links.wires("learner-0"), up=False, down=True)
        connection.sendall(b"b")
        time.sleep(0.2)
        links.heal(links.wires("learner-0"), up=False, down=True)
        links.cut(links.wires("learner-0"), up=True, down=False)
        assert connection.recv(1) == b"b", "it had reached the server"
        connection.sendall(b"c")
        assert silent(connection)


def test_a_broken_connection_is_lost_and_a_new_one_works(links: Links, echo: int) -> None:
    with connect(links, echo) as connection:
        assert echoed(connection, b"a") == b"a"
        links.break_connections(links.wires(port=echo))
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    with connect(links, echo) as connection:
        assert echoed(connection, b"a") == b"a"


def test_an_unreachable_far_end_resets_the_connection(links: Links) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionResetError), connect(links, port) as connection:
        connection.recv(1)


def test_delay_and_loss_postpone_data_and_corruption_changes_it(links: Links, echo: int) -> None:
    with connect(links, echo) as connection:
        (wire,) = links.wires("learner-0")
        wire.delay_seconds = 0.15
        begun = time.monotonic()
        assert echoed(connection, b"a") == b"a"
        assert time.monotonic() - begun >= 0.3
        wire.delay_seconds = 0.0
        wire.losses.append(0.4)
        wire.choices = Choices(2)
        begun = time.monotonic()
        for _ in range(4):
            assert echoed(connection, b"a") == b"a"
        assert time.monotonic() - begun >= 0.2
        wire.losses.clear()
        wire.corruptions.append(0.999)
        sent = bytes(64)
        got = echoed(connection, sent)
        assert len(got) == len(sent)
        assert got != sent


def test_a_port_in_use_is_reported(links: Links, echo: int) -> None:
    with (
        socket.create_server((links.host("learner-0"), echo)),
        pytest.raises(TransportError, match="cannot listen"),
    ):
        links.dial("learner-0", (f"http://127.0.0.1:{echo}",))
