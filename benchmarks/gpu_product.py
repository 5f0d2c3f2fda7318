"""What a user starts, on a GPU: the parts of `gpu.py` that are about programs, not about copies.

Each returns a dict from a claim to what is wrong with it; an empty text: it holds. On a machine
without a GPU they run the same programs on the CPU.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from decoupled_diloco import Learner
from decoupled_diloco.config import RunConfig, dump_config
from decoupled_diloco.launch.devices import environment_of
from decoupled_diloco.launch.on_device import home_of, moved, placed
from decoupled_diloco.launch.roles import BACKENDS, Training
from decoupled_diloco.observe.run_model import read_run
from decoupled_diloco.ranks.group import RankGroup
from decoupled_diloco.simulate.training import train_virtually
from decoupled_diloco.workloads import Workload, load_workload
from decoupled_diloco.workloads.divided import divided

Found = dict[str, str]

TINY: dict[str, Any] = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 32,
    "batch_size": 4,
    "eval_batches": 1,
    "corpus_bytes_max": 200_000,
    "warmup_steps": 1,
}
LEARNERS, STEPS = 2, 24
APPLIED_MIN = 24
STEPS_MAX = 4000
CONFIG_ERROR = 2


def check(found: Found, claim: str, problem: object = "") -> None:
    """Notes a claim, and what is wrong with it."""
    found[claim] = str(problem or "")


def tiny_config(folder: Path, **tables: dict[str, Any]) -> RunConfig:
    run = {"learners": LEARNERS, "budget_steps": STEPS, "folder": folder, "evaluator": False}
    sync = {"fragments": 4, "period": 4, "overlap": 1}
    return RunConfig(
        run={**run, **tables.get("run", {})},
        sync=sync,
        syncer={"port": 0, "durable": False},
        learner=tables.get("learner", {}),
        data=tables.get("data", {}),
        workload={"options": {**TINY, **tables.get("options", {})}},
    )


def ddiloco(
    config: RunConfig, folder: Path, *arguments: str, **environment: str
) -> tuple[int, str]:
    """Runs a command of `ddiloco` with a run's file; the exit code and what it printed."""
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    words = [str(path) if each == "RUN" else each for each in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "decoupled_diloco.cli", *words],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def train(device: torch.device) -> Found:
    """`ddiloco train` with device = "auto": each learner trains on its own device, and shows it."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = tiny_config(folder / "run", learner={"precision": "bf16"})
        code, said = ddiloco(config, folder, "train", "RUN")
        check(found, "train ends well", said[-600:] if code else "")
        if code:
            return found
        learners = read_run(folder / "run").learners
        for name, learner in sorted(learners.items()):
            right = learner.device.startswith(device.type)
            check(found, f"{name} trains on {device.type}", "" if right else learner.device or "?")
            finite = learner.loss is not None and math.isfinite(learner.loss)
            check(found, f"{name} has told its loss", "" if finite else learner.loss)
        code, said = ddiloco(config, folder, "status", str(folder / "run"), "--json")
        told = [each["device"] for each in json.loads(said)["learners"]] if code == 0 else []
        shown = len(told) == LEARNERS and all(each.startswith(device.type) for each in told)
        check(found, "status shows the devices", "" if shown else f"{code}: {told or said[-300:]}")
        report = folder / "run" / "report.html"
        shown = report.exists() and f">{device.type}" in report.read_text()
        check(found, "the report shows the devices", "" if shown else "it does not")
    return found


def assignment(device: torch.device) -> Found:
    """Learners share the GPUs by turns; a missing GPU is an error before anything starts."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = tiny_config(folder / "run", run={"learners": 3})
        told = [environment_of(config, index) for index in range(3)]
        count = torch.cuda.device_count()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = visible if visible[0] else [str(number) for number in range(count)]
        wanted = [{"CUDA_VISIBLE_DEVICES": names[i % count]} if count else {} for i in range(3)]
        check(found, "learners get GPUs by turns", "" if told == wanted else told)
        initialized = torch.cuda.is_initialized()
        check(found, "counting GPUs initializes none", "it does" if initialized else "")
        missing = tiny_config(folder / "run", learner={"device": "cuda"})
        code, said = ddiloco(missing, folder, "train", "RUN", CUDA_VISIBLE_DEVICES="")
        right = code == CONFIG_ERROR and "device='cuda'" in said and not (folder / "run").exists()
        check(found, "a missing GPU ends train before it starts", "" if right else f"{code} {said}")
        one = [*("learner", "RUN", "--index", "0"), *("--syncer", "http://127.0.0.1:9")]
        if count:
            code, said = ddiloco(missing, folder, *one, "--devices", "CUDA_VISIBLE_DEVICES=")
        else:
            code, said = ddiloco(missing, folder, *one)
        right = code == CONFIG_ERROR and "device='cuda'" in said
        check(
            found, "a missing GPU is a config error of learner", "" if right else f"{code} {said}"
        )
        code, said = ddiloco(tiny_config(folder / "run"), folder, "doctor", "RUN")
        shown = f"device='auto' is {device.type}" in " ".join(said.split())
        check(found, "doctor shows the device", "" if shown else said[-600:])
    return found


class Alone:
    """A learner for `Training` that takes part in nothing."""

    def __init__(self, steps: int) -> None:
        self.global_step, self._steps = 0, steps
        self.losses: list[torch.Tensor] = []

    async def take_step(self, tokens: int, loss: torch.Tensor) -> bool:
        """Records the loss; ends after a fixed number of steps."""
        assert tokens > 0
        self.losses.append(loss)
        self.global_step += 1
        return self.global_step < self._steps


class Never:
    """A termination that never occurs."""

    asked = False


def trained(
    workload: Workload, model: nn.Module, precision: Any, steps: int = 6
) -> tuple[list[float], set[torch.dtype]]:
    """Losses of the built-in loop, and the types that linear layers gave."""
    optimizer = workload.optimizer(model)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    dtypes: set[torch.dtype] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, out: dtypes.add(out.dtype))
    batches, alone = workload.batches(0, 1), Alone(steps)

    async def pace() -> None:
        pass

    async def next_batch() -> Any:
        return next(batches)

    loop = Training(workload, model, optimizer, alone, pace, precision=precision)  # type: ignore[arg-type]
    run = loop.run(next_batch, Never())  # type: ignore[arg-type]
    with suppress(StopIteration):
        run.send(None)
    return [float(each) for each in alone.losses], dtypes


def precision(device: torch.device) -> Found:
    """bf16 autocast: linear layers give bf16, weights stay fp32, and the losses are close."""
    found: Found = {}
    for name in ("gpt", "moe"):
        workload = load_workload(name, {**TINY, "total_steps": 100})
        losses: dict[str, list[float]] = {}
        for word, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            model = placed(workload.model(), device)
            losses[word], dtypes = trained(workload, model, word)
            check(found, f"{name}, {word}: layers", "" if dtype in dtypes else dtypes)
            kept = {each.dtype for each in model.parameters()} == {torch.float32}
            check(found, f"{name}, {word}: weights are fp32", "" if kept else "they are not")
            here = home_of(model)
            there = here is not None and here.type == device.type
            check(found, f"{name}, {word}: on {device.type}", "" if there else here)
        pairs = zip(losses["fp32"], losses["bf16"], strict=True)
        close = all(abs(a - b) < 0.05 * a for a, b in pairs)
        check(found, f"{name}: bf16 is close to fp32", "" if close else losses)
        falls = losses["bf16"][-1] < losses["bf16"][0]
        check(found, f"{name}: the loss falls", "" if falls else losses["bf16"])
    batch = {"a": torch.ones(4), "b": (torch.ones(2), [torch.ones(1), "text"])}
    there = moved(batch, device)
    kinds = {each.device.type for each in (there["a"], there["b"][0], there["b"][1][0])}
    check(found, "batches are moved", "" if kinds == {device.type} else kinds)
    check(found, "their values arrive", "" if float(there["a"].sum()) == 4 else there)
    return found


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """The process group of a learner whose only rank is this process."""
    with tempfile.TemporaryDirectory() as name:
        if device.type == "cuda":
            torch.cuda.set_device(0)
        store = dist.FileStore(f"{name}/store", 1)
        backend = BACKENDS.get(device.type, "gloo")
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def ranks(device: torch.device) -> Found:
    """The learner's process group on the device: each way to divide a model, and host exchange."""
    found: Found = {}
    workload = load_workload("gpt", {**TINY, "total_steps": 100})
    whole, _ = trained(workload, placed(workload.model(), device), "bf16")
    with one_rank(device):
        for parallelism in ("ddp", "fsdp", "tp"):
            model = divided(placed(workload.model(), device), workload, parallelism)  # type: ignore[arg-type]
            losses, _ = trained(workload, model, "bf16")
            close = all(abs(a - b) < 0.02 * a for a, b in zip(whole, losses, strict=True))
            check(found, f"{parallelism} trains as one process", "" if close else (whole, losses))
        group = RankGroup()
        work = group.exchange({"at": "here"})
        work._work.wait()
        check(found, "ranks exchange documents", "" if work._whole(0) else "they do not")
        out = torch.empty(3, device="cpu")
        dist.all_to_all_single(out, torch.ones(3, device="cpu"), [3], [3], group.bodies)
        check(found, "ranks exchange fragments", "" if float(out.sum()) == 3 else out)
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        on_host = torch.ones(1, device="cpu")
        dist.all_reduce(on_host)
        both = float(total) == float(on_host) == 1
        check(found, "the default group serves host and device", "" if both else total)
        group.watch.close()
        group.close()
    return found


def simulate(device: torch.device) -> Found:
    """Virtual training on the device: the loss is that of the CPU, nearly."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as name:
        config = tiny_config(Path(name) / "run", data={"leases": False})
        losses = {}
        for each in dict.fromkeys(("cpu", device.type)):
            run = train_virtually(config, device=torch.device(each))
            losses[each] = run.evaluate()["loss"]
            here = home_of(run.model())
            there = here is not None and here.type == each
            check(found, f"the model is on {each}", "" if there else here)
        close = abs(losses["cpu"] - losses[device.type]) < 0.05 * losses["cpu"]
        check(found, "the loss is that of the CPU", "" if close else losses)
        scenario = Path(name) / "scenario.toml"
        path = Path(name) / "small.toml"
        path.write_text(dump_config(config))
        scenario.write_text(f'run = "{path}"\n')
        code, said = ddiloco(config, Path(name), "simulate", str(scenario), "--device", device.type)
        check(found, f"ddiloco simulate --device {device.type}", said[-600:] if code else "")
    return found


def defaults(device: torch.device, syncer: str) -> Found:
    """A learner in a process whose default device and dtype are not the CPU and fp32."""
    found: Found = {}
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(device)
    applied: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        torch.set_default_device(device)
        torch.set_default_dtype(torch.bfloat16)
        try:
            # AdamW itself would keep its counters on the default device, and wait for them.
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            with Learner(
                model,
                syncer,
                token="benchmark",
                learner_id="learner-0",
                optimizer=optimizer,
                checkpoint=name,
                join_timeout=60.0,
                after_apply=applied.extend,
            ) as learner:
                steps = 0
                while len(set(applied)) < APPLIED_MIN and steps < STEPS_MAX:
                    inputs = torch.ones(8, 64, dtype=torch.float32)
                    loss = model(inputs).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    learner.step(tokens=8, loss=loss)
                    steps += 1
            kept = any(Path(name).rglob("*.safetensors"))
        finally:
            torch.set_default_device("cpu")
            torch.set_default_dtype(torch.float32)
    problem = "" if len(set(applied)) >= APPLIED_MIN else f"{len(set(applied))} in {steps} steps"
    check(found, "every fragment is applied", problem)
    check(found, "a checkpoint is kept", "" if kept else "none is there")
    types = {each.dtype for each in model.parameters()}
    check(found, "the weights are fp32 as before", "" if types == {torch.float32} else types)
    finite = all(bool(each.isfinite().all()) for each in model.parameters())
    check(found, "the weights are finite", "" if finite else "they are not")
    return found


PARTS: dict[str, Callable[..., Found]] = {
    "train": train,
    "assignment": assignment,
    "precision": precision,
    "ranks": ranks,
    "simulate": simulate,
    "defaults": defaults,
}
