"""DistributedDataParallel over gloo, under torchrun.

As PyTorch's documentation says: `torchrun` on each machine with the c10d rendezvous ("torchrun
(Elastic Launch)"), `DistributedDataParallel`, and for less traffic `fp16_compress_hook` ("DDP
Communication Hooks").
"""

import os
from datetime import timedelta

import torch.distributed as dist
from common import Task, Training
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    task = Task.read()
    training = Training(task)
    dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout_seconds))
    wrapped = DistributedDataParallel(training.model)
    if task.system == "ddp-fp16":
        wrapped.register_comm_hook(None, fp16_compress_hook)
    training.wait_for_others()
    for _ in range(task.steps):
        training.step(wrapped)
        training.ended()
    training.finish(restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
