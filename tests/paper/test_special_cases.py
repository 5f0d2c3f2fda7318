"""Rule 14: the published methods are settings of the same core.

Each recipe runs in the real processes on virtual machines. It is compared with a naive
implementation of its method in about ten lines. The weights agree up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.config import RunConfig, load_config
from decoupled_diloco.merge import Fragment, gather, scatter, tensors_of
from decoupled_diloco.workloads import Workload
from decoupled_diloco_lab.simulate import LearnerSpec
from decoupled_diloco_lab.simulate.training import VirtualRun, train_virtually, virtual_run

RECIPES = Path(__file__).parents[2] / "recipes"
LEARNERS = 3
STEPS = 13
TINY = (
    "data.elastic=false",  # each learner draws from its own part, as in the papers
    f"run.learners={LEARNERS}",
    f"sync.quorum={LEARNERS}",
    "run.max_steps=1000",
    "workload.options.layers=1",
    "workload.options.width=16",
    "workload.options.heads=2",
    "workload.options.context=16",
    "workload.options.batch_size=2",
    "workload.options.corpus_bytes_max=200000",
    "workload.options.warmup_steps=0",
)


def config_of(recipe: str, *overrides: str) -> RunConfig:
    return load_config(RECIPES / f"{recipe}.toml", [*TINY, *overrides])


class Naive:
    """M models with their optimizers and data, and the global parameters."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        first = workload.model()
        self.models = [copy.deepcopy(first) for _ in range(LEARNERS)]
        self.optimizers = [workload.optimizer(model) for model in self.models]
        self.batches = [workload.batches(part, LEARNERS) for part in range(LEARNERS)]
        self.globals = [p.detach().clone() for p in first.parameters()]
        self.momentum = [torch.zeros_like(p) for p in self.globals]

    def local_steps(self, step: int) -> None:
        for model, optimizer, batches in zip(
            self.models, self.optimizers, self.batches, strict=True
        ):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * self.workload.schedule(step)
            self.workload.loss(model, next(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def remember_rates(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["initial_lr"] = group["lr"]

    def outer_step(self, lr: float, mu: float, nesterov: bool = True) -> None:
        """Δ = Θ − mean θ; b ← μb + Δ; Θ ← Θ − η(Δ + μb)."""
        for index, theta in enumerate(self.globals):
            mean = torch.stack([list(m.parameters())[index].detach() for m in self.models]).mean(0)
            delta = theta - mean
            self.momentum[index] = mu * self.momentum[index] + delta
            theta -= lr * (delta + mu * self.momentum[index] if nesterov else self.momentum[index])

    def overwrite(self) -> None:
        for model in self.models:
            for parameter, theta in zip(model.parameters(), self.globals, strict=True):
                parameter.data.copy_(theta)


def after_steps(config: RunConfig) -> VirtualRun:
    """Return the virtual run, stopped well after step STEPS and well before the next one."""
    with virtual_run(config) as run:
        run.system.run(stop=lambda: min(map(len, run.losses.values())) == STEPS)
        run.system.run(until=run.system.now + 0.5)
    assert {len(losses) for losses in run.losses.values()} == {STEPS}
    return run


def assert_same(run: VirtualRun, naive: Naive) -> None:
    for ours, theirs in zip(run.weights(), naive.globals, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    for host, model in zip(run.system.learners.values(), naive.models, strict=True):
        assert host.model is not None
        for ours, theirs in zip(host.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def naive_run(workload: Workload, on_step: Callable[[Naive, int], None]) -> Naive:
    naive = Naive(workload)
    naive.remember_rates()
    for step in range(1, STEPS + 1):
        naive.local_steps(step - 1)
        on_step(naive, step)
    return naive


def test_data_parallel_is_p1_h1_tau0_with_an_outer_rate_of_one() -> None:
    run = after_steps(config_of("data-parallel"))
    model = run.workload.model()
    optimizer = run.workload.optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    batches = [run.workload.batches(part, LEARNERS) for part in range(LEARNERS)]
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * run.workload.schedule(step)
        losses = [run.workload.loss(model, next(each)) for each in batches]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(run.weights(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.data, rtol=1e-5, atol=2e-6)


def test_diloco_is_one_fragment_with_all_learners_and_a_wait() -> None:
    config = config_of("diloco", "sync.sync_every=4")

    def sync(naive: Naive, step: int) -> None:
        if step % 4 == 0:
            naive.outer_step(lr=0.7, mu=0.9)
            naive.overwrite()

    run = after_steps(config)
    assert_same(run, naive_run(run.workload, sync))


def test_fedavg_takes_the_mean_of_the_models() -> None:
    config = config_of("fedavg", "sync.sync_every=5")

    def sync(naive: Naive, step: int) -> None:
        if step % 5 == 0:
            for index, theta in enumerate(naive.globals):
                models = [list(m.parameters())[index].detach() for m in naive.models]
                theta.copy_(torch.stack(models).mean(0))
            naive.overwrite()

    run = after_steps(config)
    assert_same(run, naive_run(run.workload, sync))


def test_streaming_diloco_blends_each_fragment_tau_steps_later() -> None:
    config = config_of(
        "streaming-diloco",
        "sync.sync_every=6",
        "sync.fragments=3",
        "sync.codec.uplink=fp32",
        "sync.codec.downlink=fp32",
    )
    run = after_steps(config)
    plan = run.plan
    pending: dict[int, Fragment] = {}

    def own(model: nn.Module) -> list[Tensor]:
        return [p.data for p in tensors_of(model, plan.layout)]

    def sync(naive: Naive, step: int) -> None:
        if (fragment := pending.pop(step, None)) is not None:
            for model in naive.models:
                blended = 0.5 * gather(fragment, own(model)) + 0.5 * gather(fragment, naive.globals)
                scatter(fragment, blended, own(model))
        for p, fragment in enumerate(plan.fragments):
            if step % 6 == p * 6 // 3:
                theta = gather(fragment, naive.globals)
                sent = torch.stack([gather(fragment, own(m)) for m in naive.models]).mean(0)
                b = 0.9 * gather(fragment, naive.momentum) + (theta - sent)
                scatter(fragment, b, naive.momentum)
                scatter(fragment, theta - 0.4 * ((theta - sent) + 0.9 * b), naive.globals)
                pending[step + 2] = fragment

    assert_same(run, naive_run(run.workload, sync))


SPEEDS = (1.0, 1.3, 1.7)
"""Step time of each learner. No two learners finish a step at the same moment."""


def test_async_local_sgd_merges_each_learner_alone_after_its_own_steps() -> None:
    config = config_of(
        "async-local-sgd",
        "sync.quorum=1",
        "sync.sync_every=3",
        "sync.fragments=1",
        "sync.codec.uplink=fp32",
        "sync.codec.downlink=fp32",
        "outer.options={every=2}",
    )
    specs = [
        LearnerSpec(name, step_seconds=seconds, variance=0.0, latency=0.005)
        for name, seconds in zip(config.learner_ids, SPEEDS, strict=True)
    ]
    with virtual_run(config, specs) as run:
        run.system.run(stop=lambda: len(run.losses["learner-0"]) == STEPS)
        run.system.run(until=run.system.now + 0.2)
    counts = [len(losses) for losses in run.losses.values()]
    assert counts[0] == STEPS
    assert counts[0] > counts[1] > counts[2] > 6, "each learner has been merged twice"

    naive = Naive(run.workload)
    naive.remember_rates()
    theta, momentum, waiting = (torch.cat([g.flatten() for g in x]) for x in (naive.globals,) * 3)
    momentum, waiting, merges = momentum * 0, waiting * 0, 0
    origins = [theta.clone() for _ in SPEEDS]
    order = sorted(
        (step * SPEEDS[m], m, step) for m in range(LEARNERS) for step in range(1, counts[m] + 1)
    )
    for _, m, step in order:
        model = naive.models[m]
        for group in naive.optimizers[m].param_groups:
            group["lr"] = group["initial_lr"] * run.workload.schedule(step - 1)
        run.workload.loss(model, next(naive.batches[m])).backward()
        naive.optimizers[m].step()
        naive.optimizers[m].zero_grad()
        own = torch.cat([p.detach().flatten() for p in model.parameters()])
        own = theta + (own - origins[m])  # what the others have sent, under what is its own
        torch.nn.utils.vector_to_parameters(own, model.parameters())
        origins[m] = theta.clone()
        if step % 3 == 0:
            delta, origins[m], merges = theta - own, own.clone(), merges + 1
            waiting += delta
            theta = theta - 0.7 * delta / 2
            if merges % 2 == 0:
                momentum = 0.5 * momentum + waiting / 2
                theta, waiting = theta - 0.7 * 0.5 * momentum, waiting * 0
    found = torch.cat([tensor.flatten() for tensor in run.weights()])
    torch.testing.assert_close(found, theta, rtol=1e-5, atol=2e-6)
    for host, model in zip(run.system.learners.values(), naive.models, strict=True):
        assert host.model is not None
        for ours, theirs in zip(host.model.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("recipe", ["data-parallel", "diloco", "fedavg", "streaming-diloco"])
def test_a_synchronous_recipe_runs_to_the_end_of_its_budget(recipe: str) -> None:
    run = train_virtually(
        config_of(
            recipe,
            "run.max_steps=9",
            "sync.sync_every=1" if recipe == "data-parallel" else "sync.sync_every=4",
            *(("sync.fragments=2",) if recipe == "streaming-diloco" else ()),
        )
    )
    assert run.system.finished
    assert run.system.shards[0].machine.state.clock == 9
