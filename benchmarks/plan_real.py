"""Predictions of `ddiloco plan` against real runs over links with a set rate.

Two learners at one end of a link share it, the shard is at the other end; network namespaces joined
by a veth pair with tbf in both directions (root and iproute2). Each case is a run of the paced
workload; from its tapes: the share of the time in which learners step, and the rounds that took
place; from the interface's counters: traffic. The planner gets the same numbers, and one that was
measured before them in a run over a fast link: what processes take for a body, on that machine.

    python benchmarks/plan_real.py
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from evidence import RESULTS, keep

from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.observe.records import Record
from decoupled_diloco.observe.tape import TapeReader
from decoupled_diloco.protocol.options import Options
from decoupled_diloco_plan.bandwidth.case import Case, Model, wire_format
from decoupled_diloco_plan.bandwidth.inputs import model_of
from decoupled_diloco_plan.bandwidth.network import HUB, Link, Network, Site
from decoupled_diloco_plan.bandwidth.rounds import simulate
from decoupled_diloco_plan.bandwidth.steady import Rounds

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from network import spaces

spaces.FAR, spaces.NEAR = "ddplan-far", "ddplan-near"

ESTIMATE = (
    "utilisation within 10 points, since processes on two shared cores answer late; traffic within "
    "15 %: the link carries frames, of which bodies are 95 %, and the planner fills 88 % of it. "
    "After the first cases the latency of the queue and the handling of a body were added to what "
    "the planner is told: without them streaming was up to 49 points too high. The latency of a "
    "full queue made those that wait up to 17 points too low, so it is that of the queue times the "
    "share of the time in which the link is busy"
)
LEARNERS = 2
QUEUE_SECONDS = 0.2
"""What tbf is configured to hold back: a message waits for so long behind a body, or for as long as
bodies there are. The planner is told this, times the share of the time in which the link is busy,
as the link's latency."""
CALIBRATION = ("decoupled", 1.0, 100.0)
"""A link so fast that a round's time is what the processes take for it; no case of the result."""
SYSTEMS: dict[str, dict[str, Any]] = {
    "decoupled": {"fragments": 8, "period": 8, "overlap": 2},
    "streaming": {"fragments": 8, "period": 8, "overlap": 2, "quorum": LEARNERS},
    "diloco": {"fragments": 1, "period": 8, "overlap": 0, "quorum": LEARNERS},
}
WAITS = {"grace_margin": 0.0, "wait": "at_overlap"}


def config_of(system: str, step_seconds: float, folder: Path, steps: int) -> RunConfig:
    sync = SYSTEMS[system] | ({} if system == "decoupled" else WAITS)
    return RunConfig(
        run={
            "folder": folder / "run",
            "learners": LEARNERS,
            "budget_steps": steps,
            "evaluator": False,
        },
        sync=sync,
        syncer={"host": spaces.FAR_ADDRESS, "port": 7070, "token_file": folder / "token"},
        workload={
            "name": "paced",
            "options": {
                "step_seconds": step_seconds,
                "corpus_bytes_max": 200_000,
                "warmup_steps": 0,
                "batch_size": 1,
                "width": 64,
                "layers": 2,
            },
        },
    )


def predicted(config: RunConfig, mbit: float, handling_seconds: float) -> Rounds:
    found, sync = model_of(config), config.sync
    model = Model(found["params"], found["layers"] or 1, found["step_seconds"])
    rate = mbit * 1e6 / 8
    bodies = LEARNERS * 2 * model.params / sync.fragments / rate
    busy = bodies * sync.fragments / sync.period / model.step_seconds
    latency = min(1.0, busy) * min(QUEUE_SECONDS, bodies)
    network = Network(
        (Site("near", LEARNERS, Link(rate, rate, latency)),), HUB, Link(math.inf, math.inf)
    )
    options = Options(
        fragments=sync.fragments,
        period=sync.period,
        overlap=sync.overlap,
        quorum=sync.quorum,
        wait=sync.wait,
    )
    formats = wire_format(sync.uplink_codec), wire_format(sync.downlink_codec)
    return simulate(Case(model, options, network, *formats, handling_seconds=handling_seconds))


def counters() -> tuple[float, int, int]:
    """Now, and the bytes that have left the learners' end and come in."""
    names = [f"/sys/class/net/dd1/statistics/{way}_bytes" for way in ("tx", "rx")]
    command = ["ip", "netns", "exec", spaces.NEAR, "cat", *names]
    sent, received = subprocess.run(command, check=True, capture_output=True).stdout.split()
    return time.monotonic(), int(sent), int(received)


def carry_out(config: RunConfig, made: spaces.Link, folder: Path) -> list[tuple[float, int, int]]:
    """The run; gives the counters over its time."""
    (folder / "token").write_text("a secret")
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    made.start(spaces.FAR, "syncer", str(path), "--shard", "0")
    for index in range(LEARNERS):
        made.start(spaces.NEAR, "learner", str(path), "--index", str(index))
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
    raise AssertionError(f"{instant} is outside of the run")


def measured(
    config: RunConfig, samples: list[tuple[float, int, int]], warm: int
) -> dict[str, float]:
    tape = Path(config.run.folder) / "tape"
    steps = [
        [r.at for r in TapeReader(tape / f"learner-{i}.jsonl") if r.type == "StepFinished"]
        for i in range(LEARNERS)
    ]
    last = min(map(len, steps)) - config.sync.period
    taken = last - warm
    begin = sum(each[warm] for each in steps) / LEARNERS
    end = sum(each[last] for each in steps) / LEARNERS
    shard: list[Record] = list(TapeReader(tape / "shard-0.jsonl"))
    merged = [
        r
        for r in shard
        if r.type == "RoundFinished" and r.data["verdict"] == "merged" and begin < r.at <= end
    ]
    finished = [r.data["finished_seconds"] for r in merged]
    due = taken * config.sync.fragments / config.sync.period
    step_seconds = config.workload.options["step_seconds"]
    compute = min(1.0, taken * step_seconds / (end - begin))
    kept = min(1.0, len(merged) / due)
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
        with spaces.link(folder, mbit=mbit) as made:
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
    """The largest differences, apart for learners that never wait and those that do.

    In points of utilisation, and of traffic as a share of what was there.
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--mbit", type=float, nargs="+", default=[0.4, 0.8, 2.0])
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--again", action="store_true", help="predict again; start no run")
    arguments = parser.parse_args()
    missing = spaces.unavailable()
    if missing and not arguments.again:
        raise SystemExit(f"no links with a set rate here: {missing}")
    path = RESULTS / "plan_real" / "raw.json"
    rows = {key_of(row): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    cases = [
        (system, arguments.step_seconds, mbit)
        for system in arguments.system
        for mbit in arguments.mbit
    ]
    if CALIBRATION not in rows:
        cases.insert(0, CALIBRATION)
    for case in [] if arguments.again else cases:
        rows[case] = one(*case, arguments.steps, arguments.warm)
    store(list(rows.values()), vars(arguments))


def key_of(row: dict[str, Any]) -> tuple[str, float, float]:
    return row["system"], row["step_seconds"], row["mbit"]


def store(rows: list[dict[str, Any]], arguments: dict[str, Any]) -> None:
    """Predicts every case that there is, those of earlier runs of this program too."""
    (first,) = [row for row in rows if key_of(row) == CALIBRATION]
    bare = with_prediction(first, 0.0)
    handling = max(0.0, bare["measured"]["round_seconds"] - bare["predicted"]["round_seconds"])
    cases = [with_prediction(row, handling) for row in rows if row is not first]
    keep(
        "plan_real",
        estimate=ESTIMATE,
        config={**arguments, "learners": LEARNERS, **SYSTEMS},
        raw=rows,
        result={
            "handling seconds of a body": handling,
            "largest error": errors(cases),
            "cases": cases,
        },
        not_measured="links with latency and loss, several sites, models of real size; each case "
        "ran once",
    )


if __name__ == "__main__":
    main()
