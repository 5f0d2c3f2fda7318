"""Learners of a real run merge the moments of their inner optimizers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_lab.simulate.weights_replay import replay_weights
from integration.real_system import TOKENS, System, Trainer, training, until

Make = Callable[..., System]
MOMENTS = {"moments": {}, "quorum": 2}


def model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


class Adam(Trainer):
    """A trainer with AdamW."""

    def __init__(self, system: System, name: str, **options: Any) -> None:
        own = model()
        self.optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
        super().__init__(system, name, own, optimizer=self.optimizer, **options)

    def _step(self, learner: Any, rng: random.Random) -> bool:
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        inputs = torch.randn(32, 4, generator=generator)
        loss = (self.model(inputs) - inputs.mean(1, keepdim=True)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return bool(learner.step(loss.item(), tokens=TOKENS))


def moments_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]


def test_a_learner_that_joins_continues_from_the_moments_of_the_run(make: Make) -> None:
    """Its own gradients are zero, so its moments can only be those of the others."""
    system = make(run={"max_steps": 10_000}, sync=MOMENTS)
    system.start()
    trainers = [Adam(system, f"learner-{i}") for i in range(2)]
    with training(*trainers):
        until(lambda: system.rounds() > 12, "rounds")
        late = model()
        optimizer = torch.optim.AdamW(late.parameters(), lr=0.01)
        with system.learner(late, "late", optimizer=optimizer) as learner:
            joined_at = learner.global_step
            for parameter in late.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            learner.step(tokens=TOKENS)
            assert joined_at > 4
            assert all(int(s["step"]) >= joined_at for s in optimizer.state.values())
            assert all(bool((each != 0).any()) for each in moments_of(optimizer))
        for trainer in trainers:
            assert all(bool(each.isfinite().all()) for each in moments_of(trainer.optimizer))


@pytest.mark.parametrize("every", [1, 3])
def test_a_run_with_moments_continues_after_a_restart_and_replays(make: Make, every: int) -> None:
    sync = {"moments": {"every": every}, "quorum": 2}
    system = make(run={"max_steps": 10_000}, sync=sync, syncer={"record_payloads": True})
    system.start()
    trainers = [Adam(system, f"learner-{i}") for i in range(2)]
    with training(*trainers):
        until(lambda: system.rounds() > 16, "rounds")
        system.stop()
        system.start()
        until(lambda: system.rounds() > 16, "rounds of its second incarnation")
    for trainer in trainers:
        trainer.end()
    tensors = system.shards[0].parts.result().worker.tensors
    for fragment, entry in tensors.fragments.items():
        moments = entry.published[tensors.plan.moments_start(fragment) :]
        assert moments.isfinite().all()
        assert (moments != 0).any()
    system.stop()
    (result,) = replay_weights(system.folder)
    assert not result.differences, result.differences
    assert result.unknown == 0, result.notes


def test_an_observer_follows_a_run_with_moments(make: Make) -> None:
    system = make(run={"max_steps": 60}, sync=MOMENTS)
    system.start()
    trainers = [Adam(system, f"learner-{i}") for i in range(2)]
    with training(*trainers):
        followed = model()
        with system.observer(followed) as observer:
            for _ in observer.updates():
                pass
        for trainer in trainers:
            trainer.end()
    for own, seen in zip(trainers[0].model.parameters(), followed.parameters(), strict=True):
        assert torch.equal(own, seen)


def test_a_learner_whose_optimizer_has_no_moments_is_rejected(make: Make) -> None:
    system = make(sync=MOMENTS)
    system.start()
    with pytest.raises(ConfigError, match="pass optimizer= to Learner"):
        system.learner(model(), "a")
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01)
    learner = system.learner(own, "b", optimizer=optimizer)
    own(torch.randn(4, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"state of SGD: take \[sync.moments\] out"):
        learner.step(tokens=TOKENS)
    learner.close()
