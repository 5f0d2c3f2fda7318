"""Payloads over the data plane, and equal bytes over sockets, for `data_plane` and `tls`."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from typing import Any

from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.interface import Channel

MIB, GIB = 1 << 20, 1 << 30
PIECE = 512 << 10


def listen(host: str = "127.0.0.1", context: ssl.SSLContext | None = None) -> int:
    """Start a server of blocking sockets that receives or sends bytes; return its port."""
    listener = socket.create_server((host, 0))

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        view, body = memoryview(bytearray(PIECE)), bytes(PIECE)
        while header := _receive(connection, 9):
            left = int.from_bytes(header[1:], "big")
            while left and header[:1] == b"P":
                left -= connection.recv_into(view[: min(PIECE, left)])
            while left:
                connection.sendall(body[: min(PIECE, left)])
                left -= min(PIECE, left)
            if header[:1] == b"P":
                connection.sendall(b"k")

    threading.Thread(target=accept, daemon=True).start()
    return int(listener.getsockname()[1])


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


def header_of(way: str, nbytes: int) -> bytes:
    """Return the header by which `listen` receives (``way="put"``) or sends ("get") these bytes."""
    return way[:1].upper().encode() + nbytes.to_bytes(8, "big")


def move(connection: socket.socket, way: str, view: memoryview, nbytes: int) -> None:
    """Send ``nbytes`` to `listen`, or receive them; a smaller ``view`` is reused."""
    connection.sendall(header_of(way, nbytes))
    left = nbytes
    while left:
        at = (nbytes - left) % len(view)
        part = view[at : at + min(MIB, left)]
        if way == "put":
            connection.sendall(part)
            left -= len(part)
        else:
            left -= connection.recv_into(part)
    if way == "put":
        connection.recv(1)


def body_server(nbytes: int, **settings: Any) -> HttpServer:
    """Return a server that expects or offers payloads of one size on request over its channels."""
    body = memoryview(os.urandom(nbytes))

    async def on_channel(channel: Channel) -> None:
        number = 0
        while message := await channel.receive():
            if message["do"] == "get":
                channel.send({"url": server.bodies.offer("down", body, "digest")})
                continue
            number += 1
            upload = server.bodies.expect(f"up/{number}", nbytes, channel.peer.principal)
            channel.send({"url": upload.url})
            (await upload.body).release()

    server = HttpServer(on_channel=on_channel, pool_bytes=4 * nbytes, **settings)
    return server


async def url_of(channel: Any, way: str) -> str:
    """Return the URL of the next payload."""
    channel.send({"do": way})
    return str((await channel.receive())["url"])
