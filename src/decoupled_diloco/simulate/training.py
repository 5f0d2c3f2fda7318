"""A whole training run in virtual time: a run's configuration, learners as one likes, one seed.

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
from decoupled_diloco.errors import Error
from decoupled_diloco.launch.on_device import placed
from decoupled_diloco.merge import layout_of, tensors_of
from decoupled_diloco.merge.plan import MergePlan
from decoupled_diloco.simulate.hosts import ParticipantHost
from decoupled_diloco.simulate.spec import LearnerSpec
from decoupled_diloco.simulate.stage import Recorder
from decoupled_diloco.simulate.system import System
from decoupled_diloco.workloads import Workload, workload_of
from decoupled_diloco.workloads.base import Placed
from decoupled_diloco.workloads.gpt import GptWorkload
from decoupled_diloco.workloads.paced import PacedOptions

RAM = "/dev/shm"
"""Where the files of a run that is not kept are, if this machine has it."""


@dataclass
class VirtualRun:
    """A run in virtual time and what became of it.

    As a context manager it lets go of its processes and files at the end; what is known of the run
    stays.

    Attributes:
        system: The run; lets the time pass.
        workload: What its learners train.
        plan: The model's layout, how it is cut, and how it is merged.
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
        """Lets go of its processes and files; what is known of the run stays."""
        self.system.close()
        self._folder.cleanup()

    @property
    def losses(self) -> dict[str, list[float]]:
        """Of the steps of each learner."""
        return {name: host.losses for name, host in self.system.learners.items()}

    def weights(self) -> list[Tensor]:
        """The global weights, fp32, in the order of the layout."""
        flat = [
            torch.empty(spec.numel, dtype=torch.float32, device="cpu")
            for spec in self.plan.layout.tensors
        ]
        for shard in self.system.shards:
            for fragment, entry in shard.tensors.fragments.items():
                start = 0
                for piece in self.plan.fragments[fragment].pieces:
                    values = entry.published[start : start + piece.numel]
                    flat[piece.tensor][piece.start : piece.stop] = values
                    start += piece.numel
        shapes = [spec.shape for spec in self.plan.layout.tensors]
        return [tensor.view(shape) for tensor, shape in zip(flat, shapes, strict=True)]

    def model(self) -> nn.Module:
        """A model with the global weights, on the device of the learners."""
        model = placed(self.workload.model(), self.system.device)
        own = tensors_of(model, self.plan.layout)
        with torch.no_grad():
            for tensor, values in zip(own, self.weights(), strict=True):
                tensor.copy_(values)
        return model

    def evaluate(self) -> dict[str, float]:
        """The workload's metrics of the global weights on held-out data."""
        return self.workload.evaluate(self.model())

    @property
    def tokens(self) -> int:
        """Tokens that were trained, all learners together."""
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
    """Builds a run in virtual time; `VirtualRun.system` lets the time pass.

    Close it at the end: its files are gone then. No process fails in it, so learners keep no
    checkpoints.

    Args:
        config: The run's settings; the learners' data parts follow ``run.learners``.
        learners: Speeds and links; default: all alike. Names are those of ``config.learner_ids``;
            observers have others.
        seed: Of the world's own choices (variance, jitter, faults); default: the run's.
        workload: What is trained; default: the configuration's.
        recorder: The event tape.
        device: What all learners compute on, "cuda" for example: eight of them share one GPU. Only
            on the CPU does the same seed give the same bits.
    """
    torch.set_num_threads(1)
    config = config.model_copy(
        update={"learner": config.learner.model_copy(update={"checkpoint_every_seconds": 0.0})}
    )
    workload = workload or workload_of(config)
    folder = tempfile.TemporaryDirectory(dir=RAM if Path(RAM).is_dir() else None)
    specs = learners or [LearnerSpec(name) for name in config.learner_ids]
    unknown = {s.name for s in specs if s.role == "learner"} - set(config.learner_ids)
    if unknown:
        names = ", ".join(config.learner_ids)
        raise Error(f"{min(unknown)!r} is no learner of this run: {names}")
    system = System(
        config,
        specs,
        Path(folder.name),
        seed=config.run.seed if seed is None else seed,
        workload=lambda host: workload,
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
    """Runs to the end of the budget, and closes the run; see `virtual_run` for the arguments.

    Raises:
        Error: nothing more can happen although the budget is not spent.
    """
    with virtual_run(config, learners, workload=workload, recorder=recorder, device=device) as run:
        outcome = run.system.run(stop=lambda: run.system.finished, until=FOREVER_SECONDS)
    if outcome != "stop":
        clocks = {shard.name: shard.machine.state.clock for shard in run.system.shards}
        raise Error(f"the virtual run came to a standstill ({outcome}); {json.dumps(clocks)}")
    return run


FOREVER_SECONDS = 1e9
"""Thirty years: a run that is not over by then goes nowhere."""


def unpaced(config: RunConfig) -> Callable[[ParticipantHost], Workload]:
    """What the processes of a run train; in virtual time a paced workload does not sleep."""
    if config.required_workload.name == "paced":
        gpt = GptWorkload(PacedOptions(**config.workload_options()))
        return lambda host: gpt
    shared = workload_of(config)
    if isinstance(shared, Placed):  # each learner has its own
        return lambda host: workload_of(config)
    return lambda host: shared
