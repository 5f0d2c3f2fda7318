"""Optimizers with separate weights, several optimizers, and weights that are not progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco import Learner
from integration.real_system import System, equal, parameters, patient


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(
        tmp_path / "run",
        run={"max_steps": 4000, "learners": 1},
        sync={"quorum": 1, "fragments": 1, "sync_every": 4},
    )
    system.start()
    yield system
    system.close()


class SlowWeights(torch.optim.SGD):
    """Lookahead with its slow weights under a known name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for each in (p for group in self.param_groups for p in group["params"]):
            state = self.state[each]
            slow = state.setdefault("slow_param", each.detach().clone())
            state["k"] = state.get("k", 0) + 1
            if state["k"] % 5 == 0:
                each.copy_(slow.lerp_(each, 0.5))


def schedule_free(parameters: list[nn.Parameter]) -> Any:
    library = pytest.importorskip("schedulefree")
    optimizer = library.AdamWScheduleFree(parameters, lr=0.01)
    optimizer.train()
    return optimizer


def step(model: nn.Module, optimizer: Any, scale: float = 1.0) -> None:
    optimizer.zero_grad()
    (scale * model(torch.randn(16, 6)).square().mean()).backward()
    optimizer.step()


@pytest.mark.parametrize("make", [lambda p: SlowWeights(p, lr=0.01), schedule_free])
def test_the_next_steps_continue_from_the_global_weights(
    system: System, make: Callable[[list[nn.Parameter]], Any]
) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    with system.learner(first, "a"):
        optimizer = make(list(second.parameters()))
        for _ in range(8):
            step(second, optimizer)
        with system.learner(second, "b", optimizer=optimizer):
            assert equal(parameters(first), parameters(second))
            for _ in range(20):  # without a gradient only the slow weights could change it
                optimizer.zero_grad(set_to_none=False)
                optimizer.step()
    for name, own in parameters(second).items():
        # The lead of the fast weights over the slow ones is kept, like momentum.
        assert (own - parameters(first)[name]).abs().max() < 0.05


def test_several_optimizers_are_restored_after_a_restart(system: System, tmp_path: Path) -> None:
    def incarnation(steps: int) -> tuple[dict[str, Any], int]:
        model = nn.ModuleDict({"d": nn.Linear(6, 6), "g": nn.Linear(6, 6)})
        named = {
            "d": torch.optim.AdamW(model["d"].parameters(), 0.01),
            "g": torch.optim.SGD(model["g"].parameters(), 0.01, momentum=0.9),
        }
        learner = system.learner(model, "a", optimizer=named, checkpoint=tmp_path / "kept")
        before = learner.steps
        with learner:
            for _ in learner.wrap(range(steps), tokens=lambda _: 4):
                for name, optimizer in named.items():
                    step(model[name], optimizer)
            assert learner.steps == before + steps
            return {name: flat(each.state_dict()) for name, each in named.items()}, before

    ended, _ = incarnation(5)
    began, steps = incarnation(0)
    assert steps == 5
    for name, tensors in ended.items():
        assert all(map(torch.equal, tensors, began[name]))
        assert len(tensors) == len(began[name])


def flat(state: dict[str, Any]) -> list[Tensor]:
    return [value for kept in state["state"].values() for value in kept.values()]


def loaded(model: nn.Module, old: dict[str, Tensor]) -> None:
    model.load_state_dict(old)


def loaded_through_data(model: nn.Module, old: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(old[name])


def put_in_place(model: nn.Module, old: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = old[name].clone()


@pytest.mark.parametrize("load", [loaded, loaded_through_data, put_in_place])
@pytest.mark.parametrize("known", [True, False])
def test_weights_that_replace_the_trained_ones_are_not_submitted(
    system: System,
    tmp_path: Path,
    load: Callable[[nn.Module, dict[str, Tensor]], None],
    known: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    learner, model = trained(
        system, known, checkpoint=tmp_path / "kept", timeouts=patient(flush=30.0)
    )
    old = {name: torch.full_like(each, 9.0) for name, each in parameters(model).items()}
    load(model, old)
    learner.close()
    assert "were replaced after its last step, so they are not submitted" in caplog.text
    assert equal(parameters(model), old)
    other = nn.Linear(6, 6)
    with system.observer(other):
        assert all(each.abs().max() < 5 for each in other.parameters())
    again = nn.Linear(6, 6)
    with system.learner(again, "a", checkpoint=tmp_path / "kept", **options_of(again, known)):
        assert all(each.abs().max() < 5 for each in again.parameters())


def options_of(model: nn.Module, known: bool) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD(model.parameters(), 0.01)} if known else {}


def trained(system: System, known: bool, **options: Any) -> tuple[Learner, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    given = options_of(model, known)
    learner = system.learner(model, "a", **given, **options)
    optimizer = given.get("optimizer") or torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        step(model, optimizer)
        learner.step(tokens=4)
    return learner, model


@pytest.mark.parametrize("known", [True, False])
def test_an_optimizer_step_is_not_a_replacement_of_weights(
    system: System, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    given = {"optimizer": optimizer} if known else {}
    with system.learner(model, "a", timeouts=patient(flush=30.0), **given) as learner:
        for _ in range(3):
            step(model, optimizer)
            learner.step(tokens=4)
        step(model, optimizer)  # the loop ends before its learner.step
    assert "were replaced" not in caplog.text


def test_restored_weights_are_submitted(system: System, caplog: pytest.LogCaptureFixture) -> None:
    learner, model = trained(system, known=True, timeouts=patient(flush=30.0))
    own = parameters(model)
    loaded(model, {name: torch.zeros_like(each) for name, each in own.items()})
    loaded(model, own)
    learner.close()
    assert "were replaced" not in caplog.text


def test_evaluation_mode_of_schedule_free_is_not_a_replacement(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    optimizer = schedule_free(list(model.parameters()))
    with system.learner(model, "a", optimizer=optimizer, timeouts=patient(flush=30.0)) as learner:
        for _ in range(7):
            step(model, optimizer)
            learner.step(tokens=4)
        optimizer.eval()
        shown = parameters(model)
    assert "were replaced" not in caplog.text
    assert optimizer.param_groups[0]["train_mode"] is False
    assert shown.keys() == parameters(model).keys()


def test_a_late_copy_is_rejected_by_the_learner(system: System) -> None:
    class Late(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step(closure)
            for each in (p for group in self.param_groups for p in group["params"]):
                state = self.state[each]
                state["k"] = state.get("k", 0) + 1
                if state["k"] >= 6:
                    anchor = state.setdefault("anchor", each.detach().clone())
                    each.copy_(anchor.lerp_(each, 0.5))

    model = nn.Linear(6, 6)
    optimizer = Late(model.parameters(), lr=0.01)
    learner = system.learner(model, "a", optimizer=optimizer)
    try:
        for _ in range(5):
            step(model, optimizer)
            learner.step(tokens=4)
        step(model, optimizer)
        with pytest.raises(Exception, match="keeps separate weights in its state 'anchor'"):
            learner.step(tokens=4)
    finally:
        learner.close()
