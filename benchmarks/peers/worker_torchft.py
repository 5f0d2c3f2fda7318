"""torchft's DiLoCo over gloo; "torchft-streaming" has a fragment for each block of the model.

It follows the example `train_diloco.py` and the README: a lighthouse, `torchrun` for each replica
group, `ProcessGroupGloo`, `HTTPTransport`, synchronous quorum, at least one replica. Differences:

* ``init_sync=False``, as the documentation of `Manager` requires for identically initialized
  models.
* The timeouts, 10 and 30 s in the example, are long enough for the link.
* The outer momentum is that of all systems in the comparison.
* "torchft-buckets" sets ``use_bucketization`` of `DiLoCo`: one exchange for all tensors.
"""

import os
from datetime import timedelta
from typing import Any

import torch
from common import Task, Training
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.local_sgd import DiLoCo


def fragments_of(model: Any, task: Task) -> list[nn.Module]:
    """Return the whole model, or one fragment per block, with embedding and head at the ends."""
    if task.system != "torchft-streaming":
        return [model]
    parts = [[block] for block in model.blocks]
    parts[0].append(model.embedding)
    parts[-1] += [model.norm, model.head]
    return [nn.ModuleList(part) for part in parts]


def main() -> None:
    task = Task.read()
    training = Training(task)
    model, inner = training.model, training.optimizer
    fragments = fragments_of(model, task)
    outers = [
        torch.optim.SGD(
            fragment.parameters(),
            lr=task.outer_lr,
            momentum=task.outer_momentum,
            nesterov=task.outer_momentum > 0,
        )
        for fragment in fragments
    ]

    def load_state_dict(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner_optim"])
        training.go_to(state["steps"])

    def state_dict() -> Any:
        inner_optim = inner.state_dict()
        return {"model": model.state_dict(), "inner_optim": inner_optim, "steps": training.steps}

    patience = timedelta(seconds=task.timeout_seconds)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        use_async_quorum=False,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"worker_{task.worker}",
        hostname=task.addresses[task.worker],
        timeout=patience,
        quorum_timeout=patience,
        checkpoint_transport=HTTPTransport(timeout=patience, num_chunks=0),
        init_sync=False,
    )
    training.wait_for_others()
    with DiLoCo(
        manager,
        fragments,
        inner,
        outers,
        backup_device=torch.device("cpu"),
        sync_every=task.period,
        fragment_sync_delay=task.overlap if len(fragments) > 1 else 0,
        use_bucketization=task.system == "torchft-buckets",
    ):
        while manager.current_step() * task.period < task.steps * len(fragments):
            training.step()
            training.ended()
    training.finish(
        commits=manager.current_step(),
        batches_committed=manager.batches_committed(),
        restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    )
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
