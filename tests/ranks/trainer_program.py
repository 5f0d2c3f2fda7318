"""One rank of a Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from ranks.rank_program import Job, set_up


def main(job: Job, environment: Mapping[str, str]) -> None:
    set_up(job, environment)
    from decoupled_diloco.integrations.transformers import synchronize
    from integration.lines import model_of, trainer_of

    trainer = trainer_of(job.folder, model_of(), max_steps=job.steps, ddp_backend="gloo")
    callback = synchronize(trainer, job.address, name=job.name)
    trainer.train()
    assert callback.learner is not None
    found = {
        "steps": callback.learner.steps,
        "tokens": callback.learner.tokens,
        "weights": {name: each.detach() for name, each in trainer.model.named_parameters()},
    }
    torch.save(found, job.folder / f"found-{dist.get_rank()}.pt")
    dist.destroy_process_group()
