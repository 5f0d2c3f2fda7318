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
from collections.abc import Iterable, Sequence
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


def carried_out(
    place: Sites, syncer: Syncer, relays: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Start the sites' processes, wait for their end, and return CPU seconds and peak MiB."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    ways = dict.fromkeys(SITES, syncer.address)
    cpu: dict[str, float] = {}
    memory: dict[str, float] = {}
    try:
        for site in SITES if relays else ():
            port = str(free_port())
            words = ("--name", site, "--port", port, "--upstream", syncer.address)
            started[f"relay-{site}"] = start(place, syncer, f"relay-{site}", "relay", *words)
            ways[site] = f"http://{ADDRESSES[1]}:{port},{syncer.address}"
        for site, own in SITES.items():
            for index in own:
                words = ("--index", str(index), "--syncer", ways[site])
                started[f"learner-{index}"] = start(
                    place, syncer, f"learner-{index}", "learner", *words
                )
        servers = {name: each for name, each in started.items() if name.startswith("relay")}
        servers |= {f"shard-{number}": each for number, each in enumerate(syncer.shards)}
        learners = [each for name, each in started.items() if name.startswith("learner")]
        while any(each.poll() is None for each in learners):
            for name, process in servers.items():
                used = usage(process.pid)
                if used is not None:
                    cpu[name], memory[name] = used
            time.sleep(0.5)
        assert not any(each.returncode for each in learners), syncer.folder
    finally:
        for process in started.values():
            end_with_its_children(process)
    return cpu, memory


def usage(pid: int) -> tuple[float, float] | None:
    """Return the CPU seconds and the peak memory in MiB of the Python process of a session."""
    total, peak = 0.0, 0.0
    for each in subprocess.run(
        ["ps", "-o", "pid=", "-s", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split():
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{each}/status").read_text()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        high = [line for line in status.splitlines() if line.startswith("VmHWM")]
        peak = max(peak, int(high[0].split()[1]) / 1024 if high else 0.0)
    return (total, peak) if total else None


def records(folder: Path, process: str) -> list[Record]:
    return list(TapeReader(folder / "run" / "tape" / f"{process}.jsonl"))


def measure(codec: str, relays: bool, steps: int, tool: Path) -> dict[str, Any]:
    """Carry out one run, and return what it has moved and how long its steps took."""
    with (
        joined("ddsites", LINKS[LINK], tool) as place,
        a_syncer(tables(codec, steps), host=ADDRESSES[0], before=place.command(0)) as syncer,
    ):
        cpu, memory = carried_out(place, syncer, relays)
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
        "cpu": cpu,
        "memory_mib": memory,
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
        found[f"shard_cpu_{name}"] = spread(row["cpu"]["shard-0"] / row["rounds"] for row in each)
    found["relay_cpu"] = spread(
        row["cpu"][f"relay-{site}"] / row["rounds"] for row in tree for site in SITES
    )
    found["relay_mib"] = spread(
        row["memory_mib"][f"relay-{site}"] for row in tree for site in SITES
    )
    found["shard_mib"] = spread(row["memory_mib"]["shard-0"] for row in tree)
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
