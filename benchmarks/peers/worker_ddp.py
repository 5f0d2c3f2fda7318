"""DistributedDataParallel over gloo, under torchrun.

As PyTorch's documentation says: `torchrun` on each machine with the c10d rendezvous ("torchrun
(Elastic Launch)"), `DistributedDataParallel`, and for less traffic `fp16_compress_hook` ("DDP
Communication Hooks"). In runs with faults each machine keeps a snapshot of its own and loads it
after a restart ("Fault-tolerant Distributed Training with torchrun").
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from common import Task, Training
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def load(training: Training, path: Path) -> None:
    snapshot = torch.load(path)
    training.model.load_state_dict(snapshot["model"])
    training.optimizer.load_state_dict(snapshot["optimizer"])
    training.go_to(snapshot["steps"])


def save(training: Training, path: Path) -> None:
    snapshot = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "steps": training.steps,
    }
    torch.save(snapshot, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def main() -> None:
    task = Task.read()
    training = Training(task)
    snapshot = Path(task.folder) / f"worker-{task.worker}.snapshot"
    if snapshot.exists():
        load(training, snapshot)
    dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout_seconds))
    # The model's buffers are constants: nothing to broadcast in each step.
    wrapped = DistributedDataParallel(training.model, forward_sync_buffers=False)
    if task.system == "ddp-fp16":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    training.wait_for_others()
    while training.steps < task.steps:
        training.step(wrapped)
        training.ended()
        if task.snapshots and training.steps % task.period == 0:
            save(training, snapshot)
    training.finish(restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
