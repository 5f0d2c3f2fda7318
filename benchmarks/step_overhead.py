"""Cost of a learner for its training loop: time inside ``step()``, and throughput.

One process trains a byte-level GPT in blocks of steps, in turns with and without
``learner.step()``, against a shard in another process, so that one run measures both. With ``--link
MBIT`` the two processes are in network namespaces joined by a rate-limited link (needs root), which
the fragments saturate.

    python benchmarks/step_overhead.py                      # all four cases
    python benchmarks/step_overhead.py --case 25M --link 8
    python benchmarks/step_overhead.py --codec int4         # both directions
    python benchmarks/step_overhead.py --short              # steps of about 7 to 100 ms
    python benchmarks/step_overhead.py --tensors --blocks 2 # models with thousands of small tensors
    python benchmarks/step_overhead.py --short --before DIR # in turns with an older source tree
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from bench_runs import TOKEN, a_syncer, answer, called, start
from evidence import keep, options, spread
from timed_loops import by_turns, gpt_loop, medians, of_blocks, throughput_percent
from torch import nn

from decoupled_diloco import Learner
from decoupled_diloco.config.sync import bits_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from network import network_spaces

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
"""Models with this number of 8 x 8 matrices; a mixture of experts has thousands of small tensors.
"""

SHORT_FRAGMENTS = (24, 4)
"""Fragments per period of 24 steps: a merge in every step, and in every sixth step."""

BLOCK_SECONDS = 2.0
"""Minimum length of a block of short steps."""

LINKS_MBIT = {"0.87M": 1.0, "25M": 8.0}
"""Link rates that saturate: a step's traffic is 72 kB in 0.15 s, or 2.1 MB in 0.6 s, per direction.
"""

network_spaces.FAR, network_spaces.NEAR = "ddiloco-far", "ddiloco-near"


def loop_of_experts(count: int) -> tuple[nn.Module, Callable[[], int]]:
    """Return a model of small tensors, and a function that trains it for one step."""
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, foreach=True)

    def train() -> int:
        torch.stack(weights).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 8

    return model, train


def measure(case: str, address: str, blocks: int, steps: int) -> dict[str, Any]:
    """Run in the learner's process (and namespace)."""
    torch.set_num_threads(1)
    model, train = loop_of_experts(TENSORS[case]) if case in TENSORS else gpt_loop(OPTIONS[case])
    for _ in range(5):
        train()
    began = time.perf_counter()
    for _ in range(5):
        train()
    step_seconds = (time.perf_counter() - began) / 5
    steps = max(steps, int(BLOCK_SECONDS / step_seconds) if case not in CASES else 0)
    began = time.perf_counter()
    with Learner(model, address, auth_token=TOKEN, name="learner-0") as learner:
        joined = time.perf_counter() - began
        client = learner._party.membership.background.client
        assert client is not None
        before = vars(client.stats).copy()
        raw = by_turns(train, learner, blocks, steps)
        after = vars(client.stats)
        state = learner._party.membership.shared.machine.state
        sent = sum(view.latest.version.counter for view in state.fragments if view.latest)
    return {
        **raw,
        "join_seconds": joined,
        "moved": {name: after[name] - before[name] for name in before},
        "own_steps": blocks * steps,
        "sent": sent,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def condensed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the raw numbers, with quartiles per block instead of thousands of short steps."""
    blocks = {
        kind: [statistics.quantiles(each, n=4) for each in of_blocks(raw[kind])]
        for kind in ("attached", "detached")
    }
    return {**raw, **blocks, "inside": statistics.quantiles(raw["inside"], n=100)}


def summarise(raw: dict[str, Any], codec: str, fragments: int) -> dict[str, Any]:
    step, inside = statistics.median(medians(raw["detached"])), sorted(raw["inside"])
    median, p99 = statistics.median(inside), inside[min(len(inside) - 1, int(0.99 * len(inside)))]
    theory = 2 * bits_of(codec) / 8 * raw["parameters"] / fragments
    moved, cpu = raw["moved"], raw["cpu_seconds"]
    control = moved["control_bytes_sent"] + moved["control_bytes_received"]
    merges = max(1, raw["sent"])
    return {
        "parameters": raw["parameters"],
        "join_seconds": raw["join_seconds"],
        "step_seconds": step,
        "inside_step_ms": 1e3 * median,
        "inside_step_percent": {"median": 100 * median / step, "p99": 100 * p99 / step},
        "throughput_percent_of_detached": spread(throughput_percent(raw)),
        "merges_per_step": raw["sent"] / raw["own_steps"],
        "own_cpu_ms_per_step": 1e3 * (cpu["attached"] - cpu["detached"]) / raw["own_steps"],
        "merges": merges,
        "bytes_per_merge_over_theory_percent": 100 * (sum(moved.values()) / merges / theory - 1),
        "control_share_percent": 100 * control / sum(moved.values()),
    }


def run_case(
    case: str,
    mbit: float | None,
    codec: str,
    fragments: int,
    source: Path | None,
    blocks: int,
    steps: int,
) -> dict[str, Any]:
    """Return the raw numbers of one case; ``source`` selects another source tree to measure."""
    environment = dict(os.environ)
    if source is not None:
        paths = (source / "src", source / "packages/plan/src")
        environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    tables = {
        "run": {"learners": 1},
        "sync": {"fragments": fragments, "codec": {"uplink": codec, "downlink": codec}},
        "workload": {"options": {**OPTIONS.get(case, {}), "total_steps": 10**6}},
    }
    inside = [
        ["ip", "netns", "exec", space] if mbit else []
        for space in (network_spaces.FAR, network_spaces.NEAR)
    ]
    host = network_spaces.FAR_ADDRESS if mbit else "127.0.0.1"
    with (
        tempfile.TemporaryDirectory() as name,
        network_spaces.link(Path(name), mbit) if mbit else nullcontext(),
        a_syncer(tables, host=host, before=inside[0], environment=environment) as syncer,
    ):
        own = case, syncer.address, blocks, steps
        found: dict[str, Any] = answer(start(measure, *own, before=inside[1], env=environment))
    return found


def main() -> None:
    arguments = options(
        case=str,
        link=float,
        codec="bf16",
        blocks=6,
        steps=40,
        short=False,
        tensors=False,
        before=Path,
    )
    if arguments.before and not arguments.short:
        sys.exit("--before needs --short, the only measurement that compares two versions")
    codec, raw, result = arguments.codec, {}, {}
    if arguments.short:  # a merge in every step, and in every sixth step
        folder = "step_overhead_short"
        config = {"cases": SHORT, "fragments": SHORT_FRAGMENTS, "blocks": arguments.blocks}
        before = arguments.before
        cases = {
            f"{case} steps, {fragments} fragments{when}": (case, None, "bf16", fragments, source)
            for case in OPTIONS
            if case not in CASES
            for fragments in SHORT_FRAGMENTS
            for when, source in (
                {", before": before, ", now": None} if before else {"": None}
            ).items()
        }
    elif arguments.tensors:  # a merge in every step
        folder = "step_overhead_tensors"
        config = {"cases": TENSORS, "blocks": arguments.blocks, "steps": arguments.steps}
        cases = {case: (case, None, "bf16", 24, None) for case in TENSORS}
    else:
        folder = "step_overhead" + (f"_{codec}" if codec != "bf16" else "")
        config = vars(arguments) | {"cases": CASES, "links_mbit": LINKS_MBIT}
        chosen = [(case, mbit) for case in CASES for mbit in (None, LINKS_MBIT[case])]
        if arguments.case:
            chosen = [(arguments.case, arguments.link)]
        cases = {
            f"{case}, link {f'saturated at {mbit} Mbit/s' if mbit else 'idle (loopback)'}": (
                *(case, mbit, codec),
                *(24, None),
            )
            for case, mbit in chosen
        }
    for name, case in cases.items():
        if case[1] and network_spaces.unavailable():
            result[f"{case[0]}, link saturated"] = "not measured: namespaces need root"
            continue
        found = run_case(*case, arguments.blocks, arguments.steps)
        result[name] = summarise(found, *case[2:4])
        raw[name] = condensed(found) if arguments.short or arguments.tensors else found
        print(name, json.dumps(result[name], indent=1), flush=True)
    known = folder if codec == "bf16" else "step_overhead_int4"
    keep(folder, of=known, config=config, raw=raw, result=result)


if __name__ == "__main__":
    called() or main()
