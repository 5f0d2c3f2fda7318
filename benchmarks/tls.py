"""What encryption costs the data plane, layer by layer: which one limits?

    python benchmarks/tls.py

Two processes on loopback, each on one core; the same bodies by one connection and by four at once:
raw sockets, OpenSSL on blocking sockets, asyncio's streams, and the data plane itself, each plain
and encrypted. The kinds take turns, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from evidence import keep

from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.tls import ServerTls, Tls

MIB, GIB = 1 << 20, 1 << 30
NBYTES = 64 * MIB
PIECE = 512 << 10
STREAMS_MAX = 4
REPETITIONS = 7
ESTIMATE = (
    "OpenSSL on blocking sockets 0.4 of a raw socket; asyncio's streams with TLS half of that, "
    "because it copies each record through memory; bodies over HTTPS no slower than those "
    "streams, 0.3 of bodies over HTTP; four connections as fast as one, because one core does "
    "all: so the limit is asyncio's TLS, neither OpenSSL nor this package"
)
Move = Callable[[str, int], Awaitable[None]]


def pin(core: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core % os.cpu_count()]})


# The far end.


async def serve(folder: Path) -> None:
    files = ServerTls(folder / "syncer.pem", folder / "syncer.key")
    ports = {"sockets": listen(None), "sockets TLS": listen(files.new_context())}
    for kind, context in (("streams", None), ("streams TLS", files.new_context())):
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context, limit=MIB)
        ports[kind] = server.sockets[0].getsockname()[1]
    body = memoryview(os.urandom(NBYTES))

    async def on_channel(channel: Channel) -> None:
        bodies = servers[(await channel.receive())["kind"]].bodies
        number = 0
        while message := await channel.receive():
            if message["do"] == "get":
                channel.send({"url": bodies.offer("down", body, "digest")})
                continue
            number += 1
            upload = bodies.expect(f"up/{number}", NBYTES, channel.peer.principal)
            channel.send({"url": upload.url})
            (await upload.body).release()

    servers: dict[str, HttpServer] = {}
    for kind, tls in (("bodies", None), ("bodies TLS", files)):
        servers[kind] = HttpServer(on_channel=on_channel, tls=tls, pool_bytes=4 * NBYTES)
        await servers[kind].start()
        ports[kind] = int(servers[kind].address.rsplit(":", 1)[1])
    print(json.dumps(ports), flush=True)
    await asyncio.sleep(3600)


def listen(context: ssl.SSLContext | None) -> int:
    """Blocking sockets, a thread for each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True)
        view, body = memoryview(bytearray(PIECE)), bytes(PIECE)
        while header := receive(connection, 9):
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


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := connection.recv(count - len(data))):
        data += piece
    return data


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    body = bytes(PIECE)
    while header := await reader.read(9):
        left = int.from_bytes(header[1:], "big")
        if header[:1] == b"P":
            while left:
                left -= len(await reader.read(min(PIECE, left)))
            writer.write(b"k")
        while left:
            writer.write(body[: min(PIECE, left)])
            await writer.drain()
            left -= min(PIECE, left)


# The near end: moves NBYTES in so many connections at once.


def by_sockets(port: int, context: ssl.SSLContext | None) -> Move:
    pool = ThreadPoolExecutor(STREAMS_MAX)
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(STREAMS_MAX)]
    if context is not None:
        connections = [context.wrap_socket(c, server_hostname="localhost") for c in connections]
    body, views = bytes(PIECE), [memoryview(bytearray(PIECE)) for _ in connections]

    def one(number: int, way: str, left: int) -> None:
        connection = connections[number]
        connection.sendall((b"P" if way == "put" else b"G") + left.to_bytes(8, "big"))
        while left and way == "put":
            connection.sendall(body[: min(PIECE, left)])
            left -= min(PIECE, left)
        while left:
            left -= connection.recv_into(views[number][: min(PIECE, left)])
        if way == "put":
            connection.recv(1)

    async def move(way: str, streams: int) -> None:
        loop = asyncio.get_running_loop()
        each = [loop.run_in_executor(pool, one, n, way, NBYTES // streams) for n in range(streams)]
        await asyncio.gather(*each)

    return move


async def by_streams(port: int, context: ssl.SSLContext | None) -> Move:
    name = None if context is None else "localhost"
    ends = [
        await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=name, limit=MIB
        )
        for _ in range(STREAMS_MAX)
    ]
    body = bytes(PIECE)

    async def one(number: int, way: str, left: int) -> None:
        reader, writer = ends[number]
        writer.write((b"P" if way == "put" else b"G") + left.to_bytes(8, "big"))
        while left and way == "put":
            writer.write(body[: min(PIECE, left)])
            await writer.drain()
            left -= min(PIECE, left)
        while left:
            left -= len(await reader.read(min(PIECE, left)))
        if way == "put":
            await reader.read(1)

    async def move(way: str, streams: int) -> None:
        await asyncio.gather(*(one(n, way, NBYTES // streams) for n in range(streams)))

    return move


async def by_bodies(kind: str, port: int, tls: Tls | None) -> tuple[Move, HttpClient]:
    scheme = "http" if tls is None else "https"
    client = HttpClient(tls=tls)
    channel = await client.connect(f"{scheme}://127.0.0.1:{port}", "learner", "learner-0")
    channel.send({"kind": kind})
    body, out = memoryview(bytearray(NBYTES)), memoryview(bytearray(NBYTES))

    async def move(way: str, streams: int) -> None:
        channel.send({"do": way})
        url, size = str((await channel.receive())["url"]), NBYTES // streams
        parts = range(0, NBYTES, size)
        if way == "put":
            each = [client.put(url, body[p : p + size], first=p, total=NBYTES) for p in parts]
        else:
            each = [client.get(url, out[p : p + size], first=p, total=NBYTES) for p in parts]
        await asyncio.gather(*each)

    return move, client


async def measure(folder: Path, ports: dict[str, int]) -> list[dict[str, Any]]:
    tls = Tls(folder / "authority.pem")
    moves: dict[str, Move] = {}
    clients = []
    for suffix, context, own in (("", None, None), (" TLS", tls.new_context(), tls)):
        moves[f"sockets{suffix}"] = by_sockets(ports[f"sockets{suffix}"], context)
        moves[f"streams{suffix}"] = await by_streams(ports[f"streams{suffix}"], context)
        kind = f"bodies{suffix}"
        moves[kind], client = await by_bodies(kind, ports[kind], own)
        clients.append(client)
    runs = []
    for repetition in range(REPETITIONS + 1):
        for kind, move in moves.items():
            for way in ("put", "get"):
                for streams in (1, STREAMS_MAX):
                    began, busy = time.monotonic(), time.process_time()
                    await move(way, streams)
                    row = {"kind": kind, "way": way, "streams": streams}
                    row["seconds"] = time.monotonic() - began
                    row["client_cpu_seconds"] = time.process_time() - busy
                    if repetition:  # the first one opens connections
                        runs.append(row)
    for client in clients:
        await client.close()
    return runs


def in_memory(folder: Path) -> dict[str, float]:
    """OpenSSL alone, no socket: MiB a second of a core that encrypts, and of one that decrypts."""
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = Tls(folder / "authority.pem").new_context()
    theirs = ServerTls(folder / "syncer.pem", folder / "syncer.key").new_context()
    client = ours.wrap_bio(there, here, server_hostname="localhost")
    server = theirs.wrap_bio(here, there, server_side=True)
    for _ in range(3):
        for end in (client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    view, body = memoryview(bytearray(PIECE)), bytes(PIECE)
    seconds = {"encrypts": 0.0, "decrypts": 0.0}
    for _ in range(4 * NBYTES // PIECE):
        began = time.process_time()
        client.write(body)
        written, left = time.process_time(), PIECE
        while left:
            left -= server.read(left, view)
        seconds["encrypts"] += written - began
        seconds["decrypts"] += time.process_time() - written
    return {what: 4 * NBYTES / MIB / spent for what, spent in seconds.items()}


def summarise(runs: list[dict[str, Any]], alone: dict[str, float]) -> dict[str, Any]:
    """MiB a second, what is left of each layer's own plain rate, and what the client computes."""
    result: dict[str, Any] = {}
    for what, rate in alone.items():
        text = f"{rate:.0f} MiB/s, {GIB / MIB / rate:.2f} CPU seconds a GiB"
        result[f"OpenSSL alone, without sockets, {what}"] = text
    for way in ("put", "get"):
        for streams in (1, STREAMS_MAX):
            rates: dict[str, float] = {}
            for layer in ("sockets", "streams", "bodies"):
                for kind in (layer, f"{layer} TLS"):
                    each = [
                        NBYTES / MIB / r["seconds"]
                        for r in runs
                        if (r["kind"], r["way"], r["streams"]) == (kind, way, streams)
                    ]
                    rates[kind] = max(each)  # the least disturbed one
            words = [
                f"{layer} {rates[layer]:.0f} → {rates[f'{layer} TLS']:.0f} "
                f"({rates[f'{layer} TLS'] / rates[layer]:.2f})"
                for layer in ("sockets", "streams", "bodies")
            ]
            of = [r for r in runs if (r["way"], r["streams"]) == (way, streams)]
            spent = {
                kind: statistics.median(
                    r["client_cpu_seconds"] / (NBYTES / GIB) for r in of if r["kind"] == kind
                )
                for kind in rates
            }
            many = "1 connection" if streams == 1 else f"{streams} connections"
            result[f"{way.upper()}, {many}: best MiB/s, plain → TLS (left)"] = ", ".join(words)
            what = f"{way.upper()}, {many}: the client's CPU seconds a GiB, plain → TLS"
            result[what] = ", ".join(
                f"{layer} {spent[layer]:.2f} → {spent[f'{layer} TLS']:.2f}"
                for layer in ("sockets", "streams", "bodies")
            )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        pin(1)
        asyncio.run(serve(arguments.serve))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        CertificateFolder(folder).begin([], 30)
        far = subprocess.Popen(
            [sys.executable, __file__, "--serve", name], stdout=subprocess.PIPE, text=True
        )
        try:
            assert far.stdout is not None
            ports = json.loads(far.stdout.readline())
            pin(0)
            alone = in_memory(folder)
            runs = asyncio.run(measure(folder, ports))
        finally:
            far.kill()
            far.wait()
    config = {"nbytes": NBYTES, "repetitions": REPETITIONS, "openssl": ssl.OPENSSL_VERSION}
    keep(
        "tls",
        estimate=ESTIMATE,
        config=config,
        raw={"runs": runs, "in_memory": alone},
        result=summarise(runs, alone),
        not_measured="a real network card, kernel TLS, several learners, ciphers other than the "
        "one that OpenSSL chooses (AES-256-GCM)",
    )


if __name__ == "__main__":
    main()
