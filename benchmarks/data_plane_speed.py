"""Rate of payloads, compared with a raw TCP socket on the same link in the same run.

Loopback, two processes, repetitions interleaved:

    python benchmarks/data_plane_speed.py

A long-distance link, through a tool that creates two network namespaces (`TOOL up NAME DELAY_MS
RATE_MBIT LOSS_PERCENT`, `TOOL run NAME a|b COMMAND…`, `TOOL down NAME`; needs root):

    python benchmarks/data_plane_speed.py --wan --wan-tool PATH

It also reports the largest round trip of a control ping while payloads fill the link.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench_runs import TOKEN, answer, called, serving, start
from bodies import MIB, body_server, listen, move, url_of
from evidence import keep, options

from decoupled_diloco.transport.channel import WebSocketChannel
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.tokens import Tokens


def serve(host: str, nbytes: int, congestion: str | None) -> None:
    """Run the far end: a process with a transport server and a raw socket."""
    asyncio.run(_serve(host, nbytes, congestion))


async def _serve(host: str, nbytes: int, congestion: str | None) -> None:
    server = body_server(nbytes, host=host, tokens=Tokens(TOKEN), congestion=congestion)
    await server.start()
    print(json.dumps({"address": server.address, "raw_port": listen(host)}), flush=True)
    await asyncio.sleep(3600)


def measure(address: str, raw_port: int, repetitions: int, *more: Any) -> dict[str, Any]:
    """Run the near end, and return its measurements."""
    return asyncio.run(_measure(address, raw_port, repetitions, *more))


async def _measure(
    address: str, raw_port: int, repetitions: int, nbytes: int, congestion: str | None, wan: bool
) -> dict[str, Any]:
    body, out = memoryview(bytearray(os.urandom(nbytes))), memoryview(bytearray(nbytes))
    client = HttpClient(token=TOKEN, congestion=congestion)
    channel = await client.connect(address, "learner", "learner-0")
    await asyncio.sleep(2.5)  # two pings, so that the round trip is known
    idle_rtt = channel.rtt
    host = address.removeprefix("http://").rsplit(":", 1)[0]
    raw = socket.create_connection((host, raw_port))
    runs: list[dict[str, Any]] = []
    pings: list[float] = []
    watch = asyncio.create_task(record_pings(channel, pings))
    # One raw connection on a lossy link is slow, and a smaller payload also shows its rate.
    of_raw = nbytes // 8 if wan else nbytes
    for repetition in range(repetitions):
        for kind, view in (("put", body), ("get", out)):
            url = await url_of(channel, kind)
            stats = await (client.put(url, body) if kind == "put" else client.get(url, out))
            seen = ("nbytes", "seconds", "stripes", "retries", "congestion")
            found = {name: getattr(stats, name) for name in seen}
            runs.append({"kind": kind, "repetition": repetition, **found})
            begun = time.monotonic()
            await asyncio.to_thread(move, raw, kind, view, of_raw)
            found = {"nbytes": of_raw, "seconds": time.monotonic() - begun}
            runs.append({"kind": f"raw {kind}", "repetition": repetition, **found})
    watch.cancel()
    raw.close()
    await channel.close("done")
    await client.close()
    return {"idle_rtt_seconds": idle_rtt, "ping_seconds": pings, "runs": runs}


async def record_pings(channel: WebSocketChannel, pings: list[float]) -> None:
    """Collect the round trip of each ping, by polling the channel's newest value."""
    seen = None
    while True:
        await asyncio.sleep(0.2)
        newest = channel.last_rtt
        if newest is not None and newest != seen:
            seen = newest
            pings.append(newest)


@contextmanager
def link(arguments: Namespace) -> Iterator[tuple[list[str], list[str], str]]:
    """Yield command prefixes for the far and the near end, and the far end's address."""
    if not arguments.wan:
        yield [], [], "127.0.0.1"
        return
    tool, name = arguments.wan_tool, f"dp{os.getpid() % 10000}"
    settings = (arguments.delay_ms, arguments.rate, arguments.loss)
    try:
        subprocess.run([tool, "up", name, *map(str, settings)], check=True)
        yield [tool, "run", name, "b"], [tool, "run", name, "a"], "10.9.0.2"
    finally:
        subprocess.run([tool, "down", name], check=True)


def summarise(raw: dict[str, Any], arguments: Namespace) -> dict[str, Any]:
    by_kind: dict[str, list[float]] = defaultdict(list)
    for run in raw["runs"]:
        by_kind[run["kind"]].append(run["nbytes"] / run["seconds"])
    result: dict[str, Any] = {
        kind: {
            "median_bytes_per_second": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
            "repetitions": len(rates),
        }
        for kind, rates in sorted(by_kind.items())
    }
    for kind in ("put", "get"):
        median = result[kind]["median_bytes_per_second"]
        result[f"{kind}_share_of_raw"] = median / result[f"raw {kind}"]["median_bytes_per_second"]
        if arguments.wan:
            of_link = arguments.rate * 1e6 / 8
            settled = by_kind[kind][len(by_kind[kind]) // 2 :]
            result[f"{kind}_share_of_link"] = median / of_link
            result[f"{kind}_share_of_link_settled"] = statistics.median(settled) / of_link
    result["ping_seconds_largest"] = max(raw["ping_seconds"], default=None)
    result["idle_rtt_seconds"] = raw["idle_rtt_seconds"]
    return result


def main() -> None:
    arguments = options(
        nbytes=64 * MIB,
        repetitions=int,  # 15 on loopback, 8 with --wan
        kernel_congestion=False,  # do not request BBR
        wan=False,
        wan_tool=str,
        delay_ms=25.0,  # one way
        rate=200.0,  # Mbit/s
        loss=0.1,  # percent of packets
    )
    if arguments.wan and not arguments.wan_tool:
        sys.exit("--wan needs --wan-tool PATH")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the link is removed
    congestion = None if arguments.kernel_congestion else "bbr"
    repetitions = arguments.repetitions or (8 if arguments.wan else 15)
    with (
        link(arguments) as (far, near, host),
        serving(serve, host, arguments.nbytes, congestion, before=far) as server,
    ):
        own = repetitions, arguments.nbytes, congestion, arguments.wan
        raw = answer(start(measure, server["address"], server["raw_port"], *own, before=near))
        # The saved command contains no path of this machine.
    sys.argv[:] = ["WAN_TOOL" if each == arguments.wan_tool else each for each in sys.argv]
    shown = ("delay_ms", "rate", "loss") if arguments.wan else ()
    mode = "wan" if arguments.wan else "loopback"
    config = {"mode": mode, "nbytes": arguments.nbytes}
    config |= {"congestion_asked": congestion or "kernel default"}
    config |= {name: getattr(arguments, name) for name in shown}
    keep(f"data_plane_{mode}", config=config, raw=raw, result=summarise(raw, arguments))


if __name__ == "__main__":
    called() or main()
