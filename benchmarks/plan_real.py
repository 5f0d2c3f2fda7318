"""Predictions of `ddiloco plan` compared with real runs over rate-limited links.

Two learners share one end of a link, and the shard is at the other end. The ends are network
namespaces joined by a veth pair with tbf in both directions (root and iproute2). Each case is a run
of the paced workload. Its tapes give the share of the time in which learners step, and the
completed rounds. The interface's counters give the traffic. The planner gets the same settings and
one calibrated value: the processing time of a payload on this machine, from an earlier run over a
fast link.

    python benchmarks/plan_real.py
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from evidence import RESULTS, keep, options

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.config.method import options_of
from decoupled_diloco.protocol.machine_options import Options
from decoupled_diloco.tape import TapeReader
from decoupled_diloco.tape.records import Record
from decoupled_diloco_plan.bandwidth.case import Case, Model, wire_format
from decoupled_diloco_plan.bandwidth.inputs import model_of
from decoupled_diloco_plan.bandwidth.network import HUB, Link, Network, Site
from decoupled_diloco_plan.bandwidth.round_periods import simulate
from decoupled_diloco_plan.bandwidth.steady_state import Rounds

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from network import network_spaces

network_spaces.FAR, network_spaces.NEAR = "ddplan-far", "ddplan-near"

LEARNERS = 2
QUEUE_SECONDS = 0.2
"""Queue length of tbf in seconds. A message waits behind a payload for this time, or for as long as
there are payloads. The planner gets this time, multiplied by the share of time in which the link is
busy, as the link's latency."""
CALIBRATION = ("decoupled", 1.0, 100.0)
"""A link so fast that a round's time is only processing; it is not a case of the result."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "decoupled": {"fragments": 8, "sync_every": 8, "overlap_steps": 2},
    "streaming": {"fragments": 8, "sync_every": 8, "overlap_steps": 2, "quorum": LEARNERS},
    "diloco": {"fragments": 1, "sync_every": 8, "overlap_steps": 0, "quorum": LEARNERS},
}
SMALL = {"corpus_bytes_max": 200_000, "warmup_steps": 0, "batch_size": 1, "width": 64, "layers": 2}
WAITS = {"grace_margin": 0.0, "wait": "at_overlap"}


def config_of(system: str, step_seconds: float, folder: Path, steps: int) -> RunConfig:
    sync = SYSTEMS[system] | ({} if system == "decoupled" else WAITS)
    budget = {"max_steps": steps, "evaluator": False}
    return RunConfig(
        run={"folder": folder / "run", "learners": LEARNERS, **budget},
        sync=sync,
        syncer={"host": network_spaces.FAR_ADDRESS, "port": 7070, "token_file": folder / "token"},
        workload={"name": "paced", "options": {"step_seconds": step_seconds, **SMALL}},
    )


def predicted(config: RunConfig, mbit: float, handling_seconds: float) -> Rounds:
    found, sync = model_of(config), config.sync
    model = Model(found["params"], found["layers"] or 1, found["step_seconds"])
    rate = mbit * 1e6 / 8
    payloads = LEARNERS * 2 * model.params / sync.fragments / rate
    busy = payloads * sync.fragments / sync.sync_every / model.step_seconds
    latency = min(1.0, busy) * min(QUEUE_SECONDS, payloads)
    network = Network(
        (Site("near", LEARNERS, Link(rate, rate, latency)),), HUB, Link(math.inf, math.inf)
    )
    protocol = options_of(config)
    names = ("fragments", "period", "overlap", "quorum", "wait")
    own = Options(**{name: getattr(protocol, name) for name in names})
    formats = wire_format(sync.codec.uplinks[0]), wire_format(sync.codec.downlink)
    return simulate(Case(model, own, network, *formats, handling_seconds=handling_seconds))


def counters() -> tuple[float, int, int]:
    """Return the time, and the bytes that have left and entered the learners' end."""
    names = [f"/sys/class/net/dd1/statistics/{way}_bytes" for way in ("tx", "rx")]
    command = ["ip", "netns", "exec", network_spaces.NEAR, "cat", *names]
    sent, received = subprocess.run(command, check=True, capture_output=True).stdout.split()
    return time.monotonic(), int(sent), int(received)


def carry_out(
    config: RunConfig, made: network_spaces.Link, folder: Path
) -> list[tuple[float, int, int]]:
    """Carry out the run; return the counters over time."""
    (folder / "token").write_text("a secret")
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    made.start(network_spaces.FAR, "syncer", str(path), "--shard", "0")
    for index in range(LEARNERS):
        made.start(network_spaces.NEAR, "learner", str(path), "--index", str(index))
    samples = []
    deadline = time.monotonic() + 400
    while any(process.poll() is None for process in made.started):
        assert time.monotonic() < deadline, made.logs()
        samples.append(counters())
        time.sleep(0.2)
    assert all(process.returncode == 0 for process in made.started), made.logs()
    return samples


def at(samples: list[tuple[float, int, int]], instant: float, column: int) -> float:
    for a, b in pairwise(samples):
        if a[0] <= instant <= b[0]:
            part = (instant - a[0]) / (b[0] - a[0])
            return a[column] + part * (b[column] - a[column])
    raise AssertionError(f"{instant} is outside the run")


def measured(
    config: RunConfig, samples: list[tuple[float, int, int]], warm: int
) -> dict[str, float]:
    tape = Path(config.run.folder) / "tape"
    steps = [
        [r.at for r in TapeReader(tape / f"learner-{i}.jsonl") if r.type == "StepFinished"]
        for i in range(LEARNERS)
    ]
    last = min(map(len, steps)) - config.sync.sync_every
    taken = last - warm
    begin = sum(each[warm] for each in steps) / LEARNERS
    end = sum(each[last] for each in steps) / LEARNERS
    shard: list[Record] = list(TapeReader(tape / "shard-0.jsonl"))
    finished = [
        r.data["finished_seconds"]
        for r in shard
        if r.type == "RoundFinished" and r.data["verdict"] == "merged" and begin < r.at <= end
    ]
    due = taken * config.sync.fragments / config.sync.sync_every
    step_seconds = config.workload.options["step_seconds"]
    compute = min(1.0, taken * step_seconds / (end - begin))
    kept = min(1.0, len(finished) / due)
    return {
        "compute": compute,
        "kept": kept,
        "utilization": compute * kept,
        "up_mbit": 8e-6 * (at(samples, end, 1) - at(samples, begin, 1)) / (end - begin),
        "down_mbit": 8e-6 * (at(samples, end, 2) - at(samples, begin, 2)) / (end - begin),
        "seconds": end - begin,
        "round_seconds": sum(finished) / len(finished),
    }


def one(system: str, step_seconds: float, mbit: float, steps: int, warm: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = config_of(system, step_seconds, folder, steps)
        with network_spaces.link(folder, mbit=mbit) as made:
            samples = carry_out(config, made, folder)
            real = measured(config, samples, warm)
    row = {"system": system, "step_seconds": step_seconds, "mbit": mbit, "measured": real}
    print(json.dumps(row), flush=True)
    return row


def with_prediction(row: dict[str, Any], handling_seconds: float) -> dict[str, Any]:
    config = config_of(row["system"], row["step_seconds"], Path(), 1)
    plan = predicted(config, row["mbit"], handling_seconds)
    mean = {t.direction: 8e-6 * t.mean for t in plan.traffic if t.place == "near"}
    return row | {
        "predicted": {
            "compute": plan.compute,
            "kept": plan.kept,
            "utilization": plan.utilization,
            "up_mbit": mean["up"],
            "down_mbit": mean["down"],
            "round_seconds": plan.merge_seconds,
        }
    }


def errors(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the largest differences, separately for learners that never wait and that wait.

    Utilization is in absolute points, traffic relative to the measured traffic.
    """
    found = {}
    for wait in ("never", "at_overlap"):
        alike = [row for row in rows if (row["system"] == "decoupled") == (wait == "never")]
        points = [abs(r["predicted"]["utilization"] - r["measured"]["utilization"]) for r in alike]
        traffic = [
            abs(r["predicted"][way] / r["measured"][way] - 1)
            for r in alike
            for way in ("up_mbit", "down_mbit")
        ]
        found[wait] = {"utilization": max(points), "traffic": max(traffic)}
    return found


def main() -> None:
    arguments = options(
        system=list(SYSTEMS),
        mbit=[0.4, 0.8, 2.0],
        step_seconds=1.0,
        steps=100,
        warm=8,
        again=False,  # predict again without running anything
    )
    missing = network_spaces.unavailable()
    if missing and not arguments.again:
        raise SystemExit(f"rate-limited links are not available: {missing}")
    path = RESULTS / "plan_real" / "raw.json"
    rows = {key_of(row): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    cases = [(s, arguments.step_seconds, mbit) for s in arguments.system for mbit in arguments.mbit]
    if CALIBRATION not in rows:
        cases.insert(0, CALIBRATION)
    for case in [] if arguments.again else cases:
        rows[case] = one(*case, arguments.steps, arguments.warm)
    # Predict all recorded cases, including those of earlier runs of this program.
    bare = with_prediction(rows[CALIBRATION], 0.0)
    handling = max(0.0, bare["measured"]["round_seconds"] - bare["predicted"]["round_seconds"])
    found = [with_prediction(row, handling) for key, row in rows.items() if key != CALIBRATION]
    keep(
        "plan_real",
        config={**vars(arguments), "learners": LEARNERS, **SYSTEMS},
        raw=list(rows.values()),
        result={
            "handling seconds per payload": handling,
            "largest error": errors(found),
            "cases": found,
        },
    )


def key_of(row: dict[str, Any]) -> tuple[str, float, float]:
    return row["system"], row["step_seconds"], row["mbit"]


if __name__ == "__main__":
    main()
