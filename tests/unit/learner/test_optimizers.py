"""The inner optimizers of a learner: wrappers, steps, and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.checkpointer import all_stateful
from decoupled_diloco.learner.learner_model import refuse_own_copies
from decoupled_diloco.learner.loops import StepTokens, attached
from decoupled_diloco.learner.optimizers import InnerOptimizers, layers_of, several, unwrapped
from decoupled_diloco.storage.states import pack, unpack


class Forwards(torch.optim.Optimizer):
    """A wrapper like that of Accelerate: it has no hooks and shares the inner state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Adds:
    """A wrapper that changes the step: its step ends after the inner step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._inner = optimizer
        self.param_groups = optimizer.param_groups
        self.state: dict[Any, Any] = {}
        self.calls: list[str] = []

    def step(self) -> None:
        self.calls.append("begin")
        self._inner.step()
        self.calls.append("end")


class Moments(torch.optim.Optimizer):
    """An optimizer with a given state for each parameter."""

    def __init__(self, parameters: Any, make: Callable[[Tensor], dict[str, Any]]) -> None:
        self.make = make
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if not self.state[each]:
                    self.state[each] |= self.make(each)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def backward(model: nn.Module) -> None:
    sum(p.float().square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as it is read from the disk."""
    tensors, text = pack(state)
    return dict(unpack({name: each.clone() for name, each in tensors.items()}, text))


def flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value
    return [t for v in inside for t in flat(v)] if isinstance(value, dict | list) else []


def test_wrappers_that_only_forward_are_removed() -> None:
    inner = adamw(nn.Linear(2, 2))
    assert unwrapped(Forwards(Forwards(inner))) is inner
    assert InnerOptimizers(Forwards(inner)).all == (inner,)
    adds: Any = Adds(inner)
    assert unwrapped(adds) is adds
    assert layers_of(adds) == [adds, inner]


def test_wrappers_of_accelerate_and_fabric_are_removed() -> None:
    accelerate = pytest.importorskip("accelerate")
    fabric = pytest.importorskip("lightning.fabric")
    model = nn.Linear(2, 2)
    _, optimizer = accelerate.Accelerator(cpu=True).prepare(model, adamw(model))
    assert type(InnerOptimizers(optimizer).all[0]) is torch.optim.AdamW
    assert InnerOptimizers(optimizer).on_step(lambda _: None) is not None
    runs = fabric.Fabric(accelerator="cpu", devices=1)
    _, optimizer = runs.setup(model, adamw(model))
    assert type(InnerOptimizers(optimizer).all[0]) is torch.optim.AdamW


@pytest.mark.parametrize("given", [[], {}, "adam", [None], {"d": 3}])
def test_objects_that_are_not_optimizers_are_rejected(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.* (is empty|without param_groups): pass"):
        InnerOptimizers(given)


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("adam", "optimizer is a str"),
        (3, "optimizer is an int"),
        (["adam"], "optimizer[0] is a str"),
        ({"first": "adam"}, "optimizer['first'] is a str"),
    ],
)
def test_the_object_that_is_no_optimizer_is_named(given: Any, place: str) -> None:
    with pytest.raises(ConfigError) as caught:
        several(given)
    assert str(caught.value).startswith(f"{place} without param_groups: pass the torch.optim")


def test_the_end_of_a_step_is_reported_once_by_the_outermost_optimizer() -> None:
    model = nn.Linear(2, 2)
    adds = Adds(adamw(model))
    own_step = adds.step
    optimizers = InnerOptimizers([adds, adamw(model)])
    seen: list[tuple[int, int]] = []
    end = optimizers.on_step(lambda number: seen.append((number, len(adds.calls))))
    backward(model)
    adds.step()
    assert seen == [(0, 2)]
    optimizers.all[1].step()
    assert seen == [(0, 2), (1, 2)]
    adds._inner.step()  # a loop may step the inner one directly, as for SAM's second step
    assert seen[2:] == [(0, 2)]
    end()
    adds.step()
    assert len(seen) == 3
    assert adds.step == own_step


def test_a_step_that_failed_does_not_hide_the_next_one() -> None:
    model = nn.Linear(2, 2)
    adds = Adds(adamw(model))
    seen: list[int] = []
    InnerOptimizers(adds).on_step(seen.append)

    def fail() -> None:
        raise ValueError("no gradient")

    adds._inner.step = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="no gradient"):
        adds.step()
    del adds._inner.step
    adds.step()
    assert seen == [0]


class Counts:
    _unreported = 0

    def __init__(self) -> None:
        self.steps = 0
        self._counter = StepTokens(None)

    async def _ends_in_order(self, error: BaseException) -> bool:
        raise AssertionError

    def step(self, *, tokens: int | None) -> bool:
        self.steps += 1
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("first", "second"), [(1, 1), (5, 1), (2, 1)])
def test_a_step_of_several_optimizers_is_finished_when_all_have_stepped(
    first: int, second: int
) -> None:
    model = nn.ModuleDict({"d": nn.Linear(2, 2), "g": nn.Linear(2, 2)})
    d, g = adamw(model["d"]), adamw(model["g"])
    learner = Counts()
    with attached(learner, InnerOptimizers({"d": d, "g": g}), lambda: 1):
        for _ in range(4):
            for each, times in ((d, first), (g, second)):
                for _ in range(times):
                    each.step()
    assert learner.steps == 4


@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_state_keeps_its_dtype_over_a_restart(parameters: torch.dtype, state: torch.dtype) -> None:
    def make(parameter: Tensor) -> dict[str, Any]:
        values = torch.randn(parameter.shape, dtype=torch.float64).mul(3).to(state)
        return {
            "moment": values,
            "nested": {"left": [values * 2, (values * 3).flatten()], "count": 3},
            "step": torch.tensor(7.0),
            "seen": torch.tensor(5, dtype=torch.int64),
            "flags": values > 0,
        }

    model = nn.Linear(3, 2).to(parameters)
    optimizer = Moments(model.parameters(), make)
    optimizer.step()
    saved = InnerOptimizers(optimizer).state_dict()
    other = InnerOptimizers(Moments(nn.Linear(3, 2).to(parameters).parameters(), make))
    other.load_state_dict(kept(saved))
    before, after = flat(saved), flat(other.state_dict())
    assert len(before) == len(after)
    for one, two in zip(before, after, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)


def test_state_in_host_memory_stays_there() -> None:
    """An optimizer may offload its moments. The meta device stands for a GPU."""

    def make(parameter: Tensor) -> dict[str, Any]:
        return {"moment": torch.ones(2), "count": torch.tensor(4.0), "here": parameter.detach()}

    def optimizers() -> InnerOptimizers:
        return InnerOptimizers(Moments([nn.Parameter(torch.ones(2, device="meta"))], make))

    one, other = optimizers(), optimizers()
    one.all[0].step()
    other.load_state_dict(one.state_dict())
    (state,) = other.all[0].state.values()
    devices = {key: value.device.type for key, value in state.items()}
    assert devices == {"moment": "cpu", "count": "cpu", "here": "meta"}


def test_several_optimizers_keep_their_states_by_name() -> None:
    model = nn.ModuleDict({"d": nn.Linear(2, 2), "g": nn.Linear(2, 2)})
    named = {"d": adamw(model["d"]), "g": torch.optim.SGD(model["g"].parameters(), 0.1, 0.9)}
    backward(model)
    for each in named.values():
        each.step()
    saved = kept(all_stateful(named, {})["optimizer"].state_dict())
    fresh = {"d": adamw(model["d"]), "g": torch.optim.SGD(model["g"].parameters(), 0.1, 0.9)}
    InnerOptimizers(fresh).load_state_dict(saved)
    for name, each in named.items():
        assert str(fresh[name].state_dict()) == str(each.state_dict())
    with pytest.raises(
        ValueError, match=r"to the optimizers \['d', 'g'\], but this learner has one"
    ):
        InnerOptimizers(fresh["d"]).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"to one optimizer, but this learner has \['d', 'g'\]"):
        InnerOptimizers(fresh).load_state_dict(kept(named["d"].state_dict()))


def groups(*sizes: int) -> InnerOptimizers:
    return InnerOptimizers(
        torch.optim.AdamW(
            [{"params": [nn.Parameter(torch.ones(1)) for _ in range(size)]} for size in sizes]
        )
    )


@pytest.mark.parametrize("own", [(1, 1), (2, 0), (1,), (2, 1)])
def test_a_state_with_other_groups_is_rejected_with_their_sizes(own: tuple[int, ...]) -> None:
    saved = groups(2).state_dict()
    with pytest.raises(ValueError, match=r"has groups of \[2\] parameters, AdamW has .*: add the"):
        groups(*own).load_state_dict(saved)
    groups(2, 0).load_state_dict(groups(2, 0).state_dict())


@pytest.mark.parametrize("swapped", [False, True])
def test_the_state_of_another_class_of_optimizer_is_rejected(swapped: bool) -> None:
    model = nn.Linear(2, 2)
    kinds = [adamw(model), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)]
    backward(model)
    for each in kinds:
        each.step()
    saved, loads = reversed(kinds) if swapped else kinds
    with pytest.raises(ValueError, match=f"another class of optimizer than {type(loads).__name__}"):
        InnerOptimizers(loads).load_state_dict(saved.state_dict())


def test_parameters_of_a_loss_are_rejected_with_a_fix() -> None:
    model, loss = nn.Linear(2, 2), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    with pytest.raises(ConfigError, match=r"a loss with parameters.*nn\.ModuleDict\(\{'model'"):
        refuse_own_copies(model, optimizer)
    refuse_own_copies(nn.ModuleDict({"model": model, "loss": loss}), optimizer)
