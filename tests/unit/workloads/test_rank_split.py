"""Optimizers of models that are distributed over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from decoupled_diloco.workloads.rank_split import step_separately


def mixed_parameters(folder: Path) -> list[nn.Parameter]:
    """A model with a DTensor and a plain tensor, like a tensor-parallel model."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1
    )
    mesh = init_device_mesh("cpu", (1,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    sharded.grad = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    plain = nn.Parameter(torch.ones(2))
    plain.grad = torch.ones(2)
    return [sharded, plain]


def test_a_mixture_of_sharded_and_plain_parameters_can_step(tmp_path: Path) -> None:
    parameters = mixed_parameters(tmp_path)
    try:
        optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=True)
        with pytest.raises(RuntimeError, match="mixed"):
            optimizer.step()  # PyTorch's default on a GPU
        step_separately(optimizer)
        optimizer.step()
        assert torch.equal(parameters[0].full_tensor(), parameters[1])
        assert (parameters[1] < 1).all()
    finally:
        dist.destroy_process_group()


def test_parameters_of_one_kind_keep_the_fast_path() -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1, foreach=True)
    step_separately(optimizer)
    assert optimizer.param_groups[0]["foreach"] is True
