"""Thousands of strangers at a shard: how late are a learner's heartbeats, how much memory is taken?

    python benchmarks/strangers.py

A real syncer (``ddiloco syncer``), learners that ping it once a second, and 4,000 connections that
show no secret: silent ones, slow ones, half of an agreement on TLS, wrong tokens, headers and
bodies without end, upgrades and event streams. All on one machine, plain and encrypted. One more
learner joins under the load.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from evidence import keep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import decoupled_diloco as dd
import encrypted
from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.launch.certificates import CertificateFolder
from decoupled_diloco.transport.channel import WebSocketChannel
from process import strangers

ESTIMATE = (
    "round trips of a millisecond without strangers; with 4,000 a median of some ms and a maximum "
    "of 100 to 300 ms, since one turn of the loop answers some hundreds of them; encrypted two or "
    "three times that. Memory: 512 strangers and a few more, 10 to 30 kB each plain, 300 kB "
    "encrypted: 20 and 200 MiB"
)
LEARNERS = 4
PROCESSES = 4


def beat(address: str, names: list[str], token: str, tls: dd.Tls | None, seconds: float) -> None:
    """Learners that take steps, in this process; prints how long each ping was under way."""
    trips: list[tuple[float, float]] = []
    noted = WebSocketChannel._note_pong

    def note(channel: WebSocketChannel, stamp: bytes) -> None:
        noted(channel, stamp)
        if channel.last_rtt is not None:
            trips.append((time.monotonic(), channel.last_rtt))

    WebSocketChannel._note_pong = note  # type: ignore[method-assign]
    began = time.monotonic()

    def learn(name: str) -> None:
        with dd.Learner(
            torch.nn.Linear(8, 8), address, learner_id=name, token=token, tls=tls
        ) as learner:
            joined.append(time.monotonic() - began)
            while time.monotonic() < began + seconds and learner.step(tokens=8):
                time.sleep(0.05)

    joined: list[float] = []
    threads = [threading.Thread(target=learn, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"joined": joined, "trips": [trip for _, trip in trips]}))


def start_beating(address: str, names: list[str], folder: Path, seconds: float) -> Any:
    told = ["--beat", address, "--names", *names, "--seconds", str(seconds)]
    return subprocess.Popen(
        [sys.executable, __file__, *told, "--folder", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
    )


def config_of(folder: Path, tls: bool) -> RunConfig:
    if tls:
        CertificateFolder(folder / "tls").begin([], 30)
    tables = encrypted.tables(folder / "tls") if tls else {}
    for name in ("client_authority", "clients"):  # tokens decide
        tables.pop(name, None)
    (folder / "token").write_text("a token of a benchmark\n")
    return RunConfig(
        run={"name": "strangers", "folder": folder / "run", "learners": LEARNERS + 1,
             "budget_steps": 1_000_000, "evaluator": False},
        sync={"fragments": 2, "period": 8, "overlap": 2, "quorum": 1},
        syncer={"shards": 1, "port": 0, "token_file": folder / "token"},
        tls=tables,
    )  # fmt: skip


class Syncer:
    """A syncer's processes, and what its shard takes."""

    def __init__(self, folder: Path, tls: bool) -> None:
        self.folder = folder
        file = folder / "run.toml"
        file.write_text(dump_config(config_of(folder, tls)))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "decoupled_diloco.cli", "syncer", str(file)],
            stdout=subprocess.DEVNULL,
            stderr=(folder / "errors").open("w"),
        )
        addresses = folder / "run" / "addresses"
        self.shard = Path()
        deadline = time.monotonic() + 60
        while self.shard == Path():
            assert time.monotonic() < deadline, (folder / "errors").read_text()
            time.sleep(0.2)
            if addresses.exists() and addresses.read_text().strip():
                self.address = addresses.read_text().split()[0]
                self.shard = self._shard()

    def _shard(self) -> Path:
        """The process that listens at the address, in /proc; nothing: none does yet."""
        port = int(self.address.rsplit(":", 1)[1])
        listening = {
            line.split()[9]
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
            if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
        }
        for place in Path("/proc").glob("[0-9]*"):
            try:
                found = {str(each.readlink()) for each in (place / "fd").iterdir()}
            except OSError:
                continue
            if any(f"socket:[{inode}]" in found for inode in listening):
                return place
        return Path()

    def takes(self) -> tuple[int, int]:
        """MiB of memory, and open files."""
        status = (self.shard / "status").read_text()
        resident = next(x for x in status.splitlines() if x.startswith("VmRSS")).split()[1]
        return int(resident) >> 10, len(list((self.shard / "fd").iterdir()))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)


def measure(tls: bool, count: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        syncer = Syncer(Path(name), tls)
        try:
            return {
                "without": with_strangers(syncer, 0, seconds / 2, "before"),
                "with": with_strangers(syncer, count, seconds, "beside"),
                "memory_mib_afterwards": syncer.takes()[0],
                "log_bytes": sum(p.stat().st_size for p in Path(name).rglob("*.log")),
            }
        finally:
            syncer.stop()


def with_strangers(syncer: Syncer, count: int, seconds: float, prefix: str) -> dict[str, Any]:
    ramp = count / 500 / PROCESSES
    names = [f"{prefix}-{number}" for number in range(LEARNERS)]
    learners = start_beating(syncer.address, names, syncer.folder, 10 + ramp + seconds)
    time.sleep(8)  # they have joined
    crowds = [
        strangers.start(syncer.address, count // PROCESSES, ramp + seconds)
        for _ in range(PROCESSES if count else 0)
    ]
    samples = []
    time.sleep(ramp + 2)
    late = start_beating(syncer.address, [f"{prefix}-late"], syncer.folder, seconds / 2)
    deadline = time.monotonic() + seconds - 2
    while time.monotonic() < deadline:
        samples.append(syncer.takes())
        time.sleep(0.5)
    tallies = [json.loads(crowd.communicate()[0]) for crowd in crowds]
    beats = json.loads(learners.communicate()[0])
    trips = sorted(beats["trips"])
    return {
        "trips": trips,
        "late_joined_seconds": json.loads(late.communicate()[0])["joined"],
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
            result[f"{kind}, {when} strangers: ms of a heartbeat, median, p99, max"] = (
                f"{statistics.median(trips):.1f}, {p99:.1f}, {max(trips):.1f} of {len(trips)}"
            )
            joined = here["late_joined_seconds"]
            result[f"{kind}, {when} strangers: the shard's memory, files; a late join"] = (
                f"{here['memory_mib_max']} MiB, {here['files_max']}; "
                + (f"{joined[0]:.1f} s" if joined else "never")
            )
        result[f"{kind}: what became of the strangers"] = json.dumps(each["with"]["strangers"])
        result[f"{kind}: the shard's memory when they are gone"] = (
            f"{each['memory_mib_afterwards']} MiB"
        )
        result[f"{kind}: bytes of all logs"] = str(each["log_bytes"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=4_000)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--name", default="strangers")
    parser.add_argument("--beat", help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kinds", nargs="*", default=["plain", "TLS"])
    arguments = parser.parse_args()
    if arguments.beat is not None:
        folder = arguments.folder
        encryption = arguments.beat.startswith("https")
        tls = dd.Tls(folder / "tls" / "authority.pem") if encryption else None
        token = (folder / "token").read_text()
        beat(arguments.beat, arguments.names, token, tls, arguments.seconds)
        return
    found = {
        kind: measure(tls, arguments.count, arguments.seconds)
        for kind, tls in (("plain", False), ("TLS", True))
        if kind in arguments.kinds
    }
    keep(
        arguments.name,
        estimate=ESTIMATE,
        config={
            "strangers": arguments.count,
            "seconds": arguments.seconds,
            "kinds": [kind.__name__ for kind in strangers.KINDS],
            "dialled again after seconds": strangers.AGAIN_SECONDS,
        },
        raw=found,
        result=summarise(found),
        not_measured="strangers on other machines, a link that they fill, more than a processor "
        "can accept; strangers and shard share two cores here",
    )


if __name__ == "__main__":
    main()
