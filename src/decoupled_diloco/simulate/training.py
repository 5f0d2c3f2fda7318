"""A whole training run in virtual time: a run's configuration, learners as one likes, one seed.

```python
result = train_virtually(config, [LearnerSpec("learner-0"), LearnerSpec("learner-1")])
result.evaluate()["loss"]
```
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from decoupled_diloco.config import RunConfig
from decoupled_diloco.config.method import options_of, plan_of
from decoupled_diloco.errors import Error
from decoupled_diloco.merge import gather, layout_of, tensors_of
from decoupled_diloco.simulate.learner_process import LearnerSpec
from decoupled_diloco.simulate.leased_loop import VirtualData
from decoupled_diloco.simulate.tensors import TensorBodies, TensorShard, Trainee, global_weights
from decoupled_diloco.simulate.world import Recorder, World
from decoupled_diloco.syncer.result import initial_values
from decoupled_diloco.workloads import Batch, Workload, load_workload
from decoupled_diloco.workloads.parts import WorkloadParts


@dataclass
class WorkloadTrainee:
    """A workload's model, optimizer and data, trained step by step."""

    workload: Workload
    draw: Callable[[], Batch]
    global_step: Callable[[], int]
    on_step: Callable[[float], None]
    model: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.workload.model()
        self.optimizer = self.workload.optimizer(self.model)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self) -> int:
        """One inner step."""
        batch = self.draw()
        factor = self.workload.schedule(self.global_step())
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        loss = self.workload.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.on_step(loss.item())
        return self.workload.tokens(batch)


@dataclass
class Onlooker:
    """What an evaluator has: a model that it never trains."""

    model: nn.Module

    def step(self) -> int:
        """An observer takes no steps."""
        raise AssertionError("an observer does not train")


@dataclass
class VirtualRun:
    """A run in virtual time and what became of it."""

    world: World
    workload: Workload
    bodies: TensorBodies
    losses: dict[str, list[float]]

    def weights(self) -> list[torch.Tensor]:
        """The global weights, fp32, in the order of the layout."""
        shards = [shard.bodies for shard in self.world.shards]
        assert all(isinstance(shard, TensorShard) for shard in shards)
        return global_weights(shards, self.bodies.plan)  # type: ignore[arg-type]

    def model(self) -> nn.Module:
        """A model with the global weights."""
        model = self.workload.model()
        own = tensors_of(model, self.bodies.plan.layout)
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
        return self.world.shards[0].machine.state.tokens


def virtual_run(
    config: RunConfig,
    learners: Sequence[LearnerSpec] = (),
    *,
    seed: int | None = None,
    workload: Workload | None = None,
    recorder: Recorder | None = None,
    **world: Any,
) -> VirtualRun:
    """Builds a run in virtual time; `VirtualRun.world` lets the time pass.

    Args:
        config: The run's settings; the learners' data parts follow ``run.learners``.
        learners: Speeds and links; default: all alike. Names are those of ``config.learner_ids``;
            observers have others.
        seed: Of the world's own choices (variance, jitter, faults); default: the run's.
        workload: What is trained; default: the configuration's.
        recorder: The event tape.
        world: Further arguments of `World`.
    """
    workload = workload or load_workload(config.workload.name, config.workload_options())
    first = workload.model()
    plan = plan_of(layout_of(first), config)
    parameters = tensors_of(first, plan.layout)
    losses: dict[str, list[float]] = {name: [] for name in config.learner_ids}

    def trainee(name: str, epoch: int) -> Trainee:
        if name in observers:
            return Onlooker(workload.model())
        if name not in losses:
            raise Error(f"{name!r} is no learner of this run: {', '.join(losses)}")
        return WorkloadTrainee(
            workload,
            draw=_leased(built, name) if data else _fixed(workload, config, name, losses),
            global_step=lambda: built.learners[name].machine.global_step,
            on_step=losses[name].append,
        )

    path = config.sync.initial_weights
    initial = (
        tuple(gather(fragment, parameters) for fragment in plan.fragments)
        if path is None
        else tuple(v for _, v in initial_values(path, plan, range(len(plan.fragments))))
    )
    bodies = TensorBodies(plan, trainee, config.sync.blend_alpha, initial)
    specs = learners or [LearnerSpec(name) for name in config.learner_ids]
    observers = {spec.name for spec in specs if spec.role == "observer"}
    data = None
    if config.data.leases:
        data = VirtualData(WorkloadParts(workload, config.data.parts), config.data.leases_ahead)
    built = World(
        options_of(config),
        specs,
        seed=config.run.seed if seed is None else seed,
        bodies=bodies,
        recorder=recorder,
        data=data,
        **{"weights_from_file": path is not None, **world},
    )
    return VirtualRun(built, workload, bodies, losses)


def _leased(world: World, name: str) -> Callable[[], Batch]:
    def draw() -> Batch:
        loop = world.learners[name].loop
        assert loop is not None, "the world has data"
        return loop.batch

    return draw


def _fixed(
    workload: Workload, config: RunConfig, name: str, losses: Mapping[str, Sequence[float]]
) -> Callable[[], Batch]:
    """The batches of a learner's fixed part; a restarted one goes on where it was."""
    part, parts = config.learner_ids.index(name), config.run.learners
    return partial(next, workload.batches(part, parts, len(losses[name])))


def train_virtually(
    config: RunConfig, learners: Sequence[LearnerSpec] = (), **arguments: Any
) -> VirtualRun:
    """Runs to the end of the budget; see `virtual_run` for the arguments.

    Raises:
        Error: nothing more can happen although the budget is not spent.
    """
    run = virtual_run(config, learners, **arguments)
    outcome = run.world.run()
    if outcome != "finished":
        state = json.dumps({s.name: s.machine.state.clock for s in run.world.shards})
        raise Error(f"the virtual run came to a standstill ({outcome}); clocks: {state}")
    return run
