"""What every worker does alike: model, data, inner optimizer, a step, and when each one ended.

Runs in the environment of each peer, with this repository's ``src`` in PYTHONPATH: the workload
needs torch, numpy and pydantic, nothing else of this package.

A worker is started with the path of a `Task` as JSON. It appends the end of each step to
``FOLDER/worker-N.steps``, so that what it did is known even if it is killed, and writes
``FOLDER/worker-N.json`` at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"layers": 2, "width": 32, "heads": 2, "context": 32, "batch_size": 2},
    "0.87M": {"layers": 4, "width": 128, "heads": 4, "context": 128, "batch_size": 16},
    "25M": {"layers": 8, "width": 512, "heads": 8, "context": 128, "batch_size": 2},
}
"""The sizes of `benchmarks/step_overhead.py`; a batch is one worker's.
"tiny" is for trying the peers out."""

READY_SECONDS_MAX = 120.0
"""How long a worker waits for the others before its first step."""


@dataclass(frozen=True)
class Task:
    """One worker's part of a run.

    Attributes:
        system: Which variant of the peer, as `systems.SYSTEMS` calls it.
        steps: Inner steps of each worker, a multiple of the period.
        period: H, inner steps between two outer steps.
        fragments: Parts of the model that a streaming system sends one at a time.
        overlap: Steps that a streaming system may take while a fragment is under way.
        slowdown: A step takes this many times as long.
        snapshots: Whether to keep what a worker that is started again goes on from, where the peer
            leaves that to the training script.
        timeout_seconds: What a peer that asks for the longest duration of an exchange is told.
        addresses: Of each worker's machine.
        centre: The address of the machine with the syncer, the server or whatever there is.
    """

    system: str
    folder: str
    worker: int
    workers: int
    model: str
    steps: int
    period: int
    outer_lr: float
    outer_momentum: float
    fragments: int
    overlap: int
    slowdown: float
    snapshots: bool
    timeout_seconds: float
    addresses: tuple[str, ...]
    centre: str

    def write(self) -> Path:
        """Puts it where the worker finds it."""
        path = Path(self.folder) / f"worker-{self.worker}.task"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str = "") -> Self:
        """The one at a path, or else the one that this process was started with."""
        return cls(**json.loads(Path(path or sys.argv[1]).read_text()))

    @property
    def site(self) -> int:
        """Where this worker is."""
        return self.worker % 2

    @property
    def tokens_per_step(self) -> int:
        """Of one worker."""
        return int(MODELS[self.model]["batch_size"] * MODELS[self.model]["context"])


class Training:
    """The model, and a loop's step; a peer puts its own calls between `step` and `ended`."""

    def __init__(self, task: Task) -> None:
        import torch  # not at the top: who only writes tasks needs none

        from decoupled_diloco.workloads import load_workload

        torch.set_num_threads(1)
        self.task = task
        self.workload = load_workload("gpt", {**MODELS[task.model], "total_steps": task.steps})
        self.model = self.workload.model()
        self.optimizer = self.workload.optimizer(self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._steps = (Path(task.folder) / f"worker-{task.worker}.steps").open("a")
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Which step comes next: of a worker that goes on from a checkpoint not the first."""
        self.steps = step
        self._batches = self.workload.batches(self.task.worker, self.task.workers, step)

    def wait_for_others(self) -> None:
        """Returns when every worker has come here: imports and joining take unequal times."""
        folder = Path(self.task.folder)
        (folder / f"worker-{self.task.worker}.ready").touch()
        deadline = time.monotonic() + READY_SECONDS_MAX
        while len(list(folder.glob("worker-*.ready"))) < self.task.workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all workers were ready within {READY_SECONDS_MAX:g} s")
            time.sleep(0.02)
        self._tell("begin")

    def step(self, model: Any = None) -> int:
        """One inner step, of a wrapper of the model if one is given; returns its tokens."""
        begun = time.thread_time()  # without what it waits for the others
        batch = next(self._batches)
        factor = self.workload.schedule(self.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        loss: Any = self.workload.loss(self.model if model is None else model, batch)
        loss.backward()
        if self.task.slowdown > 1:
            time.sleep((self.task.slowdown - 1) * (time.thread_time() - begun))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return self.workload.tokens(batch)

    def ended(self) -> None:
        """The step has ended, whatever the peer does in it included."""
        self._tell(str(self.steps))

    def finish(self, **more: Any) -> None:
        """Evaluates the model as it is now, and leaves the result for the driver."""
        self._tell("end")
        found = {"steps": self.steps, "loss": self.workload.evaluate(self.model)["loss"], **more}
        path = Path(self.task.folder) / f"worker-{self.task.worker}.json"
        path.write_text(json.dumps(found))

    def _tell(self, what: str) -> None:
        self._steps.write(f"{what} {time.monotonic():.6f} {os.getpid()}\n")
        self._steps.flush()
