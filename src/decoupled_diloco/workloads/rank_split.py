"""Distributes a workload's model over the ranks of a learner.

DDP and FSDP2 accept any model. With FSDP2, a model that has ``blocks`` gathers one block at a time.
Tensor parallel depends on the layers of a block. Only the built-in dense transformers support it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from decoupled_diloco.config.run import Parallelism, RunConfig
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.inner import BuiltIn
from decoupled_diloco.workloads.transformer import Attention
from decoupled_diloco.workloads.workload import Workload

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


@dataclass(frozen=True)
class DataShare:
    """The batches of its learner that a rank trains: every `parts`-th one, starting with `part`."""

    part: int = 0
    parts: int = 1


def require_divisible(workload: Workload, config: RunConfig) -> None:
    """Verify that each learner's model supports the configured parallelism and ranks.

    Raises:
        ConfigError: A model does not; the message has the fix.
    """
    for index in range(config.run.learners):
        ranks, parallelism = config.learner.ranks_of(index), config.learner.parallelism_of(index)
        problem = _problem(workload, parallelism, ranks)
        if problem:
            raise ConfigError(
                f"workload {config.required_workload.name!r} cannot be combined with "
                f"parallelism={parallelism!r} and ranks={ranks}: {problem}"
            )


def _problem(workload: Workload, parallelism: Parallelism, ranks: int) -> str:
    if parallelism == "fsdp" and _has_experts(workload):
        return (
            "an expert without tokens on a rank has no gradient there, which FSDP2 does not "
            "support: use 'ddp'"
        )
    if parallelism != "tp":
        return ""
    if not isinstance(workload, BuiltIn) or workload.has_experts:
        return "only 'gpt', 'paced', 'speech' and 'vit' support tensor parallel: use 'ddp'"
    heads: int = getattr(workload.options, "heads")  # noqa: B009 (each built-in transformer's)
    return f"heads={heads} is not a multiple of ranks: change one of them" if heads % ranks else ""


def _has_experts(workload: Workload) -> bool:
    return isinstance(workload, BuiltIn) and workload.has_experts


def divided(model: nn.Module, workload: Workload, parallelism: Parallelism) -> nn.Module:
    """Return this rank's part of a model; every rank of the process group calls this.

    Args:
        model: The whole model, with the same weights on every rank, on this rank's device.
        workload: The model's workload.
        parallelism: "ddp", "fsdp" or "tp".
    """
    if parallelism == "ddp":
        return nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=_has_experts(workload)
        )
    # Imported here because it takes more than a second, and single-rank learners do not need it.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    blocks = [*getattr(model, "blocks", ())]
    if parallelism == "fsdp":
        for each in (*blocks, model):
            fully_shard(each, mesh=mesh)
        return model
    for block in blocks:
        parallelize_module(block, mesh, _block_plan())
    for attention in (each for each in model.modules() if isinstance(each, Attention)):
        attention.heads //= dist.get_world_size()
    return model


def step_separately(optimizer: Optimizer) -> None:
    """Keep an optimizer from handling a DTensor and a plain tensor in one operation.

    A tensor-parallel model has both kinds of parameters. On a GPU, PyTorch's optimizers handle all
    parameters of a group in one operation (``foreach``), which raises for such a mixture.
    """
    from torch.distributed.tensor import DTensor

    for group in optimizer.param_groups:
        kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
        if len(kinds) > 1 and "foreach" in group:
            group["foreach"] = False


def _block_plan() -> dict[str, ParallelStyle]:
    """Split heads and hidden units over the ranks; everything else is whole on every rank."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.project": RowwiseParallel(),
        "mlp.expand": ColwiseParallel(),
        "mlp.project": RowwiseParallel(),
    }


def share_of_data(parallelism: Parallelism) -> DataShare:
    """Return this rank's share; all ranks of a tensor-parallel learner train the same batches."""
    if parallelism in ("plain", "tp"):
        return DataShare()
    return DataShare(dist.get_rank(), dist.get_world_size())
