"""The Python work of a step does not grow with the number of a model's tensors."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.learner_model import SLICE, ModelGuard
from decoupled_diloco.learner.optimizers import WeightCopies
from decoupled_diloco.learner.parameter_store import FollowedStore, ModuleStore
from decoupled_diloco.merge import Fragment, layout_of, parameters_numel, partition, segments
from decoupled_diloco.merge.fragments import dtype_runs

FEW, MANY = 40, 4_000


def experts(count: int) -> nn.Module:
    return nn.ParameterDict(
        {f"e{i}": nn.Parameter(torch.full((2, 2), i + 0.5)) for i in range(count)}
    )


class Norms(nn.Module):
    """A module with a buffer for each parameter."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(2) for _ in range(count))


def calls_in(work: Callable[[], object]) -> int:
    """Count the calls that Python's interpreter makes, without calls from loops in C."""
    counted: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        counted[event] += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # a collection would call finalizers of objects from other tests
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted.total()


def works_of(store: ModuleStore, fragment: Fragment) -> dict[str, Callable[[], object]]:
    values = store.snapshot(fragment).values()
    return {
        "snapshot": lambda: store.snapshot(fragment),
        "overwrite": lambda: store.overwrite(fragment, values),
        "blend": lambda: store.combine(fragment, values, None, 0.5),
    }


@pytest.mark.parametrize("work", ["snapshot", "overwrite"])
def test_a_fragment_of_thousands_of_tensors_takes_no_more_calls(work: str) -> None:
    calls = []
    for count in (FEW, MANY):
        store = ModuleStore(experts(count))
        (fragment,) = partition(store.layout, 1)
        calls.append(calls_in(works_of(store, fragment)[work]))
    assert calls[0] == calls[1] < FEW


@pytest.mark.parametrize("make", [experts, Norms])
def test_a_fragment_takes_no_more_calls_in_a_larger_model(
    make: Callable[[int], nn.Module],
) -> None:
    """The fragment has the same number of tensors, including buffers."""
    calls = []
    for count in (FEW, 10 * FEW):
        store = ModuleStore(make(count))
        fragment = partition(store.layout, count // FEW)[0]
        calls.append([calls_in(work) for work in works_of(store, fragment).values()])
    few, many = calls
    assert all(b <= 1.5 * a for a, b in zip(few, many, strict=True)), calls


def test_values_derived_from_the_layout_are_computed_once() -> None:
    layout = layout_of(experts(MANY))
    (fragment,) = partition(layout, 1)
    for each in (dtype_runs, parameters_numel, lambda f, to: segments(f, to, "rda")):
        found = each(fragment, layout)
        assert calls_in(lambda each=each: each(fragment, layout)) < FEW
        assert each(fragment, layout) == found
    halves = layout_of(experts(MANY).bfloat16())
    assert dtype_runs(fragment, halves) != dtype_runs(fragment, layout)


def test_missing_copies_in_an_optimizer_take_one_lookup_per_tensor() -> None:
    model = experts(MANY)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    torch.stack(list(model.parameters())).sum().backward()
    optimizer.step()
    plain = ModuleStore(model)
    store = FollowedStore(plain, dict(model.named_parameters()), WeightCopies([optimizer]))
    (fragment,) = partition(store.layout, 1)
    values = store.snapshot(fragment).values()
    without = calls_in(lambda: plain.overwrite(fragment, values))
    # Each lookup in the optimizer's state calls the tensor's hash.
    assert calls_in(lambda: store.overwrite(fragment, values)) - without <= 3 * MANY


def all_checked(guard: ModelGuard) -> None:
    for _ in guard._slices:
        guard.check()


def test_the_guard_compares_a_slice_of_a_module_with_thousands_of_parameters() -> None:
    model = experts(4 * SLICE)
    guard = ModelGuard(model, layout_of(model))
    assert len(guard._slices) >= 4
    assert max(len(each.held) for each in guard._slices) <= SLICE
    model["e3"] = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"'e3' was replaced"):
        all_checked(guard)


def test_the_guard_detects_a_parameter_added_to_a_module_without_any() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    guard = ModelGuard(model, layout_of(model))
    model[1].register_parameter("slope", nn.Parameter(torch.ones(1)))
    with pytest.raises(ConfigError, match=r"'1\.slope' was added"):
        all_checked(guard)


def test_whole_and_partial_tensors_are_restored_from_one_vector() -> None:
    """This includes another dtype, and strides in another order."""
    torch.manual_seed(0)
    model = nn.Module()
    model.table = nn.Embedding(50, 3)
    model.rounded = nn.Parameter(torch.randn(4, 5, dtype=torch.bfloat16))
    model.turned = nn.Parameter(torch.randn(6, 4).t())
    store = ModuleStore(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    fragments = partition(store.layout, 3)
    assert any(piece.numel < 150 for part in fragments for piece in part.pieces)
    values = [store.snapshot(part).values() for part in fragments]
    expected = sorted(torch.cat([each.detach().float().reshape(-1) for each in before]).tolist())
    assert sorted(torch.cat(values).tolist()) == expected
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for part, flat in zip(fragments, values, strict=True):
        store.overwrite(part, flat)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
