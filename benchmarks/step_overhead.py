"""What a learner costs its training loop: time inside ``step()``, and throughput with and without.

One process trains a byte-level GPT in blocks of steps, by turns with and without calling
``learner.step()``, against a shard in another process; so both are measured in one run. With
``--link MBIT`` the two live in network namespaces joined by a rate-limited link (needs root), slow
enough to be saturated by the fragments.

    python benchmarks/step_overhead.py                      # all four cases
    python benchmarks/step_overhead.py --case 25M --link 8
    python benchmarks/step_overhead.py --codec int4         # both ways
    python benchmarks/step_overhead.py --short              # steps of about 7 to 100 ms
    python benchmarks/step_overhead.py --tensors --blocks 2 # models of thousands of small tensors
    python benchmarks/step_overhead.py --short --before DIR # by turns with an older source tree
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch
from evidence import keep, spread
from torch import nn

from decoupled_diloco import Learner
from decoupled_diloco.config.sync import bits_of
from decoupled_diloco.workloads import load_workload

ESTIMATE = (
    "0.87 M: a fragment is 36 k elements, its copy and scatter 30 µs, the machine and tape "
    "200 µs: 0.3 ms of a 150 ms step, 0.2 %; the background encodes and decodes 1 ms per step on "
    "another core. 25 M: a fragment is 1 M elements, copy and scatter 2 ms of 600 ms, 0.4 %; "
    "throughput 98 to 99 %, since both cores share the memory"
)
CASES = {
    "0.87M": {"layers": 4, "width": 128, "heads": 4, "batch_size": 16},
    "25M": {"layers": 8, "width": 512, "heads": 8, "batch_size": 2},
}
SHORT = {
    "0.06M": {"layers": 1, "width": 64, "heads": 2, "context": 64, "batch_size": 4},
    "0.2M": {"layers": 2, "width": 96, "heads": 2, "context": 128, "batch_size": 4},
    "0.87M": {"layers": 4, "width": 128, "heads": 4, "batch_size": 8},
}
OPTIONS = {f"{name}, short": options for name, options in SHORT.items()} | CASES
TENSORS = {"2,000 tensors": 2_000, "20,000 tensors": 20_000}
"""Models with this many 8 x 8 matrices; a mixture of experts has thousands of small tensors."""

SHORT_FRAGMENTS = (24, 4)
"""Of a period of 24 steps: a merge in every step, and one in every sixth."""

BLOCK_SECONDS = 2.0
"""What a block of short steps lasts at least."""

LINKS_MBIT = {"0.87M": 1.0, "25M": 8.0}
"""Saturating: a step's traffic is 72 kB in 0.15 s, and 2.1 MB in 0.6 s, each way."""

SPACES = ("ddiloco-far", "ddiloco-near")
NETWORK = "10.87.0"


ESTIMATE_CODED = (
    "a fragment of 36 k elements is 19 kB in int4, so reports of 500 bytes a step are 3 % of it, "
    "with 1 M elements 0.1 %; of top-k five times that. The background encodes a fragment of 1 M "
    "elements in 2 ms more"
)


ESTIMATE_SHORT = (
    "step() takes 0.35 ms and a merge 2.5 ms of the background's CPU, whatever the step: with a "
    "merge in every step 5 and 13 % of a step of 7 ms where no core is free, 2 and 5 % of one of "
    "20 ms; with four fragments a sixth of the background's part"
)


ESTIMATE_TENSORS = (
    "of 20,000 tensors a fragment has 834: its copy 1 ms, its scatter 1.5 ms, the guard's slice of "
    "512 tensors 0.3 ms: 3 ms of a step of 600 ms, 0.5 %; the same share of 2,000 tensors"
)


def run_file(case: str, host: str, folder: Path, codec: str, fragments: int = 24) -> str:
    """The run's settings as TOML. They contain nothing that older versions do not know."""
    tables = {
        "run": {
            "learners": 1,
            "budget_steps": 10**7,
            "evaluator": False,
            "folder": str(folder / "run"),
        },
        "sync": {
            "fragments": fragments,
            "period": 24,
            "overlap": 2,
            "uplink_codec": codec,
            "downlink_codec": codec,
        },
        "syncer": {"host": host, "port": 7311, "token_file": str(folder / "token")},
        "workload": {"options": {**OPTIONS.get(case, {}), "total_steps": 10**6}},
    }
    return tomli_w.dumps(tables)


def loop_of(case: str) -> tuple[nn.Module, Callable[[], int]]:
    """A case's model, and one step of its training."""
    if case in TENSORS:
        return loop_of_experts(TENSORS[case])
    workload = load_workload("gpt", {**OPTIONS[case], "total_steps": 10**6})
    model = workload.model()
    optimizer = workload.optimizer(model)
    batches = workload.batches(0, 1)

    def train() -> int:
        batch = next(batches)
        workload.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return workload.tokens(batch)

    return model, train


def loop_of_experts(count: int) -> tuple[nn.Module, Callable[[], int]]:
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, foreach=True)

    def train() -> int:
        torch.stack(weights).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 8

    return model, train


def measure(case: str, address: str, token: str, blocks: int, steps: int) -> dict[str, Any]:
    """Runs in the learner's process (and namespace)."""
    torch.set_num_threads(1)
    model, train = loop_of(case)
    for _ in range(5):
        train()
    began = time.perf_counter()
    for _ in range(5):
        train()
    step_seconds = (time.perf_counter() - began) / 5
    steps = max(steps, int(BLOCK_SECONDS / step_seconds) if case not in CASES else 0)
    raw: dict[str, Any] = {"attached": [], "detached": [], "inside": [], "versions": []}
    began = time.perf_counter()
    with Learner(model, address, token=token, learner_id="learner-0") as learner:
        raw["join_seconds"] = time.perf_counter() - began
        client = learner._background._client
        assert client is not None
        before = vars(client.stats).copy()
        own, cpu = 0, {"attached": 0.0, "detached": 0.0}
        for block in range(2 * blocks):
            attached = block % 2 == 0
            began_cpu = time.process_time()
            for number in range(steps):
                begun = time.perf_counter()
                tokens = train()
                if attached:
                    inside = time.perf_counter()
                    learner.step(tokens=tokens)
                    done = time.perf_counter()
                    own += 1
                    if number >= 3:
                        raw["inside"].append(done - inside)
                if number >= 3:
                    key = "attached" if attached else "detached"
                    raw[key].append((block // 2, time.perf_counter() - begun))
            cpu["attached" if attached else "detached"] += time.process_time() - began_cpu
        raw["cpu_seconds"] = cpu
        after = vars(client.stats)
        raw["moved"] = {name: after[name] - before[name] for name in before}
        raw["own_steps"] = own
        state = learner._shared.machine.state
        raw["sent"] = sum(view.latest.version.counter for view in state.fragments if view.latest)
    raw["parameters"] = sum(p.numel() for p in model.parameters())
    return raw


def condensed(raw: dict[str, Any]) -> dict[str, Any]:
    """The raw numbers, with quartiles of each block in place of thousands of short steps."""
    kept = {name: value for name, value in raw.items() if not isinstance(value, list)}
    for kind in ("attached", "detached"):
        blocks: dict[int, list[float]] = {}
        for block, seconds in raw[kind]:
            blocks.setdefault(block, []).append(seconds)
        kept[kind] = [statistics.quantiles(each, n=4) for each in blocks.values()]
    return kept | {"inside": statistics.quantiles(raw["inside"], n=100)}


def summarise(raw: dict[str, Any], codec: str, fragments: int = 24) -> dict[str, Any]:
    def block_medians(kind: str) -> list[float]:
        blocks = sorted({block for block, _ in raw[kind]})
        return [statistics.median(s for b, s in raw[kind] if b == block) for block in blocks]

    attached, detached = block_medians("attached"), block_medians("detached")
    step = statistics.median(detached)
    inside = sorted(raw["inside"])
    p99 = inside[min(len(inside) - 1, int(0.99 * len(inside)))]
    theory = 2 * bits_of(codec) / 8 * raw["parameters"] / fragments
    moved = sum(raw["moved"].values())
    merges = max(1, raw["sent"])
    return {
        "parameters": raw["parameters"],
        "join_seconds": raw["join_seconds"],
        "step_seconds": step,
        "inside_step_ms": 1e3 * statistics.median(inside),
        "inside_step_percent": {
            "median": 100 * statistics.median(inside) / step,
            "p99": 100 * p99 / step,
        },
        "throughput_percent_of_detached": spread(
            [100 * d / a for a, d in zip(attached, detached, strict=True)]
        ),
        "merges_per_step": raw["sent"] / raw["own_steps"],
        "own_cpu_ms_per_step": 1e3
        * (raw["cpu_seconds"]["attached"] - raw["cpu_seconds"]["detached"])
        / raw["own_steps"],
        "merges": merges,
        "bytes_per_merge_over_theory_percent": 100 * (moved / merges / theory - 1),
        "control_share_percent": 100
        * (raw["moved"]["control_bytes_sent"] + raw["moved"]["control_bytes_received"])
        / moved,
    }


def in_space(space: str | None) -> list[str]:
    return ["ip", "netns", "exec", space] if space else []


def make_link(mbit: float) -> None:
    far, near = SPACES
    run = lambda *words: subprocess.run(words, check=True)  # noqa: E731
    for space in SPACES:
        subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)
        run("ip", "netns", "add", space)
    run("ip", "link", "add", "dd0", "netns", far, "type", "veth", "peer", "dd1", "netns", near)
    for space, device, number in ((far, "dd0", 1), (near, "dd1", 2)):
        prefix = in_space(space)
        run(*prefix, "ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", device)
        run(*prefix, "ip", "link", "set", device, "up")
        rate = ["rate", f"{mbit}mbit", "burst", "16kb", "latency", "100ms"]
        run(*prefix, "tc", "qdisc", "add", "dev", device, "root", "tbf", *rate)


def drop_link() -> None:
    for space in SPACES:
        subprocess.run(["ip", "netns", "del", space], check=False, stderr=subprocess.DEVNULL)


def run_case(
    case: str,
    mbit: float | None,
    codec: str,
    blocks: int,
    steps: int,
    fragments: int = 24,
    source: Path | None = None,
) -> dict[str, Any]:
    """The raw numbers of one case; ``source``: another tree of the repository, to measure that."""
    environment = dict(os.environ)
    if source is not None:
        paths = (source / "src", source / "packages/plan/src")
        environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    host = f"{NETWORK}.1" if mbit else "127.0.0.1"
    far, near = SPACES if mbit else (None, None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if mbit:
            make_link(mbit)
        (folder / "token").write_text("benchmark")
        (folder / "run.toml").write_text(run_file(case, host, folder, codec, fragments))
        cli = [sys.executable, "-m", "decoupled_diloco.cli"]
        serve = [*cli, "syncer", str(folder / "run.toml"), "--shard", "0"]
        with (folder / "shard.log").open("wb") as log:
            shard = subprocess.Popen(
                [*in_space(far), *serve], stdout=log, stderr=log, env=environment
            )
        try:
            me = [sys.executable, __file__, "--measure", "--case", case, "--address"]
            command = [*in_space(near), *me, f"http://{host}:7311"]
            command += ["--blocks", str(blocks), "--steps", str(steps)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        finally:
            shard.terminate()
            shard.wait()
            if mbit:
                drop_link()
    raw: dict[str, Any] = json.loads(done.stdout)
    return raw


def measure_short(blocks: int, before: Path | None) -> None:
    """Steps of about 7 to 100 ms, with a merge in every step and in every sixth."""
    raw, result = {}, {}
    sources = {"": None} if before is None else {", before": before, ", now": None}
    for case in (each for each in OPTIONS if each not in CASES):
        for fragments in SHORT_FRAGMENTS:
            for when, source in sources.items():
                name = f"{case} steps, {fragments} fragments{when}"
                found = run_case(case, None, "bf16", blocks, 40, fragments, source)
                result[name] = summarise(found, "bf16", fragments)
                raw[name] = condensed(found)
                print(name, json.dumps(result[name], indent=1), flush=True)
    keep(
        "step_overhead_short",
        estimate=ESTIMATE_SHORT,
        config={"cases": SHORT, "fragments": SHORT_FRAGMENTS, "blocks": blocks},
        raw=raw,
        result=result,
        not_measured="CUDA; a slow link; several learners on one machine",
    )


def measure_tensors(blocks: int, steps: int) -> None:
    """Models of thousands of small tensors, with a merge in every step."""
    raw, result = {}, {}
    for name in TENSORS:
        found = run_case(name, None, "bf16", blocks, steps)
        result[name], raw[name] = summarise(found, "bf16"), condensed(found)
        print(name, json.dumps(result[name], indent=1), flush=True)
    keep(
        "step_overhead_tensors",
        estimate=ESTIMATE_TENSORS,
        config={"cases": TENSORS, "blocks": blocks, "steps": steps},
        raw=raw,
        result=result,
        not_measured="CUDA; a slow link; several learners on one machine",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=[*OPTIONS, *TENSORS])
    parser.add_argument("--link", type=float, help="Mbit/s of a rate-limited link")
    parser.add_argument("--codec", default="bf16", help="of both ways")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--short", action="store_true", help="short steps, two numbers of fragments"
    )
    parser.add_argument("--tensors", action="store_true", help="thousands of small tensors")
    parser.add_argument("--before", type=Path, help="an older tree of the repository, for --short")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.before and not arguments.short:
        parser.error("--before needs --short: no other measurement compares two versions")
    if arguments.short:
        measure_short(arguments.blocks, arguments.before)
        return
    if arguments.tensors:
        measure_tensors(arguments.blocks, arguments.steps)
        return
    if arguments.measure:
        print(
            json.dumps(
                measure(
                    arguments.case,
                    arguments.address,
                    "benchmark",
                    arguments.blocks,
                    arguments.steps,
                )
            )
        )
        return
    chosen = [(c, m) for c in CASES for m in (None, LINKS_MBIT[c])]
    if arguments.case:
        chosen = [(arguments.case, arguments.link)]
    raw, result = {}, {}
    for case, mbit in chosen:
        if mbit and os.geteuid() != 0:
            result[f"{case}, link saturated"] = "not measured: namespaces need root"
            continue
        name = f"{case}, link {f'saturated at {mbit} Mbit/s' if mbit else 'idle (loopback)'}"
        raw[name] = run_case(case, mbit, arguments.codec, arguments.blocks, arguments.steps)
        result[name] = summarise(raw[name], arguments.codec)
        print(name, json.dumps(result[name], indent=1), flush=True)
    coded = arguments.codec != "bf16"
    keep(
        f"step_overhead_{arguments.codec}" if coded else "step_overhead",
        estimate=ESTIMATE_CODED if coded else ESTIMATE,
        config=vars(arguments) | {"cases": CASES, "links_mbit": LINKS_MBIT},
        raw=raw,
        result=result,
        not_measured="CUDA; several learners on one machine; models beyond 25 M parameters",
    )


if __name__ == "__main__":
    main()
