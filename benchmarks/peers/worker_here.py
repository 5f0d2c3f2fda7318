"""Workers in this environment: no communication, DDP, and decoupled-diloco.

DDP follows PyTorch's documentation: `torchrun` on each machine with the c10d rendezvous ("torchrun
(Elastic Launch)"), `DistributedDataParallel`, and `fp16_compress_hook` for less traffic ("DDP
Communication Hooks"). In runs with faults each machine saves a separate snapshot and loads it after
a restart ("Fault-tolerant Distributed Training with torchrun").

decoupled-diloco uses the loop of the README with the settings of the shipped recipes.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from common import Task, Training, save
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import decoupled_diloco as dd


def none(task: Task, training: Training) -> None:
    training.wait_for_others()
    for _ in range(task.steps):
        training.step()
        training.ended()
    training.finish()


def ddp(task: Task, training: Training) -> None:
    path = Path(task.folder) / f"worker-{task.worker}.snapshot"
    if path.exists():
        snapshot = torch.load(path)
        training.model.load_state_dict(snapshot["model"])
        training.optimizer.load_state_dict(snapshot["optimizer"])
        training.go_to(snapshot["steps"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout_seconds))
    # The model's buffers are constants, so there is nothing to broadcast.
    wrapped = DistributedDataParallel(training.model, forward_sync_buffers=False)
    if task.system == "ddp-fp16":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    training.wait_for_others()
    while training.steps < task.steps:
        training.step(wrapped)
        training.ended()
        if task.snapshots and training.steps % task.period == 0:
            states = {"model": training.model, "optimizer": training.optimizer}
            kept = {name: each.state_dict() for name, each in states.items()}
            save({**kept, "steps": training.steps}, path)
    training.finish(restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()


def ours(task: Task, training: Training) -> None:
    learner = dd.Learner(
        training.model,
        f"http://{task.center}:7070",
        auth_token=(Path(task.folder) / "token").read_text(),
        name=f"learner-{task.worker}",
        optimizer=training.optimizer,
    )
    training.go_to(learner.global_step)
    training.wait_for_others()
    running = True
    while running:
        running = learner.step(tokens=training.step())
        training.ended()
    learner.close()
    training.finish(global_step=learner.global_step)


def main() -> None:
    task = Task.read()
    {"none": none, "ddp": ddp, "ours": ours}[task.system.partition("-")[0]](task, Training(task))


if __name__ == "__main__":
    main()
