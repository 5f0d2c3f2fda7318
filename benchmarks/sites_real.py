"""Two sites of eight learners behind a shaped link, with and without relays: real processes.

The syncer is at one end of the link, both sites are at the other end. The learners' steps have a
fixed length, so that sixteen of them fit on two cores. Bytes are those of the link's interfaces,
with all protocol overhead, and of the processes' data planes.

    python benchmarks/sites_real.py --wan-tool WAN_TOOL --repeats 3

It needs root. `peers/links.py` describes the tool.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench_runs import CLI, Syncer, a_syncer, end_with_its_children, free_port
from evidence import keep, options, spread

from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.records import Record

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from links import ADDRESSES, LINKS, Sites, joined

LINK = "50ms-200Mbit-0.1%"
SITES = {"site-a": range(8), "site-b": range(8, 16)}
LEARNERS = 16
FRAGMENTS = PERIOD = 24
STEP_SECONDS = 1.0
MODEL = {"layers": 4, "width": 256, "context": 16, "batch_size": 1, "corpus_bytes_max": 200_000}
SETTLED_SECONDS = 5.0
"""From the last join to the beginning of the measurement."""


def tables(codec: str, steps: int) -> dict[str, Any]:
    return {
        "run": {"learners": LEARNERS, "max_steps": steps},
        "sync": {
            "fragments": FRAGMENTS,
            "sync_every": PERIOD,
            "quorum": LEARNERS,
            "codec": {"uplink": codec, "downlink": codec},
        },
        "sites": [{"name": name, "learners": list(own)} for name, own in SITES.items()],
        "workload": {"name": "paced", "options": {"step_seconds": STEP_SECONDS, **MODEL}},
    }


def start(place: Sites, syncer: Syncer, name: str, *words: str) -> subprocess.Popen[bytes]:
    secret = ["--auth-token-file", str(syncer.folder / "token")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (syncer.folder / f"{name}.log").open("wb") as log:
        command = [*place.command(1), *CLI, words[0], str(syncer.folder / "run.toml"), *words[1:]]
        return subprocess.Popen(
            [*command, *secret], stdout=log, stderr=log, env=environment, start_new_session=True
        )


Usage = dict[str, list[tuple[float, float, float]]]
"""Samples of each server process: the instant, its CPU seconds, and its resident MiB."""


def carried_out(place: Sites, syncer: Syncer, relays: bool) -> Usage:
    """Start the sites' processes, wait for their end, and return what the servers used."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    ways = dict.fromkeys(SITES, syncer.address)
    samples: Usage = defaultdict(list)
    try:
        for site in SITES if relays else ():
            port = str(free_port())
            there = ("--set", "syncer.host=0.0.0.0", "--port", port)
            words = ("relay", "--name", site, *there, "--upstream", syncer.address)
            started[f"relay-{site}"] = start(place, syncer, f"relay-{site}", *words)
            ways[site] = f"http://{ADDRESSES[1]}:{port},{syncer.address}"
        for site, own in SITES.items():
            for index in own:
                words = ("learner", "--index", str(index), "--syncer", ways[site])
                started[f"learner-{index}"] = start(place, syncer, f"learner-{index}", *words)
        servers = {name: each for name, each in started.items() if name.startswith("relay")}
        servers |= {f"shard-{number}": each for number, each in enumerate(syncer.shards)}
        learners = [each for name, each in started.items() if name.startswith("learner")]
        while any(each.poll() is None for each in learners):
            for name, process in servers.items():
                samples[name].append((time.monotonic(), *usage(process.pid)))
            time.sleep(0.5)
        assert not any(each.returncode for each in learners), syncer.folder
    finally:
        for process in started.values():
            end_with_its_children(process)
    return samples


def usage(session: int) -> tuple[float, float]:
    """Return the CPU seconds and the resident MiB of the processes of a session."""
    listed = subprocess.run(
        ["ps", "-o", "pid=", "-s", str(session)], capture_output=True, text=True, check=False
    )
    seconds, mib = 0.0, 0.0
    for pid in listed.stdout.split():
        with suppress(OSError):
            fields = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            mib = max(mib, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return seconds, mib


def between(samples: Usage, begin: float, end: float) -> dict[str, dict[str, float]]:
    """Return the CPU seconds and the largest memory of each server within a time."""
    found = {}
    for name, own in samples.items():
        inside = [each for each in own if begin <= each[0] <= end]
        (first, used, _), (last, all_used, _) = inside[0], inside[-1]
        cores = (all_used - used) / (last - first)
        found[name] = {"cores": cores, "mib": max(mib for _, _, mib in inside)}
    return found


def records(folder: Path, process: str) -> list[Record]:
    return list(TapeReader(folder / "run" / "tape" / f"{process}.jsonl"))


def measure(codec: str, relays: bool, steps: int, tool: Path) -> dict[str, Any]:
    """Carry out one run, and return what it has moved and how long its steps took."""
    with (
        joined("ddsites", LINKS[LINK], tool) as place,
        a_syncer(tables(codec, steps), host=ADDRESSES[0], before=place.command(0)) as syncer,
    ):
        samples = carried_out(place, syncer, relays)
        time.sleep(1.0)
        own = [records(syncer.folder, f"learner-{index}") for index in range(LEARNERS)]
        times = [[r.at for r in each if r.type == "StepFinished"] for each in own]
        begin = max(each[0] for each in times) + SETTLED_SECONDS
        end = min(each[-1] for each in times)
        shard = [r for r in records(syncer.folder, "shard-0") if begin <= r.at <= end]
        finished = [r for r in shard if r.type == "RoundFinished"]
        merged = [r for r in finished if r.data["verdict"] == "merged"]
        took = [
            p["state"] for r in merged for p in r.data["participants"] if p["state"] == "folded"
        ]
        down, up = place.passed(begin, end)
        intervals = sorted(
            after - before
            for each in times
            for before, after in pairwise(each)
            if begin <= before and after <= end
        )
    return {
        "codec": codec,
        "relays": relays,
        "seconds": end - begin,
        "rounds": len(merged),
        "nominal": (end - begin) / STEP_SECONDS * FRAGMENTS / PERIOD,
        "contributions": len(took),
        "up_per_round": up / len(merged),
        "down_per_round": down / len(merged),
        "step_median": at_share(intervals, 0.5),
        "step_p99": at_share(intervals, 0.99),
        "step_max": intervals[-1],
        "servers": between(samples, begin, end),
    }


def at_share(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(codec: str, rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Compare the runs with relays with those without; each ratio is that of one repetition."""
    own = [row for row in rows if row["codec"] == codec]
    flat = [row for row in own if not row["relays"]]
    tree = [row for row in own if row["relays"]]
    pairs = list(zip(flat, tree, strict=True))
    found: dict[str, Any] = {
        f"{way}_divided_by": spread(a[f"{way}_per_round"] / b[f"{way}_per_round"] for a, b in pairs)
        for way in ("up", "down")
    }
    for name, each in (("flat", flat), ("relays", tree)):
        found[f"rounds_{name}"] = spread(row["rounds"] / row["nominal"] for row in each)
        found[f"taken_{name}"] = spread(
            row["contributions"] / row["rounds"] / LEARNERS for row in each
        )
        for what in ("step_median", "step_p99", "step_max"):
            found[f"{what}_{name}"] = spread(row[what] for row in each)
        found[f"shard_cores_{name}"] = spread(row["servers"]["shard-0"]["cores"] for row in each)
        found[f"shard_mib_{name}"] = spread(row["servers"]["shard-0"]["mib"] for row in each)
    relays = [row["servers"][f"relay-{site}"] for row in tree for site in SITES]
    for what in ("cores", "mib"):
        found[f"relay_{what}"] = spread(each[what] for each in relays)
    return found


def main() -> None:
    arguments = options(wan_tool=Path, codecs=["bf16", "int4"], repeats=3, steps=120)
    raw = []
    for _ in range(arguments.repeats):
        for codec in arguments.codecs:
            for relays in (False, True):
                raw.append(measure(codec, relays, arguments.steps, arguments.wan_tool))
                print(raw[-1], flush=True)
    config = {"link": LINK, "step_seconds": STEP_SECONDS, "model": MODEL, **vars(arguments)}
    result = {codec: summary(codec, raw) for codec in arguments.codecs}
    print(keep("sites_real", config=config, raw=raw, result=result))


if __name__ == "__main__":
    main()
