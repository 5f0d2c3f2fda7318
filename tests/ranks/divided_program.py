"""A rank that computes the loss and the gradients of one batch with a distributed model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from decoupled_diloco.workloads import Workload, load_workload
from decoupled_diloco.workloads.rank_split import divided, share_of_data
from ranks.rank_program import Job, set_up

SMALL: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "batch_size": 2}
TEXT: dict[str, Any] = {**SMALL, "context": 8, "corpus_bytes_max": 50_000}
SIZES: dict[str, dict[str, Any]] = {
    "gpt": {**TEXT, "tied": True},
    "moe": {**TEXT, "experts": 4, "expert_hidden": 16},
    "speech": SMALL,
    "vit": SMALL,
}


def measured(
    workload: Workload, model: nn.Module, number: int
) -> tuple[float, dict[str, Tensor | None]]:
    """Return the loss of a batch and its gradients."""
    batch = next(workload.batches(0, 1, number))
    loss = workload.loss(model, batch)
    loss.backward()
    named = {key.removeprefix("module."): each.grad for key, each in model.named_parameters()}
    whole = {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in named.items()}
    return loss.item(), whole


def main(job: Job, environment: Mapping[str, str]) -> None:
    """Measure, and write the result of rank 0 into ``job.folder``.

    ``job.kind`` has the workload and its parallelism.
    """
    set_up(job, environment)
    dist.init_process_group("gloo")
    # The model is deleted before the process group: DDP's destructor can hang otherwise.
    found = measured_divided(job.kind)
    if dist.get_rank() == 0:
        torch.save(found, job.folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def measured_divided(kind: str) -> tuple[float, dict[str, Tensor | None]]:
    """Return the loss and the gradients on this rank."""
    name, _, parallelism = kind.partition(" ")
    workload = load_workload(name, SIZES[name])
    model = divided(workload.model(), workload, parallelism)  # type: ignore[arg-type]
    share = share_of_data(parallelism)  # type: ignore[arg-type]
    return measured(workload, model, share.part)
