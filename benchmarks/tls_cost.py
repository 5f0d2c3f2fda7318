"""Cost of encryption for the data plane, layer by layer, to find the limiting one.

    python benchmarks/tls_cost.py

Two processes on loopback, each on one core. The same payloads go over one connection, and over four
at once. The layers are raw sockets, OpenSSL on blocking sockets, asyncio's streams and the data
plane, each with and without TLS. They run in turns, so that other load on the machine affects all
of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from bench_runs import called, serving
from bodies import GIB, MIB, PIECE, body_server, header_of, listen, move, url_of
from evidence import keep, options

from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.tls import ServerTLSConfig, TLSConfig

NBYTES = 64 * MIB
STREAMS_MAX = 4
REPETITIONS = 7
LAYERS, WAYS = ("sockets", "streams", "payloads"), ("put", "get")
Move = Callable[[str, int], Awaitable[None]]


def pin(core: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core % os.cpu_count()]})


# The far end.


def serve(folder: str) -> None:
    pin(1)
    asyncio.run(_serve(Path(folder)))


async def _serve(folder: Path) -> None:
    files = ServerTLSConfig(folder / "syncer.pem", folder / "syncer.key")
    ports = {}
    for suffix, tls in (("", None), (" TLS", files)):
        context = None if tls is None else tls.new_context()
        ports[f"sockets{suffix}"] = listen(context=context)
        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context, limit=MIB)
        ports[f"streams{suffix}"] = server.sockets[0].getsockname()[1]
        payloads = body_server(NBYTES, tls=tls)
        await payloads.start()
        ports[f"payloads{suffix}"] = int(payloads.address.rsplit(":", 1)[1])
    print(json.dumps(ports), flush=True)
    await asyncio.sleep(3600)


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


# The near end: moves NBYTES over a number of connections at once.


def by_sockets(port: int, context: ssl.SSLContext | None) -> Move:
    pool = ThreadPoolExecutor(STREAMS_MAX)
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(STREAMS_MAX)]
    if context is not None:
        connections = [context.wrap_socket(c, server_hostname="localhost") for c in connections]
    views = [memoryview(bytearray(PIECE)) for _ in connections]

    async def go(way: str, streams: int) -> None:
        loop, size = asyncio.get_running_loop(), NBYTES // streams
        ends = zip(connections[:streams], views, strict=False)
        each = [loop.run_in_executor(pool, move, c, way, v, size) for c, v in ends]
        await asyncio.gather(*each)

    return go


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
        writer.write(header_of(way, left))
        while left and way == "put":
            writer.write(body[: min(PIECE, left)])
            await writer.drain()
            left -= min(PIECE, left)
        while left:
            left -= len(await reader.read(min(PIECE, left)))
        if way == "put":
            await reader.read(1)

    async def go(way: str, streams: int) -> None:
        await asyncio.gather(*(one(n, way, NBYTES // streams) for n in range(streams)))

    return go


async def by_payloads(client: HttpClient, address: str) -> Move:
    channel = await client.connect(address, "learner", "learner-0")
    body, out = memoryview(bytearray(NBYTES)), memoryview(bytearray(NBYTES))

    async def go(way: str, streams: int) -> None:
        url, size = await url_of(channel, way), NBYTES // streams
        parts = range(0, NBYTES, size)
        if way == "put":
            each = [client.put(url, body[p : p + size], first=p, total=NBYTES) for p in parts]
        else:
            each = [client.get(url, out[p : p + size], first=p, total=NBYTES) for p in parts]
        await asyncio.gather(*each)

    return go


async def measure(folder: Path, ports: dict[str, int]) -> list[dict[str, Any]]:
    tls = TLSConfig(folder / "authority.pem")
    moves: dict[str, Move] = {}
    clients = [HttpClient(), HttpClient(tls=tls)]
    cases = ("", "http", None), (" TLS", "https", tls)
    for client, (suffix, scheme, own) in zip(clients, cases, strict=True):
        context = None if own is None else own.new_context()
        moves[f"sockets{suffix}"] = by_sockets(ports[f"sockets{suffix}"], context)
        moves[f"streams{suffix}"] = await by_streams(ports[f"streams{suffix}"], context)
        address = f"{scheme}://127.0.0.1:{ports[f'payloads{suffix}']}"
        moves[f"payloads{suffix}"] = await by_payloads(client, address)
    runs = []
    for repetition in range(REPETITIONS + 1):
        for (kind, go), way, streams in product(moves.items(), WAYS, (1, STREAMS_MAX)):
            began, busy = time.monotonic(), time.process_time()
            await go(way, streams)
            row = {"kind": kind, "way": way, "streams": streams}
            row["seconds"] = time.monotonic() - began
            row["client_cpu_seconds"] = time.process_time() - busy
            if repetition:  # the first repetition opens the connections
                runs.append(row)
    for client in clients:
        await client.close()
    return runs


def in_memory(folder: Path) -> dict[str, float]:
    """Return MiB per core second of OpenSSL without sockets, for encryption and decryption."""
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = TLSConfig(folder / "authority.pem").new_context()
    theirs = ServerTLSConfig(folder / "syncer.pem", folder / "syncer.key").new_context()
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
    """Return MiB per second, TLS relative to each layer's plain rate, and client CPU time."""
    result: dict[str, Any] = {
        f"OpenSSL alone, without sockets, {what}": (
            f"{rate:.0f} MiB/s, {GIB / MIB / rate:.2f} CPU seconds per GiB"
        )
        for what, rate in alone.items()
    }
    for way, streams in product(WAYS, (1, STREAMS_MAX)):
        rates, spent = {}, {}
        for kind in (f"{layer}{suffix}" for layer in LAYERS for suffix in ("", " TLS")):
            own = [r for r in runs if (r["kind"], r["way"], r["streams"]) == (kind, way, streams)]
            rates[kind] = max(NBYTES / MIB / r["seconds"] for r in own)  # the least disturbed
            spent[kind] = statistics.median(r["client_cpu_seconds"] / (NBYTES / GIB) for r in own)
        many = "1 connection" if streams == 1 else f"{streams} connections"
        result[f"{way.upper()}, {many}: best MiB/s, plain → TLS (fraction)"] = ", ".join(
            f"{each} {rates[each]:.0f} → {rates[f'{each} TLS']:.0f} "
            f"({rates[f'{each} TLS'] / rates[each]:.2f})"
            for each in LAYERS
        )
        result[f"{way.upper()}, {many}: client CPU seconds per GiB, plain → TLS"] = ", ".join(
            f"{each} {spent[each]:.2f} → {spent[f'{each} TLS']:.2f}" for each in LAYERS
        )
    return result


def main() -> None:
    options()
    with tempfile.TemporaryDirectory() as name:
        CertificateFolder(Path(name)).begin([], 30)
        with serving(serve, name) as ports:
            pin(0)
            alone = in_memory(Path(name))
            runs = asyncio.run(measure(Path(name), ports))
    config = {"nbytes": NBYTES, "repetitions": REPETITIONS, "openssl": ssl.OPENSSL_VERSION}
    raw = {"runs": runs, "in_memory": alone}
    keep("tls", config=config, raw=raw, result=summarise(runs, alone))


if __name__ == "__main__":
    called() or main()
