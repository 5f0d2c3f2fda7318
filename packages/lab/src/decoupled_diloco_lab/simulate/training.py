"""Train a model in virtual time: a run's configuration, any learners, one seed.

```python
result = train_virtually(config, [LearnerSpec("learner-0"), LearnerSpec("learner-1")])
result.evaluate()["loss"]
```
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import plan_of
from decoupled_diloco.errors import DilocoError
from decoupled_diloco.launch.on_device import placed
from decoupled_diloco.merge import layout_of, tensors_of
from decoupled_diloco.merge.fragments import clipped
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.workloads import Workload, workload_of
from decoupled_diloco.workloads.gpt import GptWorkload
from decoupled_diloco.workloads.paced import PacedOptions
from decoupled_diloco.workloads.workload import Placed
from decoupled_diloco_lab.simulate.hosts import ParticipantHost
from decoupled_diloco_lab.simulate.spec import LearnerSpec
from decoupled_diloco_lab.simulate.stage import Recorder
from decoupled_diloco_lab.simulate.system import System

RAM = "/dev/shm"
"""Folder for the files of a temporary run, if this machine has it."""


@dataclass
class VirtualRun:
    """A run in virtual time and its results.

    As a context manager it closes its processes and deletes its files at the end. Results stay.

    Attributes:
        system: The virtual run, which lets time pass.
        workload: The workload of its learners.
        plan: The model's layout, its fragments, and how they are merged.
    """

    system: System
    workload: Workload
    plan: MergePlan
    _folder: tempfile.TemporaryDirectory[str]

    def __enter__(self) -> VirtualRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its processes and delete its files. Results stay."""
        self.system.close()
        self._folder.cleanup()

    def train(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass to the end of the budget, or until `stop`.

        Raises:
            DilocoError: A process stays down, or the run stalled before the end of its budget.
        """
        system = self.system
        outcome = "until"
        while outcome == "until" and system.now < FOREVER_SECONDS:
            outcome = system.run(
                stop=lambda: system.finished or stop(), until=system.now + LOOK_SECONDS
            )
            for child in system.supervisor.children.values():
                if child.down:
                    words = system.supervisor.last_words(child.name)
                    raise DilocoError(f"{child.name} failed: {words}")
        if outcome != "stop":
            clocks = {shard.name: shard.machine.state.clock for shard in system.shards}
            raise DilocoError(
                f"the virtual run stalled ({outcome}) with clocks {json.dumps(clocks)}: lower "
                "quorum, or plan fewer faults"
            )

    @property
    def losses(self) -> dict[str, list[float]]:
        """The losses of each learner's steps."""
        return {name: host.losses for name, host in self.system.learners.items()}

    def weights(self, *, average: bool = False) -> list[Tensor]:
        """Return the global weights, fp32, in the order of the model's layout.

        Args:
            average: Return their average instead, in a run with `outer.average`.
        """
        flat = [
            torch.empty(spec.numel, dtype=torch.float32, device="cpu")
            for spec in self.plan.layout.of_model.tensors
        ]
        for shard in self.system.shards:
            for fragment in shard.tensors.fragments:
                start, whole = 0, shard.tensors.whole(fragment, average=average)
                stop = self.plan.moments_start(fragment)
                for piece in clipped(self.plan.fragments[fragment], 0, stop).pieces:
                    values = whole[start : start + piece.numel]
                    flat[piece.tensor][piece.start : piece.stop] = values
                    start += piece.numel
        shapes = [spec.shape for spec in self.plan.layout.of_model.tensors]
        return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]

    def model(self, *, average: bool = False) -> nn.Module:
        """Return a model with the global weights, or their average, on the learners' device."""
        model = placed(self.workload.model(), self.system.device)
        own = tensors_of(model, self.plan.layout)
        with torch.no_grad():
            for tensor, values in zip(own, self.weights(average=average), strict=True):
                tensor.copy_(values)
        return model

    def evaluate(self, *, average: bool = False) -> dict[str, float]:
        """Return the workload's metrics on held-out data, for the weights or their average."""
        return self.workload.evaluate(self.model(average=average))

    @property
    def tokens(self) -> int:
        """Number of tokens that all learners together have trained."""
        tokens: int = self.system.shards[0].machine.state.tokens
        return tokens


def virtual_run(
    config: RunConfig,
    learners: Sequence[LearnerSpec] = (),
    *,
    seed: int | None = None,
    workload: Workload | None = None,
    recorder: Recorder | None = None,
    device: str | torch.device = "cpu",
) -> VirtualRun:
    """Build a run in virtual time; `VirtualRun.system` lets time pass.

    Close it at the end, which deletes its files. Learners write no checkpoints, unless the settings
    name their interval: most such runs plan no failures.

    Args:
        config: The run's settings. ``run.learners`` determines the data partitions.
        learners: Speeds and links; default: identical learners. Learners need names from
            ``config.learner_ids``; observers need others.
        seed: Seed of the simulation (variance, jitter, faults); default: the run's.
        workload: The workload to train; default: the configuration's.
        recorder: Called for every event.
        device: The device of all learners, for example "cuda". They share one GPU. The same seed
            gives the same bits only on the CPU.

    Raises:
        DilocoError: A learner's name is not one of the run's.
    """
    torch.set_num_threads(1)
    if "checkpoint_interval_seconds" not in config.learner.model_fields_set:
        without = config.learner.model_copy(update={"checkpoint_interval_seconds": 0.0})
        config = config.model_copy(update={"learner": without})
    workload = workload or workload_of(config)
    folder = tempfile.TemporaryDirectory(dir=RAM if Path(RAM).is_dir() else None)
    specs = learners or [LearnerSpec(name) for name in config.learner_ids]
    unknown = {s.name for s in specs if s.role == "learner"} - set(config.learner_ids)
    if unknown:
        names = ", ".join(config.learner_ids)
        raise DilocoError(f"{min(unknown)!r} is not a learner of this run: use one of {names}")
    system = System(
        config,
        specs,
        Path(folder.name),
        seed=config.run.seed if seed is None else seed,
        workload=lambda host: workload,
        tapes=Path(folder.name) if config.trust.act != "off" else None,  # the evaluator reads them
        device=device,
    )
    if recorder is not None:
        system.recorders.append(recorder)
    plan = plan_of(layout_of(workload.model()), config)
    return VirtualRun(system, workload, plan, folder)


def train_virtually(
    config: RunConfig,
    learners: Sequence[LearnerSpec] = (),
    *,
    workload: Workload | None = None,
    recorder: Recorder | None = None,
    device: str | torch.device = "cpu",
) -> VirtualRun:
    """Run to the end of the budget and close the run; see `virtual_run` for the arguments.

    Raises:
        DilocoError: See `VirtualRun.train`.
    """
    with virtual_run(config, learners, workload=workload, recorder=recorder, device=device) as run:
        run.train()
    return run


LOOK_SECONDS = 60.0
"""Virtual time between two checks whether a process stays down."""

FOREVER_SECONDS = 1e9
"""Time limit of 30 years: a run that has not ended by then has stalled."""


def unpaced(config: RunConfig) -> Callable[[ParticipantHost], Workload]:
    """Return the workload of a run's processes. A paced workload must not sleep in virtual time."""
    if config.required_workload.name == "paced":
        gpt = GptWorkload(PacedOptions(**config.workload_options()))
        return lambda host: gpt
    shared = workload_of(config)
    if isinstance(shared, Placed):  # it has state, so each learner needs its own
        return lambda host: workload_of(config)
    return lambda host: shared
