"""How fast bodies travel, against a raw TCP socket on the same link in the same run.

Loopback, two processes, repetitions interleaved:

    python benchmarks/data_plane.py --out DIR

A long-distance link, through a tool that makes two network namespaces (`TOOL up NAME DELAY_MS
RATE_MBIT LOSS_PERCENT`, `TOOL run NAME a|b COMMAND…`, `TOOL down NAME`; needs root):

    python benchmarks/data_plane.py --wan --wan-tool PATH --out DIR

Besides the rates it reports the largest round trip of a control ping while bodies fill the link.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from decoupled_diloco.transport.base import Channel
from decoupled_diloco.transport.channel import WebSocketChannel
from decoupled_diloco.transport.http_client import HttpClient
from decoupled_diloco.transport.http_server import HttpServer
from decoupled_diloco.transport.tokens import Tokens

TOKEN = "benchmark"
MIB = 1 << 20
ESTIMATE = {
    "loopback": "PUT and GET at 0.7 to 0.95 of a raw socket",
    "wan": "70 to 80 % of the link once the stripe count has settled at 16; one raw cubic "
    "connection about 30 %; largest ping 0.3 s",
}


# The far end: a process with a transport server and a raw socket that swallows or sends bytes.


def serve(arguments: argparse.Namespace) -> None:
    ready = threading.Event()
    ports: list[int] = []
    threading.Thread(target=serve_raw, args=(arguments.host, ports, ready), daemon=True).start()
    ready.wait()
    asyncio.run(serve_transport(arguments, ports[0]))


def serve_raw(host: str, ports: list[int], ready: threading.Event) -> None:
    with socket.create_server((host, 0)) as listener:
        ports.append(listener.getsockname()[1])
        ready.set()
        buffer = bytearray(MIB)
        view = memoryview(buffer)
        body = b""
        while True:
            connection, _ = listener.accept()
            with connection:
                while header := connection.recv(9, socket.MSG_WAITALL):
                    nbytes = int.from_bytes(header[1:], "big")
                    if header[:1] == b"P":
                        while nbytes:
                            nbytes -= connection.recv_into(view[: min(MIB, nbytes)])
                        connection.sendall(b"k")
                    else:
                        body = body if len(body) == nbytes else bytes(nbytes)
                        connection.sendall(body)


async def serve_transport(arguments: argparse.Namespace, raw_port: int) -> None:
    async def on_channel(channel: Channel) -> None:
        offered = memoryview(os.urandom(arguments.nbytes))
        number = 0
        while True:
            message = await channel.receive()
            if message["do"] == "expect":
                number += 1
                upload = server.bodies.expect(
                    f"up/{number}", arguments.nbytes, channel.peer.principal
                )
                channel.send({"url": upload.url})
                (await upload.body).release()
            else:
                channel.send({"url": server.bodies.offer("down", offered, "digest")})

    server = HttpServer(
        host=arguments.host,
        tokens=Tokens(TOKEN),
        on_channel=on_channel,
        congestion=arguments.congestion,
        pool_bytes=4 * arguments.nbytes,
    )
    await server.start()
    print(json.dumps({"address": server.address, "raw_port": raw_port}), flush=True)
    await asyncio.sleep(3600)


# The near end: measures, and prints its findings as JSON.


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    body = memoryview(bytearray(os.urandom(arguments.nbytes)))
    out = memoryview(bytearray(arguments.nbytes))
    client = HttpClient(token=TOKEN, congestion=arguments.congestion)
    channel = await client.connect(arguments.address, "learner", "learner-0")
    await asyncio.sleep(2.5)  # Two pings: the round trip is known.
    idle_rtt = channel.rtt
    host = arguments.address.removeprefix("http://").rsplit(":", 1)[0]
    raw = socket.create_connection((host, arguments.raw_port))
    runs: list[dict[str, Any]] = []
    pings: list[float] = []
    watch = asyncio.create_task(record_pings(channel, pings))
    for repetition in range(arguments.repetitions):
        for kind in ("put", "get"):
            channel.send({"do": "expect" if kind == "put" else "offer"})
            url = str((await channel.receive())["url"])
            stats = await (client.put(url, body) if kind == "put" else client.get(url, out))
            runs.append(
                {
                    "kind": kind,
                    "repetition": repetition,
                    "nbytes": stats.nbytes,
                    "seconds": stats.seconds,
                    "stripes": stats.stripes,
                    "retries": stats.retries,
                    "congestion": stats.congestion,
                }
            )
            # One raw connection on a lossy link is slow: less of a body tells its rate as well.
            nbytes = arguments.nbytes // 8 if arguments.wan else arguments.nbytes
            seconds = await asyncio.to_thread(move_raw, raw, kind, body[:nbytes], out[:nbytes])
            runs.append(
                {
                    "kind": f"raw {kind}",
                    "repetition": repetition,
                    "nbytes": nbytes,
                    "seconds": seconds,
                }
            )
    watch.cancel()
    raw.close()
    await channel.close("done")
    await client.close()
    return {"idle_rtt_seconds": idle_rtt, "ping_seconds": pings, "runs": runs}


async def record_pings(channel: WebSocketChannel, pings: list[float]) -> None:
    """Collect the round trip of every ping, by the newest one the channel has seen."""
    seen = None
    while True:
        await asyncio.sleep(0.2)
        newest = channel.last_rtt
        if newest is not None and newest != seen:
            seen = newest
            pings.append(newest)


def move_raw(raw: socket.socket, kind: str, body: memoryview, out: memoryview) -> float:
    started = time.monotonic()
    raw.sendall((b"P" if kind == "put" else b"G") + len(body).to_bytes(8, "big"))
    if kind == "put":
        for position in range(0, len(body), MIB):
            raw.sendall(body[position : position + MIB])
        raw.recv(1)
    else:
        position = 0
        while position < len(out):
            position += raw.recv_into(out[position : position + MIB])
    return time.monotonic() - started


# The whole: starts both ends, gathers, writes.


def orchestrate(arguments: argparse.Namespace) -> dict[str, Any]:
    far: list[str] = []
    near: list[str] = []
    tool = arguments.wan_tool
    name = f"dp{os.getpid() % 10000}"
    common = ["--nbytes", str(arguments.nbytes)]
    if arguments.congestion is None:
        common.append("--kernel-congestion")
    host = "127.0.0.1"
    if arguments.wan:
        subprocess.run(
            [tool, "up", name, str(arguments.delay_ms), str(arguments.rate), str(arguments.loss)],
            check=True,
        )
        far, near, host = [tool, "run", name, "b"], [tool, "run", name, "a"], "10.9.0.2"
        common.append("--wan")
    here = [sys.executable, str(Path(__file__).resolve())]
    try:
        server = subprocess.Popen(
            [*far, *here, "--part", "serve", "--host", host, *common], stdout=subprocess.PIPE
        )
        try:
            assert server.stdout is not None
            where = json.loads(server.stdout.readline())
            done = subprocess.run(
                [
                    *[*near, *here, "--part", "measure", *common],
                    *["--address", where["address"], "--raw-port", str(where["raw_port"])],
                    *["--repetitions", str(arguments.repetitions)],
                ],
                stdout=subprocess.PIPE,
                check=True,
            )
        finally:
            server.kill()
            server.wait()
    finally:
        if arguments.wan:
            subprocess.run([tool, "down", name], check=True)
    return json.loads(done.stdout)


def summarise(raw: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    by_kind: dict[str, list[float]] = {}
    for run in raw["runs"]:
        by_kind.setdefault(run["kind"], []).append(run["nbytes"] / run["seconds"])
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
            link = arguments.rate * 1e6 / 8
            settled = by_kind[kind][len(by_kind[kind]) // 2 :]
            result[f"{kind}_share_of_link"] = median / link
            result[f"{kind}_share_of_link_settled"] = statistics.median(settled) / link
    result["ping_seconds_largest"] = max(raw["ping_seconds"], default=None)
    result["idle_rtt_seconds"] = raw["idle_rtt_seconds"]
    return result


def write(folder: Path, arguments: argparse.Namespace, raw: Any, report: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arguments_given = [
        argument if argument != arguments.wan_tool else "WAN_TOOL" for argument in sys.argv[1:]
    ]
    (folder / "command").write_text(
        f"python benchmarks/data_plane.py {' '.join(arguments_given)}\n"
    )
    (folder / "config.json").write_text(json.dumps(report["config"], indent=1) + "\n")
    (folder / "raw.json").write_text(json.dumps(raw, indent=1) + "\n")
    (folder / "result.json").write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=("all", "serve", "measure"), default="all")
    parser.add_argument("--nbytes", type=int, default=64 * MIB, help="size of a body")
    parser.add_argument("--repetitions", type=int, help="default: 15 on loopback, 8 with --wan")
    parser.add_argument("--kernel-congestion", action="store_true", help="do not ask for BBR")
    parser.add_argument("--wan", action="store_true", help="measure a long-distance link")
    parser.add_argument("--wan-tool", help="the tool that makes the link")
    parser.add_argument("--delay-ms", type=float, default=25, help="one way")
    parser.add_argument("--rate", type=float, default=200, help="Mbit/s")
    parser.add_argument("--loss", type=float, default=0.1, help="percent of packets")
    parser.add_argument("--out", type=Path, help="folder for the evidence")
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--raw-port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.congestion = None if arguments.kernel_congestion else "bbr"
    if arguments.repetitions is None:
        arguments.repetitions = 8 if arguments.wan else 15
    if arguments.wan and arguments.part == "all" and not arguments.wan_tool:
        parser.error("--wan needs --wan-tool PATH")
    return arguments


def main() -> None:
    arguments = parse()
    if arguments.part == "serve":
        serve(arguments)
    elif arguments.part == "measure":
        print(json.dumps(asyncio.run(measure(arguments))))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that the link is taken down.
        raw = orchestrate(arguments)
        link = ("delay_ms", "rate", "loss") if arguments.wan else ()
        report = {
            "config": {
                "mode": "wan" if arguments.wan else "loopback",
                "nbytes": arguments.nbytes,
                "congestion_asked": arguments.congestion or "kernel default",
                **{key: getattr(arguments, key) for key in link},
            },
            "hardware": {"cpus": os.cpu_count(), "machine": platform.platform()},
            "estimate": ESTIMATE["wan" if arguments.wan else "loopback"],
            "result": summarise(raw, arguments),
            "not_measured": "several peers at once, TLS, a link that other traffic shares",
        }
        print(json.dumps(report, indent=1))
        if arguments.out is not None:
            write(arguments.out, arguments, raw, report)


if __name__ == "__main__":
    main()
