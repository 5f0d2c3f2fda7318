"""A learner reads and writes the moments of its inner optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.exchange import LearnerTensors
from decoupled_diloco.learner.optimizers import InnerOptimizers, Moments
from decoupled_diloco.learner.parameter_store import ModuleStore, MomentStore
from decoupled_diloco.merge import codec, layout_of, make_outer
from decoupled_diloco.merge.layout import named_tensors
from decoupled_diloco.merge.plan import MergePlan, MomentPlan
from decoupled_diloco.protocol.messages import Asking
from decoupled_diloco.workloads.muon import MuonAndAdamW

RUN_STEP = 500


def model_of(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        values = next(model.parameters())
        model(torch.randn(5, 3, dtype=values.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class Side:
    """A learner with one fragment."""

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        names: tuple[str, ...] = ("exp_avg|momentum_buffer", "exp_avg_sq"),
        every: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model_of(dtype)
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.plan = MergePlan.make(
            layout_of(self.model),
            fragments=1,
            strategy="balanced",
            uplink="fp32",
            downlink="fp32",
            method="mean",
            weighting="tokens",
            outer=make_outer("sgd", 1.0),
            moments=MomentPlan(every, codec("fp32"), names),
        )
        moments = Moments(InnerOptimizers(self.optimizer))
        self.store = MomentStore(ModuleStore(self.model), named_tensors(self.model), moments)
        self.tensors = LearnerTensors(self.plan, self.store)
        self.first = self.plan.moments_start(0)

    def moments(self) -> Tensor:
        self.tensors.snapshot(0)
        copy = self.tensors.snapshots[0]
        assert copy is not None
        return copy.values()[self.first :]

    def receive(self, moments: float, mode: str = "overwrite") -> None:
        values = self.store.snapshot(self.plan.fragments[0]).values()
        values[self.first :] = moments
        self.tensors.stage(0, values)
        self.tensors.apply(0, mode)  # type: ignore[arg-type]

    def steps(self) -> set[int]:
        return {int(state["step"]) for state in self.optimizer.state.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_snapshot_has_the_moments_of_all_parameters(dtype: torch.dtype) -> None:
    side = Side(dtype=dtype)
    assert side.moments().isnan().all(), "before the first step there are none"
    train(side.model, side.optimizer, 3)
    states = [side.optimizer.state[p] for p in side.model.parameters()]
    expected = [state[key].float().ravel() for key in ("exp_avg", "exp_avg_sq") for state in states]
    assert torch.equal(side.moments(), torch.cat(expected))


@pytest.mark.parametrize("mode", ["overwrite", "rebase", "carry", "blend"])
def test_each_apply_sets_the_moments(mode: str) -> None:
    side = Side()
    train(side.model, side.optimizer, 3)
    side.receive(0.25)
    train(side.model, side.optimizer)
    side.tensors.snapshot(0)
    side.tensors.capture(0, Asking(1, 1))
    before = side.model[0].weight.detach().clone()  # type: ignore[union-attr]
    side.receive(0.5, mode)
    assert (side.moments() == 0.5).all()
    if mode != "overwrite":
        assert side.model[0].weight.shape == before.shape  # type: ignore[union-attr]
    train(side.model, side.optimizer)
    assert (side.moments() != 0.5).all(), "the optimizer continues from them"


@pytest.mark.parametrize("mode", ["overwrite", "rebase", "carry", "blend"])
def test_moments_that_no_merge_has_changed_are_not_set_back(mode: str) -> None:
    """With every=n, all other versions repeat the moments of an earlier one."""
    side = Side()
    train(side.model, side.optimizer)
    side.receive(0.25)
    train(side.model, side.optimizer)
    side.tensors.snapshot(0)
    side.tensors.capture(0, Asking(1, 1))
    before = side.moments()
    side.receive(0.25, mode)
    assert torch.equal(side.moments(), before)
    side.receive(0.5)
    assert (side.moments() == 0.5).all()


def test_an_unknown_moment_is_not_written() -> None:
    side = Side()
    train(side.model, side.optimizer, 2)
    before = side.moments()
    side.receive(math.nan)
    assert torch.equal(side.moments(), before)


def test_moments_that_arrive_before_the_first_step_take_effect_after_it() -> None:
    """Adam's count of steps follows, or its next steps would be several times too long."""
    side = Side()
    side.receive(0.5)
    train(side.model, side.optimizer)
    assert side.steps() == {1}
    side.tensors.stepped(RUN_STEP)
    assert (side.moments() == 0.5).all()
    assert side.steps() == {RUN_STEP}
    side.receive(0.25)
    train(side.model, side.optimizer)
    side.tensors.stepped(2 * RUN_STEP)
    assert side.steps() == {RUN_STEP + 1}, "only a join changes the count"


def test_a_restored_optimizer_counts_at_least_the_steps_of_the_run() -> None:
    side = Side()
    train(side.model, side.optimizer, 3)
    side.receive(0.5)
    train(side.model, side.optimizer)
    side.tensors.stepped(RUN_STEP)
    assert side.steps() == {RUN_STEP}
    assert (side.moments() != 0.5).any(), "what it has trained since is kept"


def test_the_first_learner_of_a_run_counts_its_own_steps() -> None:
    side = Side()
    side.receive(math.nan)
    train(side.model, side.optimizer)
    side.tensors.stepped(RUN_STEP)
    assert side.steps() == {1}


def test_muon_has_one_moment_where_adam_has_two() -> None:
    def make(parameters: object, lr: float) -> torch.optim.Optimizer:
        own = list(parameters)  # type: ignore[call-overload]
        matrices, others = [p for p in own if p.ndim == 2], [p for p in own if p.ndim < 2]
        return MuonAndAdamW(matrices, [{"params": others}], lr, (0.9, 0.95), 0.1)

    side = Side(make)
    train(side.model, side.optimizer, 2)
    side.tensors.stepped(0)
    found = dict(
        zip(
            [spec.name for spec in side.plan.layout.tensors if spec.is_moment],
            torch.split(side.moments(), [s.numel for s in side.plan.layout.tensors if s.is_moment]),
            strict=True,
        )
    )
    muon = side.optimizer.state[side.model[0].weight]["momentum_buffer"]  # type: ignore[union-attr,index]
    assert torch.equal(found["0.weight@exp_avg|momentum_buffer"], muon.ravel())
    assert found["0.weight@exp_avg_sq"].isnan().all()
    assert found["0.bias@exp_avg_sq"].isfinite().all()


@pytest.mark.parametrize(
    ("make", "names", "message"),
    [
        (torch.optim.SGD, ("exp_avg|momentum_buffer",), r"state of SGD: take \[sync.moments\] out"),
        (torch.optim.AdamW, ("exp_inf",), r"'exp_inf'.*set names=\['exp_avg', 'exp_avg_sq'\]"),
        (torch.optim.Adagrad, ("step",), r"'step'.*of its shape in the state of Adagrad"),
    ],
)
def test_moments_that_no_parameter_has_are_rejected(
    make: Callable[..., torch.optim.Optimizer], names: tuple[str, ...], message: str
) -> None:
    side = Side(make, names)
    train(side.model, side.optimizer)
    with pytest.raises(ConfigError, match=message):
        side.tensors.stepped(0)


def test_a_learner_without_an_optimizer_is_rejected() -> None:
    side = Side()
    with pytest.raises(ConfigError, match="pass optimizer= to Learner"):
        LearnerTensors(side.plan, ModuleStore(side.model))


def test_an_observer_ignores_moments() -> None:
    side, model = Side(), model_of()
    store = MomentStore(ModuleStore(model), named_tensors(model), None)
    tensors = LearnerTensors(side.plan, store)
    values = torch.full((side.plan.fragments[0].numel,), 0.5)
    tensors.stage(0, values)
    tensors.apply(0, "overwrite")
    assert all((p == 0.5).all() for p in model.parameters())


def test_a_contribution_may_leave_its_moments_out() -> None:
    side = Side()
    train(side.model, side.optimizer)
    part = side.plan.fragments[0]
    for moments in (True, False):
        side.tensors.published[0] = torch.zeros(part.numel)
        side.tensors.snapshot(0)
        d = side.tensors.capture(0, Asking(1, 1), moments=moments).change()
        assert d[side.first :].isfinite().all() == moments
        assert d[: side.first].isfinite().all()


def test_moments_that_are_not_contiguous_are_written() -> None:
    side = Side()
    train(side.model, side.optimizer)
    weight = side.model[0].weight  # type: ignore[union-attr]
    state = side.optimizer.state[weight]  # type: ignore[index]
    state["exp_avg"] = state["exp_avg"].t().contiguous().t()
    side.receive(0.5)
    assert (state["exp_avg"] == 0.5).all()
