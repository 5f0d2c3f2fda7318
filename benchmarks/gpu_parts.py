"""Parts of `gpu.py` that run in separate processes."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from virtual import trained

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from decoupled_diloco import Learner, Timeouts
from decoupled_diloco.config import RunConfig
from decoupled_diloco.merge import layout_of, partition
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.gpt import GptOptions, GptWorkload
from decoupled_diloco_lab.simulate.training import train_virtually
from on_gpu.waits import Sleeper, finish, no_waits

SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch_size": 2},
    "0.1B": {"layers": 12, "width": 832, "heads": 13, "context": 1024, "batch_size": 16},
    "0.5B": {"layers": 24, "width": 1280, "heads": 20, "context": 1024, "batch_size": 8},
    "1.5B": {"layers": 30, "width": 2048, "heads": 16, "context": 1024, "batch_size": 4},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FRAGMENTS = 24
BLOCKS = 3
"""Number of blocks of steps with `step`, and of blocks without."""

STEPS_OF_A_BLOCK = (4, 48)
SHARES = {"warm up": 0.35, "by turns": 0.35, "asleep": 0.15}
"""Shares of a learner's seconds; start, join and end take additional time."""

ASLEEP_SECONDS = 0.1
TRACED_STEPS = (6, 24)
COPY_MICROSECONDS_MIN = 20.0
"""Shorter copies are not fragments: FSDP2 copies small tables to the device."""

COMPARISON: dict[str, Any] = {
    "learners": 8,
    "steps": 320,
    "model": {"layers": 6, "width": 384, "heads": 6, "context": 256, "eval_batches": 16},
    "batch_size": 8,
    "learning_rate": 2e-3,
}
"""11 M parameters, 2,048 tokens per step of each learner."""


def run_part(part: Any, into: Path, device: str, syncer: str) -> None:
    """Run a part, and write its results into a folder: one file per rank."""
    rank = os.environ.get("RANK", "0")
    try:
        if part.kind == "learner":
            found = LearnerPart(part, torch.device(device), into).measure(syncer)
        else:
            found = comparison(torch.device(device), tiny=bool(part.size))
    except Exception as error:
        (into / f"failed-{rank}.json").write_text(json.dumps(f"{type(error).__name__}: {error}"))
        raise
    (into / f"{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()


def device_bytes(device: torch.device) -> int:
    """Return the peak of allocated device memory since the last call."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def host_bytes(device: torch.device) -> dict[str, int]:
    """Return the process's resident memory, and the host memory that PyTorch has pinned."""
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    stats = torch.cuda.host_memory_stats() if device.type == "cuda" else {}
    pinned = int(stats.get("allocated_bytes.current", 0))
    return {"resident": 1024 * int(resident.split()[1]), "pinned": pinned}


class LearnerPart:
    """The process of a learner, or of one of its ranks.

    Args:
        part: The model and the time limit.
        device: ``cuda`` or ``cpu``.
        into: Folder for the trace.
    """

    def __init__(self, part: Any, device: torch.device, into: Path) -> None:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, which is usual for fp32 training
        self._seconds = {what: share * part.seconds for what, share in SHARES.items()}
        self._into = into
        self._sharded = "RANK" in os.environ
        if self._sharded:
            if device.type == "cuda":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
                device = torch.device("cuda", torch.cuda.current_device())
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self.device = device
        self._workload = load_workload("gpt", {**SIZES[part.size], "total_steps": 10**6})
        with torch.device(device):
            model: nn.Module = self._workload.model()
        self.model = model.to(DTYPES[part.dtype])
        if self._sharded:
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for block in self.model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        batches = self._workload.batches(0, 1)
        kept = [next(batches) for _ in range(8)]
        self._batches = [tuple(each.to(device) for each in batch) for batch in kept]
        self._trained = 0
        self._applied: list[int] = []
        self._versions: tuple[str, ...] = ()

    def _note(self, versions: tuple[str, ...]) -> None:
        """Notes the fragments that have been applied since the last call."""
        pairs = zip(self._versions, versions, strict=True)
        self._applied += [p for p, (old, new) in enumerate(pairs) if old != new]
        self._versions = versions

    def train(self) -> int:
        """Run one step of the loop without the learner; return its tokens."""
        batch = self._batches[self._trained % len(self._batches)]
        self._trained += 1
        self._workload.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return self._workload.tokens(batch)

    def measure(self, syncer: str) -> dict[str, Any]:
        """Run the whole part."""
        for _ in range(3):
            self.train()
        finish(self.device)
        device_bytes(self.device)
        began = time.monotonic()
        for _ in range(3):
            self.train()
        finish(self.device)
        self._step_seconds = (time.monotonic() - began) / 3
        memory, host = [device_bytes(self.device)], host_bytes(self.device)
        numels = [each.numel for each in partition(layout_of(self.model), FRAGMENTS)]
        raw: dict[str, Any] = {"fragment bytes": 4 * max(numels)}
        raw["parameters"] = sum(parameter.numel() for parameter in self.model.parameters())
        with Learner(
            self.model,
            syncer,
            auth_token="benchmark",
            name="learner-0",
            timeouts=Timeouts(join=90.0, flush=0.0),
        ) as learner:
            self._versions = learner.versions
            learner.on_weights_updated(lambda names: self._note(learner.versions))
            self._warm_up(learner)
            raw["fragments before"] = len(set(self._applied))
            raw |= self._by_turns(learner)
            memory.append(device_bytes(self.device))
            after = host_bytes(self.device)
            raw["host bytes"] = {name: [host[name], after[name]] for name in host}
            raw["device bytes"] = memory
            raw["during a sleeping kernel"] = self._asleep(learner)
            raw["trace"] = self._traced(learner)
        if self._sharded:
            dist.destroy_process_group()
        return raw

    def _agreed(self, value: Any) -> Any:
        """Return rank 0's value, because all ranks must take the same steps."""
        if not self._sharded:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _warm_up(self, learner: Learner) -> None:
        """Train until every fragment was applied and all memory is allocated; time-limited."""
        end = time.monotonic() + self._seconds["warm up"]
        while self._agreed(len(set(self._applied)) < FRAGMENTS and time.monotonic() < end):
            for _ in range(4):
                learner.step(tokens=self.train())
        finish(self.device)

    def _by_turns(self, learner: Learner) -> dict[str, Any]:
        least, most = STEPS_OF_A_BLOCK
        steps = int(self._seconds["by turns"] / (2 * BLOCKS * max(1e-6, self._step_seconds)))
        steps = self._agreed(max(least, min(most, steps)))
        found: dict[str, Any] = {"attached": [], "detached": [], "inside": []}
        before = len(self._applied)
        device_bytes(self.device)
        for block in range(2 * BLOCKS):
            attached = block % 2 == 0
            finish(self.device)
            began = time.perf_counter()
            for _ in range(steps):
                tokens = self.train()
                if attached:
                    found["inside"].append(self._watched(learner, tokens))
            finish(self.device)
            seconds = (time.perf_counter() - began) / steps
            found["attached" if attached else "detached"].append(seconds)
        return {**found, "applied while measured": len(self._applied) - before}

    def _watched(self, learner: Learner, tokens: int) -> float:
        """Return the seconds inside `step`, in which a wait for the device is an error."""
        began = time.perf_counter()
        with no_waits(self.device):
            learner.step(tokens=tokens)
        return time.perf_counter() - began

    def _asleep(self, learner: Learner) -> dict[str, Any]:
        """Call `step` while the device is busy."""
        sleeper, before, steps = Sleeper(self.device), len(self._applied), []
        least, end = STEPS_OF_A_BLOCK[0], time.monotonic() + self._seconds["asleep"]
        while self._agreed(
            len(steps) < FRAGMENTS and (len(steps) < least or time.monotonic() < end)
        ):
            tokens = self.train()
            finish(self.device)
            is_busy = sleeper.begin(ASLEEP_SECONDS)
            seconds = self._watched(learner, tokens)
            steps.append({"seconds": seconds, "returned before its end": is_busy()})
        finish(self.device)
        return {"steps": steps, "applied": len(self._applied) - before}

    def _traced(self, learner: Learner) -> dict[str, float]:
        """Trace some steps with fragments on the device."""
        if self.device.type != "cuda":
            return {}
        (least, most), before = TRACED_STEPS, len(self._applied)
        finish(self.device)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for number in range(1, most + 1):
                learner.step(tokens=self.train())
                seen_enough = len(self._applied) - before >= 2 and not self._sharded
                if number >= least and seen_enough:
                    break
            finish(self.device)
        if os.environ.get("RANK", "0") == "0":
            trace.export_chrome_trace(str(self._into / "trace.json.gz"))
        cuda = torch.autograd.DeviceType.CUDA
        return seen(
            (each.name, each.device_resource_id, each.time_range.start, each.time_range.end)
            for each in trace.events() or []
            if each.device_type == cuda and not each.is_user_annotation
        )


def seen(events: Iterator[tuple[str, int, float, float]]) -> dict[str, float]:
    """Return the seconds of copies and kernels in a trace: name, stream, start and end in µs.

    >>> seen(iter([("gemm", 7, 0.0, 10e6), ("Memcpy DtoH (Device -> Pinned)", 9, 8e6, 12e6)]))
    {'kernels': 10.0, 'copies': 4.0, 'during kernels': 2.0, 'from or to pinned memory': 4.0, \
'on a separate stream': 4.0}
    """
    copies, kernels = [], []
    for name, stream, start, end in events:
        if name.startswith("Memcpy") and ("HtoD" in name or "DtoH" in name):
            if end - start >= COPY_MICROSECONDS_MIN:
                copies.append((name, stream, start, end))
        elif not name.startswith(("Memcpy", "Memset")):
            kernels.append((stream, start, end))
    streams = {stream for stream, _, _ in kernels}
    training = max(
        streams, key=lambda own: sum(b - a for stream, a, b in kernels if stream == own), default=-1
    )
    spans = sorted((start, end) for _, start, end in kernels)
    return {
        "kernels": 1e-6 * sum(b - a for a, b in spans),
        "copies": 1e-6 * sum(b - a for _, _, a, b in copies),
        "during kernels": 1e-6 * sum(overlap((a, b), spans) for _, _, a, b in copies),
        "from or to pinned memory": 1e-6
        * sum(b - a for name, _, a, b in copies if "Pinned" in name),
        "on a separate stream": 1e-6 * sum(b - a for _, on, a, b in copies if on != training),
    }


def overlap(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Return how much of a span overlaps with any of the others, which are sorted.

    >>> overlap((0.0, 10.0), [(1.0, 3.0), (2.0, 4.0), (9.0, 12.0)])
    4.0
    """
    covered, end = 0.0, span[0]
    for start, stop in others:
        start, stop = max(start, end), min(stop, span[1])
        if start < stop:
            covered, end = covered + stop - start, stop
    return covered


class GptOnDevice(GptWorkload):
    """GPT workload whose models are on a device."""

    device = torch.device("cpu")

    def model(self) -> nn.Module:
        return super().model().to(self.device)


def comparison(device: torch.device, *, tiny: bool) -> dict[str, dict[str, float]]:
    """Return the losses of several learners, data-parallel training, and one learner alone."""
    learners, steps, rate = (COMPARISON[each] for each in ("learners", "steps", "learning_rate"))
    options = {**COMPARISON["model"], "batch_size": COMPARISON["batch_size"], "learning_rate": rate}
    if tiny:
        options |= {"layers": 1, "width": 16, "heads": 2, "context": 16, "eval_batches": 1}
        learners, steps = 2, 4
    config = RunConfig(
        run={"learners": learners, "max_steps": steps, "seed": 1},
        sync={"fragments": 4 if tiny else 24, "sync_every": 4 if tiny else 24, "overlap_steps": 2},
        data={"elastic": False},
        syncer={"persist": False},  # nothing fails here, and a disk in memory may be small
        workload={"options": {**options, "warmup_steps": min(20, steps - 1)}},
    )
    workload = GptOnDevice(GptOptions(**config.workload_options()))
    workload.device = device
    found: dict[str, dict[str, float]] = {}

    def measured(name: str, loss: Callable[[], float]) -> None:
        began = time.monotonic()
        found[name] = {"loss": loss(), "seconds": round(time.monotonic() - began, 1)}
        print(name, found[name], flush=True)

    def reference(parts: int) -> float:
        return workload.evaluate(trained(workload, steps, parts, learners))["loss"]

    measured("data-parallel", lambda: reference(learners))
    measured("alone", lambda: reference(1))
    measured("decoupled", lambda: train_virtually(config, workload=workload).evaluate()["loss"])
    return found
