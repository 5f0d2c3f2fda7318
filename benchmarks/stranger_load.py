"""Thousands of unauthenticated connections to a shard: delay of a learner's heartbeats, and memory.

    python benchmarks/stranger_load.py

A real syncer (``ddiloco syncer``), learners that ping it once per second, and 4,000 connections
without the secret: silent ones, slow ones, incomplete TLS handshakes, wrong tokens, endless headers
and payloads, upgrades and event streams. All run on one machine, with and without TLS. One more
learner joins under the load.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from bench_runs import Syncer, a_syncer, answer, called, start
from evidence import HERE, keep, options

sys.path.insert(0, str(HERE.parent / "tests"))
import decoupled_diloco as dd
import encrypted
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.transport.channel import WebSocketChannel
from process import stranger_clients

LEARNERS = 4
PROCESSES = 4


def beat(address: str, names: list[str], folder: str, seconds: float) -> dict[str, Any]:
    """Run learners that take steps in this process; return the round trip of each ping."""
    authority = Path(folder) / "tls" / "authority.pem"
    tls = dd.TLSConfig(authority) if address.startswith("https") else None
    token = (Path(folder) / "token").read_text()
    trips: list[float] = []
    joined: list[float] = []
    noted = WebSocketChannel._note_pong

    def note(channel: WebSocketChannel, stamp: bytes) -> None:
        noted(channel, stamp)
        if channel.last_rtt is not None:
            trips.append(channel.last_rtt)

    WebSocketChannel._note_pong = note  # type: ignore[method-assign]
    began = time.monotonic()

    def learn(name: str) -> None:
        own = {"name": name, "auth_token": token, "tls": tls}
        with dd.Learner(torch.nn.Linear(8, 8), address, **own) as learner:
            joined.append(time.monotonic() - began)
            while time.monotonic() < began + seconds and learner.step(tokens=8):
                time.sleep(0.05)

    threads = [threading.Thread(target=learn, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"joined": joined, "trips": trips}


def takes(process: Path) -> tuple[int, int]:
    """Return the MiB of memory and the number of open files of a process in /proc."""
    resident = re.findall(r"VmRSS:\s+(\d+)", (process / "status").read_text())
    return int(resident[0]) >> 10, len(list((process / "fd").iterdir()))


def measure(tls: bool, count: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, secured = Path(name), {}
        if tls:
            CertificateFolder(folder / "tls").begin([], 30)
            tokens_decide = ("client_ca_cert", "clients")
            tables = encrypted.tables(folder / "tls")
            secured = {key: value for key, value in tables.items() if key not in tokens_decide}
        tables = {
            "run": {"name": "strangers", "learners": LEARNERS + 1},
            "sync": {"fragments": 2, "sync_every": 8, "quorum": 1},
            "tls": secured,
        }
        with a_syncer(tables, into=folder) as syncer:
            return {
                "without": with_strangers(syncer, 0, seconds / 2, "before"),
                "with": with_strangers(syncer, count, seconds, "beside"),
                "memory_mib_afterwards": takes(Path(f"/proc/{syncer.shards[0].pid}"))[0],
                "log_bytes": sum(path.stat().st_size for path in folder.rglob("*.log")),
            }


def with_strangers(syncer: Syncer, count: int, seconds: float, prefix: str) -> dict[str, Any]:
    ramp, process = count / 500 / PROCESSES, Path(f"/proc/{syncer.shards[0].pid}")
    names, place = [f"{prefix}-{number}" for number in range(LEARNERS)], str(syncer.folder)
    learners = start(beat, syncer.address, names, place, 10 + ramp + seconds)
    time.sleep(8)  # until they have joined
    crowds = [
        stranger_clients.start(syncer.address, count // PROCESSES, ramp + seconds)
        for _ in range(PROCESSES if count else 0)
    ]
    samples = []
    time.sleep(ramp + 2)
    late = start(beat, syncer.address, [f"{prefix}-late"], place, seconds / 2)
    deadline = time.monotonic() + seconds - 2
    while time.monotonic() < deadline:
        samples.append(takes(process))
        time.sleep(0.5)
    tallies = [json.loads(crowd.communicate()[0]) for crowd in crowds]
    return {
        "trips": sorted(answer(learners)["trips"]),
        "late_joined_seconds": answer(late)["joined"],
        "memory_mib_max": max(mib for mib, _ in samples),
        "files_max": max(files for _, files in samples),
        "strangers": {k: sum(t.get(k, 0) for t in tallies) for k in tallies[0]} if tallies else {},
    }


def summarise(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    result = {}
    for kind, each in found.items():
        for when in ("without", "with"):
            here = each[when]
            trips = [1000 * trip for trip in here["trips"]]
            p99 = trips[int(0.99 * (len(trips) - 1))]
            case = f"{kind}, {when} unauthenticated connections"
            result[f"{case}: heartbeat round trip, ms (median, p99, max)"] = (
                f"{statistics.median(trips):.1f}, {p99:.1f}, {max(trips):.1f} of {len(trips)}"
            )
            joined = here["late_joined_seconds"]
            result[f"{case}: shard memory, open files; time of a late join"] = (
                f"{here['memory_mib_max']} MiB, {here['files_max']}; "
                + (f"{joined[0]:.1f} s" if joined else "never")
            )
        result[f"{kind}: outcome of the unauthenticated connections"] = json.dumps(
            each["with"]["strangers"]
        )
        result[f"{kind}: shard memory after they have closed"] = (
            f"{each['memory_mib_afterwards']} MiB"
        )
        result[f"{kind}: bytes of all logs"] = str(each["log_bytes"])
    return result


def main() -> None:
    arguments = options(count=4_000, seconds=40.0, name="strangers", kinds=["plain", "TLS"])
    found = {
        kind: measure(kind == "TLS", arguments.count, arguments.seconds) for kind in arguments.kinds
    }
    config = {
        "strangers": arguments.count,
        "seconds": arguments.seconds,
        "kinds": [kind.__name__ for kind in stranger_clients.KINDS],
        "dialled again after seconds": stranger_clients.AGAIN_SECONDS,
    }
    keep(arguments.name, of="strangers", config=config, raw=found, result=summarise(found))


if __name__ == "__main__":
    called() or main()
