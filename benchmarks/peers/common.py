"""Shared code of all workers: model, data, inner optimizer, a step, and the record of its end.

It runs in the environment of each peer, with this repository's ``src`` in PYTHONPATH. The workload
needs torch, numpy and pydantic, and no other part of this package.

A worker gets the path of a `Task` in JSON. It appends the end and the loss of each step to
``FOLDER/worker-N.steps``, so that its progress is known even if it is killed, and writes
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
    "0.24M": {"layers": 4, "width": 64, "heads": 4, "context": 128, "batch_size": 8},
    "0.87M": {"layers": 4, "width": 128, "heads": 4, "context": 128, "batch_size": 16},
    "25M": {"layers": 8, "width": 512, "heads": 8, "context": 128, "batch_size": 2},
}
"""The sizes of `benchmarks/step_overhead.py`, with one worker's batch. "tiny" is for trying the
peers out, and "0.24M" is the size of `benchmarks/virtual.py`, for losses with several seeds."""

READY_SECONDS_MAX = 120.0
"""Time limit for a worker to wait for the others before its first step."""


@dataclass(frozen=True)
class Task:
    """One worker's part of a run.

    Attributes:
        system: Variant of the peer, a name in `systems.SYSTEMS`.
        seed: Seed of the initial weights and of the order of the data.
        steps: Inner steps of each worker, a multiple of the period.
        period: H, inner steps between two outer steps.
        fragments: Parts of the model that a streaming system sends one at a time.
        overlap: Steps that a streaming system may take while a fragment is in transit.
        slowdown: Factor on the time of a step.
        pace_seconds: Least time from the start of a step to its update: the time that a faster
            device would compute, which leaves the cores of this machine idle.
        snapshots: Save the state from which a restarted worker continues, if the peer leaves that
            to the training script.
        timeout_seconds: Timeout of an exchange, for peers that require one.
        addresses: Address of each worker's machine.
        center: Address of the machine with the syncer or server, if any.
    """

    system: str
    folder: str
    worker: int
    workers: int
    model: str
    seed: int
    steps: int
    period: int
    outer_lr: float
    outer_momentum: float
    fragments: int
    overlap: int
    slowdown: float
    pace_seconds: float
    snapshots: bool
    timeout_seconds: float
    addresses: tuple[str, ...]
    center: str

    def write(self) -> Path:
        """Write the task for the worker, and return its path."""
        path = Path(self.folder) / f"worker-{self.worker}.task"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: str = "") -> Self:
        """Read the task at a path; by default the one that this process was started with."""
        return cls(**json.loads(Path(path or sys.argv[1]).read_text()))

    @property
    def site(self) -> int:
        """The site of this worker."""
        return self.worker % 2

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of one worker."""
        return int(MODELS[self.model]["batch_size"] * MODELS[self.model]["context"])


def save(state: Any, path: Path) -> None:
    """Save a PyTorch state atomically, so that a killed process leaves the last complete one."""
    import torch

    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


class Training:
    """The model and a step of its loop; a peer puts its calls between `step` and `ended`."""

    def __init__(self, task: Task) -> None:
        import torch  # not at the top, because the driver only writes tasks

        from decoupled_diloco.workloads import load_workload

        torch.set_num_threads(1)
        self.task = task
        own = {"total_steps": task.steps, "seed": task.seed}
        self.workload = load_workload("gpt", {**MODELS[task.model], **own})
        self.model = self.workload.model()
        self.optimizer = self.workload.optimizer(self.model)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        self._steps = (Path(task.folder) / f"worker-{task.worker}.steps").open("a")
        self.go_to(0)

    def go_to(self, step: int) -> None:
        """Set the next step; it is not 0 for a worker that continues from a checkpoint."""
        self.steps = step
        self._batches = self.workload.batches(self.task.worker, self.task.workers, step)

    def wait_for_others(self) -> None:
        """Wait until every worker is ready, because imports and joins take unequal times."""
        folder = Path(self.task.folder)
        (folder / f"worker-{self.task.worker}.ready").touch()
        deadline = time.monotonic() + READY_SECONDS_MAX
        while len(list(folder.glob("worker-*.ready"))) < self.task.workers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all workers were ready within {READY_SECONDS_MAX:g} s")
            time.sleep(0.02)
        self._record("begin")

    def step(self, model: Any = None) -> int:
        """Take one inner step, with a wrapper of the model if one is given; return its tokens."""
        start = time.monotonic()
        begun = time.thread_time()  # excludes waiting for other workers
        batch = next(self._batches)
        factor = self.workload.schedule(self.steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        loss: Any = self.workload.loss(self.model if model is None else model, batch)
        loss.backward()
        if self.task.slowdown > 1:
            time.sleep((self.task.slowdown - 1) * (time.thread_time() - begun))
        if self.task.pace_seconds:
            time.sleep(max(0.0, start + self.task.pace_seconds - time.monotonic()))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self._loss = float(loss.detach())
        return self.workload.tokens(batch)

    def ended(self) -> None:
        """Record the end of the step, including the peer's work in it."""
        self._record(str(self.steps), f" {self._loss:.4f}")

    def finish(self, **more: Any) -> None:
        """Evaluate the current model, and write the result for the driver."""
        self._record("end")
        found = {"steps": self.steps, "loss": self.workload.evaluate(self.model)["loss"], **more}
        path = Path(self.task.folder) / f"worker-{self.task.worker}.json"
        path.write_text(json.dumps(found))

    def _record(self, what: str, more: str = "") -> None:
        self._steps.write(f"{what} {time.monotonic():.6f} {os.getpid()}{more}\n")
        self._steps.flush()
