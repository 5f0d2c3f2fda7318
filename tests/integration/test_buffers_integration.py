"""BatchNorm in a real run: the result is a complete model that evaluates like the learners'."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from decoupled_diloco.config.method import plan_of, read_public
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.export.run_weights import fill, find_weights
from decoupled_diloco.merge import layout_of
from decoupled_diloco.syncer.result import assemble
from decoupled_diloco_lab.simulate.weights_replay import replay_weights
from integration.real_system import TOKENS, System, Trainer, training, until

Make = Callable[..., System]


def model() -> nn.Sequential:
    """Return a small net that cannot be evaluated without its running statistics."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs far from zero, and their targets."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    inputs = 20 + 5 * torch.randn(32, 4, generator=generator)
    return inputs, (inputs.mean(1, keepdim=True) - 20) / 5


class Batched(Trainer):
    """A trainer with real training, whose statistics follow the data."""

    def _step(self, learner: Any, rng: random.Random) -> bool:
        inputs, targets = batch(rng)
        loss = (self.model(inputs) - targets).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.05)
                parameter.grad = None
        return bool(learner.step(loss.item(), tokens=TOKENS))


def trained(make: Make, buffers: str) -> tuple[System, list[Batched]]:
    """Run two learners until the end."""
    system = make(run={"max_steps": 150}, sync={"merge": {"buffers": buffers}, "quorum": 2})
    system.start()
    trainers = [Batched(system, f"learner-{i}", model()) for i in range(2)]
    with training(*trainers):
        for trainer in trainers:
            trainer.end()
    system.wait_finished()
    public = read_public(system.shards[0]._coordinator._hello.settings)
    layout = layout_of(model())
    assemble(system.folder, plan_of(layout, public), 1)
    return system, trainers


def loss_of(net: nn.Module) -> float:
    """Return the loss on held-out data, with the running statistics."""
    inputs, targets = batch(random.Random("held out"))
    with torch.no_grad():
        return float((net.eval()(inputs) - targets).square().mean())


def test_the_weights_of_a_run_are_a_complete_model(make: Make) -> None:
    system, trainers = trained(make, "mean")
    weights = find_weights(system.folder, system.config).tensors
    fresh = model()
    fresh.load_state_dict(weights, strict=True)
    assert loss_of(fresh) < 0.2 < loss_of(model()), "it is trained"
    assert float(weights["1.running_var"].max()) + float(weights["1.running_mean"].abs().max()) > 10
    for trainer in trainers:
        for name, tensor in trainer.model.state_dict().items():
            if tensor.is_floating_point():
                assert torch.equal(tensor, weights[name]), f"{name} of {trainer.name}"
    filled = model()
    fill(filled, weights, system.folder)
    assert loss_of(filled) == pytest.approx(loss_of(fresh))


def test_buffers_may_be_those_of_one_learner(make: Make) -> None:
    """The weights evaluate well with the statistics of one of the two learners."""
    system, trainers = trained(make, "one")
    weights = find_weights(system.folder, system.config).tensors
    fresh = model()
    fresh.load_state_dict(weights, strict=True)
    assert loss_of(fresh) < 0.2
    for trainer in trainers:
        assert torch.equal(trainer.model.state_dict()["1.running_var"], weights["1.running_var"])


def test_buffers_may_stay_local(make: Make) -> None:
    system, trainers = trained(make, "local")
    weights = find_weights(system.folder, system.config).tensors
    assert set(weights) == {name for name, _ in model().named_parameters()}
    mine, other = (trainer.model[1].running_mean for trainer in trainers)  # type: ignore[index]
    assert not torch.equal(mine, other)


MASK_NBYTES = 4 * 256 * 256


class Masked(nn.Sequential):
    """A net with statistics that follow the data, and a mask hundreds of times as large."""

    def __init__(self) -> None:
        super().__init__(*model())
        self.register_buffer("mask", torch.ones(256, 256).tril())


class Counted(Batched):
    """A trainer that starts with the others, and may change its mask from its tenth step on."""

    def __init__(self, *arguments: Any, changes: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.changes = changes

    def _step(self, learner: Any, rng: random.Random) -> bool:
        if self.changes and learner.steps >= 10:
            with torch.no_grad():
                self.model.mask.add_(1.0)  # type: ignore[operator]
        return super()._step(learner, rng)


@pytest.mark.parametrize("buffers", ["mean", "one"])
@pytest.mark.parametrize("changes", [False, True])
def test_a_buffer_is_sent_only_when_it_has_changed(make: Make, changes: bool, buffers: str) -> None:
    """Bytes are counted from the join on; the statistics are merged in each round."""
    system = make(run={"max_steps": 60}, sync={"merge": {"buffers": buffers}, "quorum": 2})
    system.start()
    gate = threading.Event()
    trainers = [
        Counted(system, f"learner-{i}", Masked(), gate=gate, changes=changes) for i in range(2)
    ]
    stats = system.shards[0]._server.stats
    with training(*trainers):
        up, down = stats.data_bytes_received, stats.data_bytes_sent
        assert min(up, down) >= MASK_NBYTES, "a joining learner receives every buffer"
        gate.set()
        for trainer in trainers:
            trainer.end()
    system.wait_finished()
    assert system.rounds() > 20
    up, down = stats.data_bytes_received - up, stats.data_bytes_sent - down
    if changes:
        assert min(up, down) >= MASK_NBYTES
    else:
        assert max(up, down) < MASK_NBYTES // 2
    public = read_public(system.shards[0]._coordinator._hello.settings)
    assemble(system.folder, plan_of(layout_of(Masked()), public), 1)
    weights = find_weights(system.folder, system.config).tensors
    assert torch.equal(weights["mask"], Masked().mask) != changes
    for trainer in trainers:
        for name in ("mask", "1.running_mean", "1.running_var"):
            assert torch.equal(trainer.model.state_dict()[name], weights[name]), name
    assert float(weights["1.running_mean"].abs().max()) > 1


def test_a_restarted_shard_omits_unchanged_buffers_and_its_run_replays(make: Make) -> None:
    """The learners hold the buffers that it has recovered; recorded payloads have all buffers."""
    system = make(run={"max_steps": 10_000}, sync={"quorum": 2}, syncer={"record_payloads": True})
    system.start()
    trainers = [Counted(system, f"learner-{i}", Masked()) for i in range(2)]
    with training(*trainers):
        until(lambda: system.rounds() > 8, "rounds")
        system.stop()
        system.start()
        until(lambda: system.rounds() > 8, "rounds of its second incarnation")
        stats = system.shards[0]._server.stats
        up, down = stats.data_bytes_received, stats.data_bytes_sent
        until(lambda: system.rounds() > 28, "more rounds")
        up, down = stats.data_bytes_received - up, stats.data_bytes_sent - down
        assert max(up, down) < MASK_NBYTES // 2
    for trainer in trainers:
        trainer.end()
    system.stop()
    (result,) = replay_weights(system.folder)
    assert not result.differences, result.differences
    assert result.merges > 20
    assert result.unknown == 0, result.notes


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_a_model_that_changes_after_the_join_is_reported_in_the_next_step(
    make: Make, what: str
) -> None:
    """The learner then leaves without sending anything of the changed model."""
    system = make()
    system.start()
    net = model()
    learner = system.learner(net, "a")
    learner.step(tokens=TOKENS)
    if what == "parameter":
        net[0].weight = nn.Parameter(torch.ones(16, 4))
    else:
        net[1].running_mean = torch.zeros(3)
    with pytest.raises(ConfigError, match=rf"^{what} '[01]\.\w+' (was|changed)"):
        learner.step(tokens=TOKENS)
    with pytest.raises(ConfigError):
        learner.step(tokens=TOKENS)
    learner.close()
