"""What a learner costs on a GPU, and whether `step()` ever waits for it; at most ten minutes.

    make gpu

Each case is a process of its own that trains a GPT against a shard in another process, by turns
with and without ``learner.step()``. While it is attached, PyTorch's sync debug mode makes every
wait for the device inside ``step()`` an error. A trace shows how much of the copies to and from the
host happens while kernels run. The tests that need CUDA run first. Without a GPU this says so, and
ends well.
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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from evidence import keep, spread
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from decoupled_diloco import Learner
from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.workloads import load_workload

ESTIMATE = (
    "step() issues one copy inside the device and one to pinned memory: 0.3 to 1 ms of host time, "
    "0.2 to 0.5 % of a step of 200 ms, whatever the model's size; no wait for the device. Memory: "
    "a fragment in fp32 twice, 8 N / 24 bytes. 1.5 B parameters in bf16 with AdamW: 12 GB and "
    "activations. The syncer needs 16 bytes a parameter of host memory, the learner 4"
)
SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch_size": 2},
    "0.1B": {"layers": 12, "width": 832, "heads": 13, "context": 1024, "batch_size": 16},
    "0.5B": {"layers": 24, "width": 1280, "heads": 20, "context": 1024, "batch_size": 8},
    "1.5B": {"layers": 30, "width": 2048, "heads": 16, "context": 1024, "batch_size": 4},
}
CASES = [(size, dtype) for size in ("0.1B", "0.5B", "1.5B") for dtype in ("bf16", "fp32")]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FRAGMENTS = 24
PORT = 7313


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Makes waiting for the device an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device) -> int:
    """Bytes of the device since this was asked last."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def measure(size: str, dtype: str, token: str, blocks: int, steps: int) -> dict[str, Any]:
    """Runs in the learner's process, or in each rank's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sharded = "RANK" in os.environ
    if sharded:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if device.type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            device = torch.device("cuda", torch.cuda.current_device())
    workload = load_workload("gpt", {**SIZES[size], "total_steps": 10**6})
    model: nn.Module = workload.model().to(device, DTYPES[dtype])
    if sharded:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = workload.batches(0, 1)
    kept = [tuple(each.to(device) for each in next(batches)) for _ in range(8)]
    count = 0

    def train() -> int:
        nonlocal count
        batch = kept[count % len(kept)]
        count += 1
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return workload.tokens(batch)

    for _ in range(5):
        train()
    finish(device)
    peak(device)
    raw: dict[str, Any] = {"attached": [], "detached": [], "inside": [], "waits": []}
    train()
    finish(device)
    raw["memory before"] = peak(device)
    address = f"http://127.0.0.1:{PORT}"
    with Learner(model, address, token=token, learner_id="learner-0") as learner:

        def step(watched: bool) -> None:
            tokens = train()
            begun = time.perf_counter()
            try:
                with no_waits(device) if watched else nullcontext():
                    learner.step(tokens=tokens)
            except RuntimeError as error:
                raw["waits"].append(str(error)[:300])
                raise
            raw["inside"].append(time.perf_counter() - begun)

        for _ in range(2 * FRAGMENTS):  # every fragment once: pinned memory is made then
            step(watched=False)
        raw["inside"].clear()
        for block in range(2 * blocks):
            attached = block % 2 == 0
            finish(device)
            begun = time.perf_counter()
            for _ in range(steps):
                if attached:
                    step(watched=True)
                else:
                    train()
            finish(device)
            seconds = (time.perf_counter() - begun) / steps
            raw["attached" if attached else "detached"].append(seconds)
        raw["memory attached"] = peak(device)
        raw["trace"] = traced(lambda: step(watched=False), device)
    raw["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    if sharded:
        dist.destroy_process_group()
    return raw


def traced(step: Any, device: torch.device) -> dict[str, float]:
    """Seconds of copies between host and device, and how many of them pass beside kernels."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(FRAGMENTS):
            step()
        finish(device)
    copies, kernels = [], []
    for event in trace.events() or []:
        span = (event.time_range.start, event.time_range.end)
        is_copy = "Memcpy" in event.name and ("HtoD" in event.name or "DtoH" in event.name)
        if is_copy:
            copies.append(span)
        elif "Memcpy" not in event.name and "Memset" not in event.name:
            kernels.append(span)
    beside = sum(overlap(copy, kernels) for copy in copies)
    return {"copies": 1e-6 * sum(b - a for a, b in copies), "beside kernels": 1e-6 * beside}


def overlap(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of a span passes within any of the others.

    >>> overlap((0.0, 10.0), [(1.0, 3.0), (2.0, 4.0), (9.0, 12.0)])
    4.0
    """
    covered, end = 0.0, span[0]
    for start, stop in sorted(others):
        start, stop = max(start, end), min(stop, span[1])
        if start < stop:
            covered, end = covered + stop - start, stop
    return covered


def run_case(size: str, dtype: str, ranks: int, blocks: int, steps: int) -> list[Any]:
    """A shard, and a learner of so many ranks; 0: one that is not sharded."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "token").write_text("benchmark")
        run = {"learners": 1, "budget_steps": 10**7, "evaluator": False}
        tables: dict[str, Any] = {
            "run": {**run, "folder": str(folder / "run")},
            "sync": {"fragments": FRAGMENTS, "period": FRAGMENTS, "overlap": 2},
            "syncer": {"port": PORT, "token_file": str(folder / "token"), "durable": False},
            "workload": {"options": {**SIZES[size], "total_steps": 10**6}},
        }
        (folder / "run.toml").write_text(dump_config(RunConfig(**tables)))
        cli = [sys.executable, "-m", "decoupled_diloco.cli", "syncer", str(folder / "run.toml")]
        with (folder / "shard.log").open("wb") as log:
            shard = subprocess.Popen([*cli, "--shard", "0"], stdout=log, stderr=log)
        me = [__file__, "--measure", f"{size} {dtype}", "--into", name]
        me += ["--blocks", str(blocks), "--steps", str(steps)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        try:
            subprocess.run([sys.executable, *(torchrun if ranks else []), *me], check=True)
        finally:
            shard.terminate()
            shard.wait()
        found = [folder / f"{rank}.json" for rank in range(max(1, ranks))]
        return [json.loads(path.read_text()) for path in found]


def summarise(raw: dict[str, Any]) -> dict[str, Any]:
    step = statistics.median(raw["detached"])
    inside = sorted(raw["inside"])
    trace = raw["trace"]
    return {
        "parameters": raw["parameters"],
        "step, ms": 1e3 * step,
        "inside step(), ms": spread([1e3 * each for each in inside]),
        "inside step(), % of a step": 100 * statistics.median(inside) / step,
        "waits for the device inside step()": len(raw["waits"]),
        "tokens/s, % of the same loop without it": spread(
            [100 * d / a for a, d in zip(raw["attached"], raw["detached"], strict=True)]
        ),
        "device memory, GB": [raw["memory before"] / 1e9, raw["memory attached"] / 1e9],
        "copies beside kernels, %": 100 * trace["beside kernels"] / trace["copies"]
        if trace.get("copies")
        else "not measured",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=540.0, help="no case begins after these")
    parser.add_argument("--rehearse", action="store_true", help="a tiny model, on a CPU too")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.measure:
        size, dtype = told.measure.split()
        found = measure(size, dtype, "benchmark", told.blocks, told.steps)
        (told.into / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        return
    devices = torch.cuda.device_count()
    if not (devices or told.rehearse):
        print("no CUDA device here: nothing to check or to measure")
        return
    begun = time.monotonic()
    test = Path(__file__).parents[1] / "tests" / "unit" / "learner" / "test_store.py"
    raw: dict[str, Any] = {}
    result: dict[str, Any] = {}
    code = subprocess.run([sys.executable, "-m", "pytest", "-q", str(test)]).returncode
    result["tests with CUDA"] = "passed" if code == 0 else f"exit code {code}"
    cases = [(size, dtype, 0) for size, dtype in CASES] + [("0.5B", "bf16", devices)]
    if told.rehearse:
        cases = [("tiny", "fp32", 0), ("tiny", "bf16", 1), ("tiny", "fp32", 2)]
    failed = code != 0
    for size, dtype, ranks in cases:
        name = f"{size}, {dtype}" + (f", FSDP2 over {ranks}" if ranks else "")
        if time.monotonic() - begun > told.seconds:
            result[name] = "not measured: out of time"
            continue
        try:
            raw[name] = run_case(size, dtype, ranks, told.blocks, told.steps)
            result[name] = summarise(raw[name][0])
        except subprocess.CalledProcessError as error:
            failed, result[name] = True, f"failed: exit code {error.returncode}"
        print(name, json.dumps(result[name], indent=1), flush=True)
    if not told.rehearse:
        keep(
            "gpu",
            estimate=ESTIMATE,
            config={"sizes": SIZES, "fragments": FRAGMENTS, "devices": devices},
            raw=raw,
            result=result,
            not_measured="several machines; learners that differ; losses",
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
