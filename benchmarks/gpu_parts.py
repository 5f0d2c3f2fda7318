"""The parts of `gpu.py`, as they run in processes of their own."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_product import PARTS
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from decoupled_diloco import Learner
from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.sync import EXACT_CODECS
from decoupled_diloco.learner.store import ModuleStore, Rounded
from decoupled_diloco.merge import (
    Codec,
    Fragment,
    codec,
    codec_names,
    contribution,
    layout_of,
    parameters_numel,
    partition,
    receive,
)
from decoupled_diloco.merge.codec import BuffersExact
from decoupled_diloco.simulate.training import train_virtually
from decoupled_diloco.storage.states import on_host
from decoupled_diloco.workloads import load_workload
from decoupled_diloco.workloads.gpt import GptOptions, GptWorkload

SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "context": 64, "batch_size": 2},
    "0.1B": {"layers": 12, "width": 832, "heads": 13, "context": 1024, "batch_size": 16},
    "0.5B": {"layers": 24, "width": 1280, "heads": 20, "context": 1024, "batch_size": 8},
    "1.5B": {"layers": 30, "width": 2048, "heads": 16, "context": 1024, "batch_size": 4},
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FRAGMENTS = 24
BLOCKS = 3
"""Of steps with `step`, and as many without."""

STEPS_OF_A_BLOCK = (4, 48)
SHARES = {"warm up": 0.35, "by turns": 0.35, "asleep": 0.15}
"""Of a learner's seconds; to start, to join and to end come on top."""

ASLEEP_SECONDS = 0.1
TRACED_STEPS = (6, 24)
COPY_MICROSECONDS_MIN = 20.0
"""What takes less is no fragment: FSDP2 brings small tables of its own to the device."""

COMPARISON: dict[str, Any] = {
    "learners": 8,
    "steps": 320,
    "model": {"layers": 6, "width": 384, "heads": 6, "context": 256, "eval_batches": 16},
    "batch_size": 8,
    "learning_rate": 2e-3,
}
"""11 M parameters, 2,048 tokens a step of each learner."""


def run_part(part: Any, into: Path, device: str, syncer: str) -> None:
    """Does a part, and writes what it found into a folder: one file of each rank."""
    rank = os.environ.get("RANK", "0")
    try:
        if part.kind == "learner":
            found = LearnerPart(part, torch.device(device), into).measure(syncer)
        elif part.kind == "comparison":
            found = comparison(torch.device(device), tiny=bool(part.size))
        elif part.kind == "product":
            more = [syncer] if syncer else []
            found = PARTS[part.name](torch.device(device), *more)
        else:
            found = paths(torch.device(device))
    except Exception as error:
        (into / f"failed-{rank}.json").write_text(json.dumps(f"{type(error).__name__}: {error}"))
        raise
    (into / f"{rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Makes waiting for the device an error, as far as PyTorch notices it."""
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


class Sleeper:
    """Keeps the device busy for a while; nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._cycles_a_second = 0.0
        for _ in range(20 if self._on_cuda else 0):  # an idle device's clock is slow at first
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            torch.cuda._sleep(10**7)
            ended.record()
            torch.cuda.synchronize()
            rate = 1e7 / (1e-3 * started.elapsed_time(ended))
            self._cycles_a_second = max(self._cycles_a_second, rate)

    def begin(self, seconds: float) -> Callable[[], bool]:
        """Queues a kernel that lasts so long; gives what says whether it is still at work."""
        if not self._on_cuda:
            return lambda: True
        torch.cuda._sleep(int(seconds * self._cycles_a_second))
        ended = torch.cuda.Event()
        ended.record()
        return lambda: not ended.query()


def device_bytes(device: torch.device) -> int:
    """Peak of what tensors took of the device since this was asked last."""
    if device.type != "cuda":
        return 0
    found = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def host_bytes(device: torch.device) -> dict[str, int]:
    """What the process has resident, and what of the host's memory PyTorch has pinned."""
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    stats = torch.cuda.host_memory_stats() if device.type == "cuda" else {}
    pinned = int(stats.get("allocated_bytes.current", 0))
    return {"resident": 1024 * int(resident.split()[1]), "pinned": pinned}


class LearnerPart:
    """A learner's process, or each rank's.

    Args:
        part: Which model, and for how many seconds.
        device: ``cuda`` or ``cpu``.
        into: Folder for the trace.
    """

    def __init__(self, part: Any, device: torch.device, into: Path) -> None:
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32, as fp32 is trained there
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

    def train(self) -> int:
        """One step of the loop without the learner; gives its tokens."""
        batch = self._batches[self._trained % len(self._batches)]
        self._trained += 1
        self._workload.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return self._workload.tokens(batch)

    def measure(self, syncer: str) -> dict[str, Any]:
        """The whole part."""
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
            token="benchmark",
            learner_id="learner-0",
            join_timeout=90.0,
            after_apply=self._applied.extend,
        ) as learner:
            self._warm_up(learner)
            raw["fragments before"] = len(set(self._applied))
            raw |= self._by_turns(learner)
            memory.append(device_bytes(self.device))
            after = host_bytes(self.device)
            raw["host bytes"] = {name: [host[name], after[name]] for name in host}
            raw["device bytes"] = memory
            raw["beside a sleeping kernel"] = self._asleep(learner)
            raw["trace"] = self._traced(learner)
        if self._sharded:
            dist.destroy_process_group()
        return raw

    def _agreed(self, value: Any) -> Any:
        """Rank 0's: all ranks have to make the same steps."""
        if not self._sharded:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _warm_up(self, learner: Learner) -> None:
        """Until every fragment was applied once, so that all memory is there; or so long."""
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
        """Seconds inside `step`, where waiting for the device is an error."""
        began = time.perf_counter()
        with no_waits(self.device):
            learner.step(tokens=tokens)
        return time.perf_counter() - began

    def _asleep(self, learner: Learner) -> dict[str, Any]:
        """Calls of `step` while the device is kept busy."""
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
        """Some steps with fragments in them, as the device saw them."""
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
    """Seconds of what a trace has of the device: name, stream, start and end in µs.

    >>> seen(iter([("gemm", 7, 0.0, 10e6), ("Memcpy DtoH (Device -> Pinned)", 9, 8e6, 12e6)]))
    {'kernels': 10.0, 'copies': 4.0, 'beside kernels': 2.0, 'from or to pinned memory': 4.0, \
'on a stream beside': 4.0}
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
        "beside kernels": 1e-6 * sum(overlap((a, b), spans) for _, _, a, b in copies),
        "from or to pinned memory": 1e-6
        * sum(b - a for name, _, a, b in copies if "Pinned" in name),
        "on a stream beside": 1e-6 * sum(b - a for _, on, a, b in copies if on != training),
    }


def overlap(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """How much of a span passes within any of the others, which are sorted.

    >>> overlap((0.0, 10.0), [(1.0, 3.0), (2.0, 4.0), (9.0, 12.0)])
    4.0
    """
    covered, end = 0.0, span[0]
    for start, stop in others:
        start, stop = max(start, end), min(stop, span[1])
        if start < stop:
            covered, end = covered + stop - start, stop
    return covered


Problem = str
"""What is not as on the host; empty: all is."""


def paths(device: torch.device) -> dict[str, Problem]:
    """Each path of the tensors, on the device and on the host."""
    found: dict[str, Problem] = {}
    for name in codec_names():
        found[f"codec {name}"] = differs(codec(name), device)
        exact = BuffersExact(codec(name), 70_000)
        found[f"codec {name}, buffers exact"] = differs(exact, device)
    for dtype in DTYPES:
        for mode in ("overwrite", "carry", "rebase", "blend"):
            found[f"{mode}, {dtype}"] = writes(mode, DTYPES[dtype], device)
    state = {"step": 3, "moments": [torch.randn(5, device=device), torch.ones(2, device=device)]}
    copied = on_host(state)
    same = all(
        torch.equal(a.cpu(), b) for a, b in zip(state["moments"], copied["moments"], strict=True)
    )
    found["a state on the host"] = "" if same else "differs"
    return found


def differs(each: Codec, device: torch.device) -> Problem:
    """Compares decoding and adding, bit by bit; encoding too, where a scale is no sum or tie."""
    numel = 300_001
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator).to(torch.int32)
    bits[: numel // 4] &= -65536  # bf16's own values, and ties between two of them
    bits[: numel // 8] |= 1 << 15
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, torch.zeros(()))
    body = each.encode(values)
    there = each.encode(values.to(device))
    if there.device.type != device.type or there.numel() != body.numel():
        return f"{there.numel()} bytes on {there.device} are not {body.numel()} on {device}"
    unlike = int((there.cpu() != body).sum())
    if unlike and each.name in EXACT_CODECS:
        return f"{unlike} of {body.numel()} bytes are encoded otherwise"
    there = body.to(device)
    decoded, expected = each.decode(there, numel).cpu(), each.decode(body, numel)
    if not torch.equal(decoded.nan_to_num(), expected.nan_to_num()):
        return "it is decoded otherwise"
    body = each.encode(values.clamp(-1e30, 1e30))
    there = body.to(device)
    base = torch.randn(numel, generator=generator)
    added = base.to(device)
    receive(base, body, each)
    receive(added, there, each)
    return "" if torch.equal(added.cpu(), base) else "it is added otherwise"


class Cut(nn.Module):
    """Matrices of one dtype, and buffers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(300, 200, dtype=dtype) for _ in range(4))
        self.register_buffer("mean", torch.randn(64))


def writes(mode: str, dtype: torch.dtype, device: torch.device) -> Problem:
    """Snapshots, writes and contributions of a fragment: as on the host, and without a wait."""
    here, there = ModuleStore(Cut(dtype)), ModuleStore(Cut(dtype).to(device))
    fragment = partition(here.layout, 1)[0]
    generator = torch.Generator().manual_seed(1)
    old, new = (torch.randn(fragment.numel, generator=generator) for _ in range(2))
    prepared = [there.prepare(each.clone()) for each in (old, new)]
    for _ in range(2):  # afterwards all memory is there
        ordered(mode, here, fragment, old, new)
        ordered(mode, there, fragment, *prepared)
        there.snapshot(fragment)
        finish(device)
    ordered(mode, here, fragment, old, new)
    is_busy = Sleeper(device).begin(ASLEEP_SECONDS)
    with no_waits(device):
        ordered(mode, there, fragment, *prepared)
        copy = there.snapshot(fragment)
    if not is_busy():
        return "the host waited for the device"
    finish(device)
    theta = here.snapshot(fragment).values()
    if not torch.equal(copy.values(), theta):
        return "parameters are written otherwise"
    layout = here.layout
    trained = parameters_numel(fragment, layout)
    d = contribution(fragment, layout, theta, new)
    d_there = contribution(fragment, layout, theta.to(device), new.to(device))
    if not torch.equal(d_there.cpu(), d):
        return "a contribution differs"
    return "" if trained < fragment.numel else "it has no buffers"


def ordered(mode: str, store: ModuleStore, fragment: Fragment, old: Tensor, new: Tensor) -> None:
    """What a boundary orders."""
    match mode:
        case "overwrite":
            store.overwrite(fragment, new)
        case "carry":
            store.combine(fragment, new, store.snapshot(fragment), 1.0)
        case "rebase":
            store.combine(fragment, new, Rounded(fragment, store.layout, old), 1.0)
        case _:
            store.combine(fragment, new, None, 0.5)


class GptOnDevice(GptWorkload):
    """Its models are on a device."""

    device = torch.device("cpu")

    def model(self) -> nn.Module:
        return super().model().to(self.device)


def comparison(device: torch.device, *, tiny: bool) -> dict[str, dict[str, float]]:
    """Losses of some learners, of data-parallel with as many tokens, and of one of them alone."""
    learners, steps, rate = (COMPARISON[each] for each in ("learners", "steps", "learning_rate"))
    options = {**COMPARISON["model"], "batch_size": COMPARISON["batch_size"], "learning_rate": rate}
    if tiny:
        options |= {"layers": 1, "width": 16, "heads": 2, "context": 16, "eval_batches": 1}
        learners, steps = 2, 4
    config = RunConfig(
        run={"learners": learners, "budget_steps": steps, "seed": 1},
        sync={"fragments": 4 if tiny else 24, "period": 4 if tiny else 24, "overlap": 2},
        data={"leases": False},
        syncer={"durable": False},  # nothing fails, and memory disks may be small
        workload={"options": {**options, "warmup_steps": min(20, steps - 1)}},
    )
    workload = GptOnDevice(GptOptions(**config.workload_options()))
    workload.device = device
    found: dict[str, dict[str, float]] = {}

    def measured(name: str, loss: Callable[[], float]) -> None:
        began = time.monotonic()
        found[name] = {"loss": loss(), "seconds": round(time.monotonic() - began, 1)}
        print(name, found[name], flush=True)

    measured("data-parallel", lambda: plain(workload, steps, learners, learners))
    measured("alone", lambda: plain(workload, steps, 1, learners))
    measured("decoupled", lambda: train_virtually(config, workload=workload).evaluate()["loss"])
    return found


def plain(workload: GptWorkload, steps: int, parts: int, of: int) -> float:
    """An ordinary loop over the batches of some parts of the data at once."""
    model = workload.model()
    optimizer = workload.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    streams = [workload.batches(part, of) for part in range(parts)]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * workload.schedule(step)
        batches = [next(stream) for stream in streams]
        whole = (torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches]))
        workload.loss(model, whole).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return workload.evaluate(model)["loss"]
