"""One rank of a learner, as torchrun would start it; `learners` forks ranks from one process."""

from __future__ import annotations

import errno
import faulthandler
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo  # the first optimizer imports it: once, here, is faster than in every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from decoupled_diloco import Checkpointing, Learner, Observability, Timeouts
from decoupled_diloco.learner.learner_model import parts_of, plain
from decoupled_diloco.ranks import group, rank_process

PIPELINES = {"pipeline": ScheduleGPipe, "pipeline 1F1B": Schedule1F1B}
INTERLEAVED = "pipeline, two stages a rank"

VOCABULARY, WIDTH, LAYERS = 13, 8, 3
BATCH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A model with embedding, blocks and head, which each kind of parallelism can distribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(LAYERS)})
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens if self.embedding is None else self.embedding(tokens)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def batch_of(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(VOCABULARY, (BATCH, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def parallel(kind: str, model: nn.Module, **policies: Any) -> tuple[nn.Module, int, int]:
    """Distribute a model; return it, this rank's share of the batch, and the number of shares.

    Args:
        policies: Options of FSDP2.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if kind == "plain":
        return model, 0, 1
    if kind in PIPELINES:
        return stage_of(model, rank, world), 0, 1
    if kind == INTERLEAVED:
        stages = (stage_of(deepcopy(model), each, 2 * world) for each in (rank, rank + world))
        return plain([*stages]), 0, 1
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), rank, world
    if kind == "fsdp":
        mesh, part, parts = init_device_mesh("cpu", (world,)), rank, world
    elif kind == "hsdp":
        names = ("replica", "shard")
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        part, parts = rank, world
    elif kind == "tp":
        mesh, part, parts = init_device_mesh("cpu", (world,)), 0, 1
    else:
        whole = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        mesh, part, parts = whole["tp"], whole["dp"].get_local_rank(), world // 2
    if kind in ("tp", "fsdp_tp"):
        for block in model.blocks.values():
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind == "fsdp_tp":
        mesh = whole["dp"]
    if kind != "tp":
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh, **policies)
        fully_shard(model, mesh=mesh, **policies)
    return model, part, parts


def stage_of(model: nn.Module, stage: int, stages: int) -> nn.Module:
    """Remove the modules of other stages; the others keep their names."""
    for n in range(LAYERS):
        if n * stages // LAYERS != stage:
            del model.blocks[str(n)]
    if stage > 0:
        model.embedding = None
    if stage < stages - 1:
        model.head = None
    return model


class Gradients:
    """Computes the loss of a batch, and the gradients of the model."""

    def __init__(self, kind: str, model: nn.Module) -> None:
        self._model = model
        self._schedule: Any = None
        if kind == INTERLEAVED:
            rank, world = dist.get_rank(), dist.get_world_size()
            stages = [
                PipelineStage(part, rank + n * world, 2 * world, torch.device("cpu"))
                for n, part in enumerate(parts_of(model))
            ]
            self._schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_of)
        if kind in PIPELINES:
            rank, world = dist.get_rank(), dist.get_world_size()
            stage = PipelineStage(model, rank, world, torch.device("cpu"))
            self._schedule = PIPELINES[kind](stage, n_microbatches=3, loss_fn=loss_of)

    def __call__(self, tokens: Tensor, targets: Tensor) -> float | None:
        if self._schedule is None:
            loss = loss_of(self._model(tokens), targets)
            loss.backward()
            return loss.item()
        first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
        losses: list[Tensor] = []
        self._schedule.step(
            *((tokens,) if first else ()),
            **({"target": targets, "losses": losses} if last else {}),
        )
        return sum(each.item() for each in losses) / len(losses) if losses else None


def accumulated(model: nn.Module, tokens: Tensor, targets: Tensor) -> float:
    """Compute a batch in two halves; the gradients of the first half are not reduced at once."""
    halves = [*zip(tokens.chunk(2), targets.chunk(2), strict=True)]
    total = 0.0
    for last, half in enumerate(halves):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(bool(last))
        alone = isinstance(model, nn.parallel.DistributedDataParallel) and not last
        with model.no_sync() if alone else nullcontext():
            loss = loss_of(model(half[0]), half[1]) / len(halves)
            loss.backward()
        total += loss.item()
    return total


def evaluate(model: nn.Module, tokens: Tensor) -> None:
    """Evaluate between two steps, which leaves FSDP2's root module unsharded."""
    model.eval()
    with torch.no_grad():
        model(tokens)
    model.train()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


COLLECTIVE_SECONDS = 15
"""Timeout of the training program's own collectives."""


@dataclass(frozen=True)
class Job:
    """The settings of every rank of a learner."""

    kind: str
    address: str
    name: str
    folder: Path
    steps: int = 10_000
    seed: int = 1
    pause: float = 0.0
    trouble: str = ""
    optimizer: str = "sgd"
    checkpoint: Path | str | None = None
    interval_seconds: float = 0.0
    sync_ranks: int | Literal["hosts", "all"] = 1
    block: int = 0
    """Elements per digest block; 0: the default."""
    token: str | None = None
    event_tape: Path | None = None
    metrics_address: str | None = None
    tracker: str | None = None
    manner: str = ""
    """Variant of the loop or the model; one of the following."""


THOROUGH = "thorough"
"""Tied and frozen weights, accumulated and clipped gradients, an evaluation at the start and after
each step."""
WRAPPED = "wrapped"
"""Blocks that recompute their activations, each compiled separately."""
HALF = "half"
"""FSDP2 computes in bf16 and keeps its parameters in host memory."""
CLIP_NORM = 0.1


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return the logical parameters, or those of this rank's stage; every rank calls this."""
    whole = {
        name.removeprefix("module."): each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in model.named_parameters()
    }
    return {name: each.detach().clone() for name, each in whole.items()}


def main(job: Job, environment: Mapping[str, str]) -> None:
    """Train until the run ends or the job's steps are done; write the weights."""
    set_up(job, environment)
    group.CHECK_SECONDS, group.STALLED_SECONDS = 0.5, 4.0
    if job.block:
        sys.modules["decoupled_diloco.merge.codec"].DIGEST_NUMEL = job.block  # type: ignore[attr-defined]
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    train(job)
    if dist.is_initialized():
        dist.destroy_process_group()


def write_nothing(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Position:
    """An object with state that differs by rank, like the position in a rank's data."""

    def __init__(self) -> None:
        self.rank = learner_rank()

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "noise": torch.full((2,), self.rank)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        print(f"the position of rank {state['rank']} is back", flush=True)


def set_up(job: Job, environment: Mapping[str, str]) -> None:
    """Set the environment of a rank, and write its output to its file."""
    os.environ.update(environment)
    rank = int(os.environ.get("RANK", "0"))
    log = os.open(job.folder / f"{job.name}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(2)  # SIGABRT prints the stack of a rank that does not exit
    logging.basicConfig(level=logging.INFO, force=True)
    torch.set_num_threads(1)


def train(job: Job) -> None:
    torch.manual_seed(0)
    last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1
    trouble = job.trouble if last else ""
    net = Net()
    if trouble == "another model":
        net.blocks["1"].up = nn.Linear(WIDTH, 4 * WIDTH + 2)
        net.blocks["1"].down = nn.Linear(4 * WIDTH + 2, WIDTH)
    if job.manner == THOROUGH:
        net.head.weight = net.embedding.weight
        net.blocks["0"].norm.weight.requires_grad_(False)
    if job.manner == WRAPPED:
        for name, block in net.blocks.items():
            net.blocks[name] = torch.compile(checkpoint_wrapper(block), backend="eager")
    policies: dict[str, Any] = {}
    if job.manner == HALF:
        policies["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        policies["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model, part, parts = parallel(job.kind, net, **policies)
    name = "another" if trouble == "another name" else job.name
    if trouble == "no learner":
        time.sleep(60)
    if trouble == "not finite":
        with torch.no_grad():
            next(model.parameters()).fill_(math.nan)
    if trouble == "on the meta device":
        net.blocks["1"].up.to("meta")
    if job.trouble == "partial":  # all ranks must create the mesh
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if trouble:
            own = DTensor.from_local(net.head.weight.detach(), mesh, [Partial()])
            net.head.weight = nn.Parameter(own)
    if trouble == "another disk":
        rank_process.MARK = ".elsewhere"
    if trouble == "full disk":
        filesystem.FileSystemWriter.write_data = write_nothing
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    if job.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    size = BATCH // parts
    gradients = Gradients(job.kind, model)
    if job.manner == THOROUGH:
        evaluate(model, batch_of(job.seed, 0)[0])
    with Learner(
        list(parts_of(model)) if job.kind == INTERLEAVED else model,
        syncer=job.address,
        name=name,
        optimizer=optimizer,
        auth_token=job.token,
        checkpoint=Checkpointing(
            job.checkpoint,
            job.interval_seconds,
            {"schedule": schedule, "position": Position()},
        ),
        timeouts=Timeouts(flush=0.0),
        observability=Observability(job.tracker, job.metrics_address, job.event_tape),
        sync_ranks=job.sync_ranks,
    ) as learner:
        print(f"begins at step {learner.steps}", flush=True)
        print(f"learner {learner.index} of {learner.count}", flush=True)
        for step in range(learner.steps, job.steps - (trouble == "a step fewer")):
            time.sleep(job.pause)
            tokens, targets = (t[part * size : (part + 1) * size] for t in batch_of(job.seed, step))
            if job.manner == THOROUGH:
                loss: float | None = accumulated(model, tokens, targets)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            else:
                loss = gradients(tokens, targets)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if job.manner == THOROUGH:
                evaluate(model, tokens)
            going_on = learner.step(loss, tokens=tokens.numel())
            print(f"step {step + 1}", flush=True)
            if not going_on:
                break
    weights = full(model)
    if learner_rank() == 0:
        counts = {"steps": learner.steps, "tokens": learner.tokens}
        torch.save({"weights": weights, **counts}, job.folder / f"{job.name}.pt")


def learner_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
