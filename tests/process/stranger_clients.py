"""Hundreds of unauthenticated connections: silent, slow, wrong and endless ones.

    python tests/process/stranger_clients.py HOST PORT COUNT SECONDS [tls]

Each is opened again some seconds after it was closed. At the end, one line of JSON reports what
happened to them.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import resource
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

AGAIN_SECONDS = 5.0
"""Time between the close of a connection and the next attempt."""

HELLO_BYTES = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(30)
"""The start of a TLS handshake; the rest is never sent."""

UPGRADE = (
    b"GET /control HTTP/1.1\r\nHost: x\r\nX-Principal: learner-0\r\nX-Role: learner\r\n"
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
WRONG = b"GET /run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nX-Principal: a\r\n\r\n"
Says = Callable[[], AsyncIterator[bytes]]


async def silent() -> AsyncIterator[bytes]:
    await asyncio.sleep(3600)
    yield b""


async def slow() -> AsyncIterator[bytes]:
    """Send an endless header, one byte per second."""
    for octet in b"GET /healthz HTTP/1.1\r\nX-Slow: " + b"x" * 5_000:
        yield bytes([octet])
        await asyncio.sleep(1)


async def half_open() -> AsyncIterator[bytes]:
    yield HELLO_BYTES
    await asyncio.sleep(3600)


async def guessing() -> AsyncIterator[bytes]:
    while True:
        yield WRONG
        await asyncio.sleep(1)


async def long_header() -> AsyncIterator[bytes]:
    yield b"GET /run HTTP/1.1\r\n"
    for _ in range(100):
        yield b"X-Long: " + b"x" * 8_000
        await asyncio.sleep(1)


async def huge_body() -> AsyncIterator[bytes]:
    yield b"PUT /bodies/x HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n"
    while True:
        yield bytes(4096)
        await asyncio.sleep(1)


async def upgrading() -> AsyncIterator[bytes]:
    yield UPGRADE
    await asyncio.sleep(3600)


async def watching() -> AsyncIterator[bytes]:
    yield b"GET /page/events HTTP/1.1\r\nHost: x\r\n\r\n"
    await asyncio.sleep(3600)


async def asking() -> AsyncIterator[bytes]:
    """Send requests that need no secret, repeatedly."""
    while True:
        yield b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        await asyncio.sleep(1)


KINDS: tuple[Says, ...] = (
    *(silent, slow, half_open, guessing, long_header, huge_body, upgrading, watching, asking),
)


async def stranger(host: str, port: int, says: Says, tls: bool, tally: dict[str, int]) -> None:
    """Run one of the connections forever."""
    while True:
        tally["dialled"] += 1
        try:
            await connection(host, port, says, tls)
            tally["closed"] += 1
        except (OSError, TimeoutError, ssl.SSLError):
            tally["refused or reset"] += 1
        await asyncio.sleep(AGAIN_SECONDS)


async def connection(host: str, port: int, says: Says, tls: bool) -> None:
    """Send bytes, and read the answer until the other side closes."""
    context: Any = None
    if tls and says is not half_open:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=context)

    async def talk() -> None:
        with contextlib.suppress(OSError):
            async for words in says():
                writer.write(words)
                await writer.drain()

    talking = asyncio.create_task(talk())
    try:
        while await reader.read(4096):
            pass
    finally:
        talking.cancel()
        writer.transport.abort()


async def crowd(host: str, port: int, count: int, seconds: float, tls: bool) -> dict[str, int]:
    """Open this many connections of all kinds within a few seconds."""
    tally: dict[str, int] = collections.defaultdict(int)
    tasks = []
    for number in range(count):
        says = KINDS[number % len(KINDS)]
        tasks.append(asyncio.create_task(stranger(host, port, says, tls, tally)))
        if number % 50 == 49:
            await asyncio.sleep(0.1)
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return dict(tally)


def start(address: str, count: int, seconds: float) -> subprocess.Popen[str]:
    """Start the connections in a separate process with low CPU priority, where possible."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    told = [host, port, str(count), str(seconds), *(["tls"] if scheme == "https" else [])]
    return subprocess.Popen(
        ["nice", "-n", "5", sys.executable, str(Path(__file__)), *told],
        stdout=subprocess.PIPE,
        text=True,
    )


def main() -> None:
    host, port, count, seconds, *tls = sys.argv[1:]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(json.dumps(asyncio.run(crowd(host, int(port), int(count), float(seconds), bool(tls)))))


if __name__ == "__main__":
    main()
