"""One rank of a Lightning Trainer: DDP, or FSDP2 with ModelParallelStrategy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ranks.rank_program import Job, full, set_up


def main(job: Job, environment: Mapping[str, str]) -> None:
    set_up(job, environment)
    os.environ |= {"TORCHELASTIC_RUN_ID": "one", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from decoupled_diloco.integrations.lightning import DiLoCoCallback
    from integration.lightning_loop import Module, loader, trainer_of

    class Sharded(Module):
        def configure_model(self) -> None:
            mesh: Any = self.device_mesh
            fully_shard(self.net, mesh=mesh["data_parallel"])

    ddp = job.kind == "ddp"
    strategy = (
        DDPStrategy(process_group_backend="gloo")
        if ddp
        else ModelParallelStrategy(2, 1, process_group_backend="gloo")
    )
    callback = DiLoCoCallback(job.address, name=job.name)
    trainer = trainer_of(job.folder, callback, max_steps=job.steps, devices=2, strategy=strategy)
    module = Module() if ddp else Sharded()
    trainer.fit(module, loader())
    assert callback.learner is not None
    found = {
        "steps": callback.learner.steps,
        "tokens": callback.learner.tokens,
        "rounds": callback.rounds,
        "weights": full(module),
    }
    torch.save(found, job.folder / f"found-{dist.get_rank()}.pt")
