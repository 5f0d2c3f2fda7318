"""One rank of a torchtitan Trainer with its debug model, on the CPU.

With the kind ``plain``, it is a single process that trains the same model in a plain loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from decoupled_diloco import Learner
from ranks import cpu_device
from ranks.rank_program import Job, full, set_up

from torchtitan.components.dataloader import BaseDataLoader  # isort: skip
from torchtitan.config import JobConfig  # isort: skip
from torchtitan.models import llama3  # isort: skip
from torchtitan.protocols import train_spec  # isort: skip

assert cpu_device
NAME = "llama3_of_rows"
VOCABULARY, ROWS, LENGTH = 2048, 8, 16
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}


def batch_of(seed: int, number: int) -> tuple[Tensor, Tensor]:
    """Return all rows of a step: inputs and labels."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class Rows(BaseDataLoader):
    """A data-parallel rank's rows of all steps, in batches of the local size."""

    def __init__(self, dp_world_size: int, dp_rank: int, tokenizer: None, job_config: Any) -> None:
        self.size, self.batches = job_config.training.local_batch_size, 0
        self.seed = int(job_config.training.dataset)
        self.first, self.own = dp_rank * (ROWS // dp_world_size), ROWS // dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            step, part = divmod(self.batches, self.own // self.size)
            start = self.first + part * self.size
            inputs, labels = (each[start : start + self.size] for each in batch_of(self.seed, step))
            self.batches += 1
            yield {"input": inputs.clone()}, labels.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def config_of(job: Job, parts: int, tp: int = 1, pp: int = 1) -> JobConfig:
    """Return torchtitan's configuration of its debug model; every rank has two batches per step."""
    config = JobConfig()
    config.job.dump_folder = str(job.folder / f"{job.name}-titan")
    config.model.name, config.metrics.log_freq = NAME, 1
    training, parallelism = config.training, config.parallelism
    training.dataset = str(job.seed)
    training.local_batch_size, training.global_batch_size = ROWS // parts // 2, ROWS
    training.seq_len, training.steps = LENGTH, job.steps
    training.mixed_precision_param = "float32"
    parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree = tp, pp
    config.lr_scheduler.warmup_steps, config.lr_scheduler.min_lr_factor = 0, 1.0  # constant
    config.activation_checkpoint.mode = "none"
    config.comm.trace_buf_size = 0
    if job.checkpoint is not None:
        config.checkpoint.enable, config.checkpoint.interval = True, 4
        config.checkpoint.last_save_model_only = False
        config.checkpoint.folder = str(job.checkpoint)
    return config


def register() -> None:
    """Register torchtitan's Llama 3 with these rows instead of a text and its tokenizer."""
    spec = replace(llama3.get_train_spec(), build_dataloader_fn=Rows, build_tokenizer_fn=None)
    train_spec.register_train_spec(NAME, spec)


def begin_alike(parts: list[nn.Module]) -> None:
    """Initialize weights that are the same for any number of ranks."""
    with torch.no_grad():
        for part in parts:
            for name, parameter in part.named_parameters():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values = 0.05 * torch.randn(parameter.shape, generator=generator)
                values += "norm" in name
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    values = distribute_tensor(values, mesh, placements)
                parameter.copy_(values)


def main(job: Job, environment: Mapping[str, str]) -> None:
    set_up(job, ALONE | environment)
    if job.kind == "plain":
        plain(job)
    else:
        titan(job)


def titan(job: Job) -> None:
    from decoupled_diloco.integrations.torchtitan import DiLoCoTrainer

    sizes: dict[str, Any] = {"fsdp": (2,), "tp": (1, 2), "pipeline": (1, 1, 2)}
    sizes["interleaved"] = sizes["pipeline"]
    register()
    config = config_of(job, *sizes[job.kind])
    if job.kind == "interleaved":
        config.parallelism.pipeline_parallel_schedule = "Interleaved1F1B"
    trainer = DiLoCoTrainer(config, job.address, name=job.name)
    begin_alike(trainer.model_parts)
    logged: list[dict[str, Any]] = []
    trainer.metrics_processor.logger.log = lambda metrics, step: logged.append(metrics)
    trainer.train()
    trainer.close()
    learner = trainer.learner
    assert learner is not None
    found = {
        "steps": learner.steps,
        "tokens": learner.tokens,
        "rounds": trainer.rounds,
        "epoch": learner.incarnation,
        "optimizer_steps": int(next(iter(trainer.optimizers.optimizers[0].state.values()))["step"]),
        "over": learner.ended,
        "logged": logged,
        "weights": {n: w for part in trainer.model_parts for n, w in full(part).items()},
    }
    torch.save(found, job.folder / f"{job.name}-found-{dist.get_rank()}.pt")
    dist.destroy_process_group()


def plain(job: Job) -> None:
    """Do the same as torchtitan in a plain loop."""
    model = llama3.Transformer(llama3.llama3_args["debugmodel"])
    with torch.no_grad():
        model.init_weights()
    begin_alike([model])
    own = JobConfig()
    rates: dict[str, Any] = {"lr": own.optimizer.lr, "eps": own.optimizer.eps}
    rates |= {"betas": (own.optimizer.beta1, own.optimizer.beta2)}
    rates |= {"weight_decay": own.optimizer.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), **rates)
    with Learner(model, job.address, name=job.name, optimizer=optimizer) as learner:
        for number in range(job.steps):
            inputs, labels = batch_of(job.seed, number)
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), own.training.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if not learner.step(loss.item(), tokens=inputs.numel()):
                break
