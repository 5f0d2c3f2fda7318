"""Copies of the weights in optimizers: they are registered and follow, or they are detected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco import register_weight_copies
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner import optimizers
from decoupled_diloco.learner.learner_model import OptimizerChecks, refuse_own_copies
from decoupled_diloco.learner.optimizers import WeightCopies
from decoupled_diloco.learner.parameter_store import FollowedStore, ModuleStore
from decoupled_diloco.merge import partition

Make = Callable[[list[nn.Parameter]], Any]


class Each(torch.optim.SGD):
    """Calls `after` for each parameter after a step of SGD."""

    late = 1

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        super().__init__(parameters, lr=lr)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                if self.steps >= self.late:
                    self.after(each, self.state[each])

    def after(self, parameter: Tensor, state: dict[str, Any]) -> None:
        raise NotImplementedError


class SlowWeights(Each):
    """Lookahead, as implemented in many repositories."""

    def after(self, parameter: Tensor, state: dict[str, Any]) -> None:
        slow = state.setdefault("anchor", parameter.detach().clone())
        if self.steps % 5 == 0:
            parameter.copy_(slow.lerp_(parameter, 0.5))


class LateSlowWeights(SlowWeights):
    late = 7


class HalfPrecisionSlowWeights(Each):
    """Copies in a dict, with another dtype than the parameters."""

    def after(self, parameter: Tensor, state: dict[str, Any]) -> None:
        kept = state.setdefault("ahead", {"slow": parameter.detach().to(torch.bfloat16, copy=True)})
        if self.steps % 3 == 0:
            kept["slow"].lerp_(parameter.to(torch.bfloat16), 0.5)
            parameter.copy_(kept["slow"])


class PrimalAverage(Each):
    """Primal averaging (GPA): the parameters are an average of two sequences in the state."""

    def after(self, parameter: Tensor, state: dict[str, Any]) -> None:
        z = state.setdefault("inner", parameter.detach().clone())
        x = state.setdefault("outer", parameter.detach().clone())
        z.sub_(0.01 * (parameter.grad if parameter.grad is not None else 0))
        x.lerp_(z, 0.1)
        parameter.copy_(0.9 * x + 0.1 * z)


class Listed(Each):
    """Slow weights in an attribute, matched by position."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.anchors = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.optim.SGD.step(self, closure)
        self.steps += 1
        if self.steps % 5 == 0:
            for group, anchors in zip(self.param_groups, self.anchors, strict=True):
                for parameter, anchor in zip(group["params"], anchors, strict=True):
                    parameter.copy_(anchor.lerp_(parameter, 0.5))


class Wraps:
    """A wrapper that is not a torch optimizer, and keeps slow weights in a separate state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups
        self.state: dict[Any, Any] = {}
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        self.count += 1
        for each in (p for group in self.param_groups for p in group["params"]):
            slow = self.state.setdefault(each, {"kept": each.detach().clone()})["kept"]
            if self.count % 4 == 0:
                each.copy_(slow.lerp_(each, 0.5))

    def zero_grad(self) -> None:
        self.inner.zero_grad()


class Averages(Each):
    """An average of the weights that is not used in training."""

    def after(self, parameter: Tensor, state: dict[str, Any]) -> None:
        state.setdefault("ema", parameter.detach().clone()).lerp_(parameter, 0.1)


class InitialWeights(Each):
    """The initial weights, which Prodigy and D-Adaptation keep for the distance."""

    def after(self, parameter: Tensor, state: dict[str, Any]) -> None:
        start = state.setdefault("p0", parameter.detach().clone())
        parameter.sub_(1e-9 * (parameter - start).norm())


class Restored(Each):
    """SAM: a copy between its half steps, which is created again before each use."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in (p for group in self.param_groups for p in group["params"]):
            with torch.no_grad():
                self.state[each]["before"] = each.detach().clone()
                each.add_(each.grad, alpha=1e-3)
                each.copy_(self.state[each]["before"])
        super().step(closure)

    def after(self, parameter: Tensor, state: dict[str, Any]) -> None:
        pass


def trained(model: nn.Module, optimizer: Any, steps: int) -> Iterator[None]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    [SlowWeights, LateSlowWeights, HalfPrecisionSlowWeights, PrimalAverage, Listed,
     lambda p: Wraps(torch.optim.AdamW(p)), lambda p: Wraps(SlowWeights(p))],
)  # fmt: skip
def test_copies_that_undo_an_apply_are_rejected_soon(kind: Make, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8, bias=False)).to(dtype)
    optimizer = kind(list(model.parameters()))
    checks = OptimizerChecks(model, optimizer)

    def train() -> None:
        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(16, 8, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            if checks.due():
                checks.check()

    with pytest.raises(ConfigError, match=r"(keeps separate weights|in fp32)") as error:
        train()
    if dtype is torch.float32:
        assert "dd.register_weight_copies(" in str(error.value)
        assert "parameter '0.weight'" in str(error.value)
        assert "learner.on_weights_updated" in str(error.value)


def adafactor(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)


HARMLESS: list[Make] = [
    lambda p: torch.optim.AdamW(p, weight_decay=0.3),
    lambda p: torch.optim.Adam(p, weight_decay=0.3, amsgrad=True),
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, dampening=0.9),
    torch.optim.ASGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    adafactor,
    lambda p: torch.optim.Muon([each for each in p if each.ndim == 2]),
    Averages,
    InitialWeights,
    Restored,
]


@pytest.mark.parametrize("kind", HARMLESS)
def test_optimizers_without_separate_weights_are_accepted(kind: Make) -> None:
    """This includes gradients that are the weights themselves, and weights that are all equal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    nn.init.zeros_(model[2].bias)  # type: ignore[arg-type]
    optimizer = kind(list(model.parameters()))
    for _ in trained(model, optimizer, 6):
        refuse_own_copies(model, optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        sum(0.5 * p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        refuse_own_copies(model, optimizer)


def test_a_search_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = InitialWeights(model.parameters())
    for _ in trained(model, optimizer, 3):
        pass
    before = [p.detach().clone() for p in model.parameters()], str(optimizer.state_dict())
    seed, steps = torch.random.get_rng_state(), optimizer.steps
    refuse_own_copies(model, optimizer)
    assert all(map(torch.equal, before[0], model.parameters()))
    assert str(optimizer.state_dict()) == before[1]
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert optimizer.steps == steps


def test_checks_are_due_in_few_steps_and_when_a_state_appears() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checks = OptimizerChecks(model, optimizer)
    assert [n for n in range(1, 2001) if checks.due()] == [1, 2, 10, 100, 1000]
    optimizer.state[model.weight]["new"] = torch.zeros(8, 8)
    assert [n for n in range(9) if checks.due()] == [0]


@pytest.fixture
def registry() -> Iterator[None]:
    kept = dict(optimizers._KEYS), dict(optimizers._COPIES)
    yield
    for own, before in zip((optimizers._KEYS, optimizers._COPIES), kept, strict=True):
        own.clear()
        own.update(before)  # type: ignore[arg-type]


def applied(model: nn.Module, optimizer: Any, change: float) -> None:
    """Apply global weights that are larger by ``change``."""
    inner = ModuleStore(model)
    copies = WeightCopies([optimizer])
    store = FollowedStore(inner, dict(model.named_parameters()), copies)
    for fragment in partition(store.layout, 2):
        store.overwrite(fragment, store.snapshot(fragment).values() + change)


def left(kind: Make, steps: int = 24) -> float:
    """Return the share of an apply that is left after some steps with zero gradients."""
    kept = []
    for change in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 8, bias=False)
        optimizer = kind(list(model.parameters()))
        for _ in trained(model, optimizer, steps):
            pass
        refuse_own_copies(model, optimizer)
        before = model.weight.detach().clone()
        if change:
            applied(model, optimizer, 0.1)
        for _ in range(24):
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
        kept.append(model.weight.detach() - before)
    return float((kept[1] - kept[0]).mean() / 0.1)


@pytest.mark.parametrize("key", sorted(optimizers.KEYS_OF_ANY - {"old_p"}))
def test_slow_weights_with_known_names_follow(key: str) -> None:
    class Known(Each):
        def after(self, parameter: Tensor, state: dict[str, Any]) -> None:
            slow = state.setdefault(key, parameter.detach().clone())
            if self.steps % 5 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))

    assert left(Known) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.usefixtures("registry")
def test_registered_copies_follow() -> None:
    register_weight_copies(SlowWeights, "anchor")
    register_weight_copies(PrimalAverage, "inner", "outer")
    register_weight_copies(
        Listed,
        copies=lambda optimizer: (
            pair
            for group, anchors in zip(optimizer.param_groups, optimizer.anchors, strict=True)
            for pair in zip(group["params"], anchors, strict=True)
        ),
    )
    register_weight_copies(Wraps, "kept")
    assert left(SlowWeights) == pytest.approx(1.0, abs=1e-4)
    assert left(PrimalAverage) == pytest.approx(1.0, abs=1e-4)
    assert left(Listed) == pytest.approx(1.0, abs=1e-4)
    assert left(lambda p: Wraps(SlowWeights(p))) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ConfigError, match="pass the state keys of the copies, or copies="):
        register_weight_copies(Listed)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"])
def test_weights_of_schedule_free_follow(name: str) -> None:
    library = pytest.importorskip("schedulefree")

    def make(parameters: list[nn.Parameter]) -> Any:
        optimizer = getattr(library, name)(parameters, lr=1e-3)
        optimizer.train()
        return optimizer

    assert left(make) == pytest.approx(1.0, abs=1e-3)


def test_the_wrapper_of_schedule_free_follows() -> None:
    library = pytest.importorskip("schedulefree")

    def make(parameters: list[nn.Parameter]) -> Any:
        optimizer = library.ScheduleFreeWrapper(torch.optim.SGD(parameters, 1e-3))
        optimizer.train()
        return optimizer

    assert left(make) == pytest.approx(1.0, abs=1e-3)


def test_lookahead_of_timm_follows() -> None:
    pytest.importorskip("torchvision")  # timm imports it
    lookahead = pytest.importorskip("timm.optim").Lookahead
    assert left(lambda p: lookahead(torch.optim.SGD(p, 1e-3))) == pytest.approx(1.0, abs=1e-4)


def test_a_copy_of_higher_precision_follows() -> None:
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    master = model.weight.detach().float() + 1e-4
    optimizer.state[model.weight]["slow_buffer"] = master
    ahead = master - model.weight.float()
    applied(model, optimizer, 0.5)
    assert torch.allclose(master - model.weight.float(), ahead, atol=1e-6)


def test_copies_of_another_learner_are_reset_to_these_weights() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.state[model.weight]["slow_buffer"] = torch.randn(8, 8)
    WeightCopies([optimizer]).reset(model.parameters())
    assert torch.equal(optimizer.state[model.weight]["slow_buffer"], model.weight)
