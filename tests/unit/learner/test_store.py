"""A plain module as a parameter store, on every device that is here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decoupled_diloco.learner.store import ModuleStore
from decoupled_diloco.merge import Fragment, partition

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


class Mixed(nn.Module):
    """Two dtypes, a tied pair, a frozen parameter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.half = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("running", torch.zeros(2), persistent=False)


@pytest.fixture(params=DEVICES)
def store(request: pytest.FixtureRequest) -> ModuleStore:
    torch.manual_seed(0)
    return ModuleStore(Mixed().to(request.param))


def fragments_of(store: ModuleStore) -> tuple[Fragment, ...]:
    return partition(store.layout, 2)


def test_frozen_parameters_and_buffers_are_listed_not_stored(store: ModuleStore) -> None:
    names = [spec.name for spec in store.layout.tensors]
    assert names == ["first.weight", "first.bias", "half.weight"]
    assert set(store.layout.excluded) == {"frozen", "running"}


def test_a_snapshot_does_not_change_with_the_parameters(store: ModuleStore) -> None:
    for fragment in fragments_of(store):
        before = store.snapshot(fragment).values()
        copy = store.snapshot(fragment)
        store.overwrite(fragment, torch.zeros(fragment.numel))
        assert torch.equal(copy.values(), before)
        assert copy.values().device.type == "cpu"
        assert not store.snapshot(fragment).values().any()


def test_overwriting_rounds_to_each_tensor_s_dtype(store: ModuleStore) -> None:
    value = 1.0 + 2.0**-12
    for fragment in fragments_of(store):
        store.overwrite(fragment, torch.full((fragment.numel,), value))
        held = set(store.snapshot(fragment).values().tolist())
        assert held <= {value, 1.0}, "fp32 keeps it, bf16 rounds it"


def test_combining_subtracts_before_it_adds(store: ModuleStore) -> None:
    """No progress since the reference gives exactly the new values."""
    for fragment in fragments_of(store):
        theta = store.snapshot(fragment)
        new = torch.linspace(-1, 1, fragment.numel).to(torch.bfloat16).float()
        store.combine(fragment, new, theta, 1.0)
        assert torch.equal(store.snapshot(fragment).values(), new)


def test_combining_without_a_reference_blends(store: ModuleStore) -> None:
    for fragment in fragments_of(store):
        store.overwrite(fragment, torch.full((fragment.numel,), 2.0))
        store.combine(fragment, torch.full((fragment.numel,), 4.0), None, 0.25)
        assert torch.equal(store.snapshot(fragment).values(), torch.full((fragment.numel,), 3.5))
