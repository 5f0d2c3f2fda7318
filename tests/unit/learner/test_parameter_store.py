"""A plain module as a parameter store, on every available device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.learner.parameter_store import ModuleStore, Rounded
from decoupled_diloco.merge import Fragment, gather, partition
from fake_side_stream import FakeSideStream, MetaSideStream, OnOneDevice

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    ),
]


class Mixed(nn.Module):
    """A module with two dtypes, a tied pair, a frozen parameter and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.half = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("running", torch.zeros(2), persistent=False)


def beside(store: ModuleStore) -> ModuleStore:
    """Let a store transfer through a side stream, as on a GPU."""
    store._side = FakeSideStream()  # type: ignore[assignment]
    return store


PLACES: dict[str, Callable[[nn.Module], ModuleStore]] = {
    "cpu": ModuleStore,
    "beside": lambda module: beside(ModuleStore(module)),
    "cuda": lambda module: ModuleStore(module.to("cuda")),
}
Place = Callable[[nn.Module], ModuleStore]


@pytest.fixture(params=[*DEVICES, "beside"])
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param]


@pytest.fixture
def store(place: Place) -> ModuleStore:
    torch.manual_seed(0)
    return place(Mixed())


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
        assert held <= {value, 1.0}, "fp32 keeps the value, bf16 rounds it"


def test_combining_subtracts_before_it_adds(store: ModuleStore) -> None:
    """Without progress since the reference, the result is exactly the new values."""
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


def test_combining_with_written_values_subtracts_them_rounded(store: ModuleStore) -> None:
    for fragment in fragments_of(store):
        written = torch.linspace(-1, 1, fragment.numel)
        store.overwrite(fragment, written)
        new = torch.linspace(3, 4, fragment.numel).to(torch.bfloat16).float()
        store.combine(fragment, new, Rounded(fragment, store.layout, written), 1.0)
        assert torch.equal(store.snapshot(fragment).values(), new)


def test_buffers_are_overwritten_when_parameters_are_combined(place: Place) -> None:
    normed = place(nn.BatchNorm1d(3))
    (fragment,) = partition(normed.layout, 1)
    theta = normed.snapshot(fragment)
    new = torch.arange(12.0)  # weight, bias, mean, variance
    for minus, keep in ((theta, 1.0), (None, 0.5)):
        normed.overwrite(fragment, torch.full((12,), 7.0))
        normed.combine(fragment, new, minus, keep)
        assert torch.equal(normed.snapshot(fragment).values()[6:], new[6:])


@pytest.mark.parametrize("mode", ["overwrite", "carry", "rebase", "blend"])
def test_all_transfers_to_the_device_use_the_side_stream(mode: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    store = ModuleStore(module)
    module.to("meta")  # instead of a GPU
    store._tensors[:4] = [*module.parameters()]
    store._device, store._side = torch.device("meta"), MetaSideStream()  # type: ignore[assignment]
    (fragment,) = partition(store.layout, 1)
    old, new = torch.zeros(fragment.numel), torch.ones(fragment.numel)
    with OnOneDevice():
        sent = store.snapshot(fragment)
        match mode:
            case "overwrite":
                store.overwrite(fragment, new)
            case "carry":
                store.combine(fragment, new, sent, 1.0)
            case "rebase":
                store.combine(fragment, new, Rounded(fragment, store.layout, old), 1.0)
            case _:
                store.combine(fragment, new, None, 0.5)
    assert sent.values().device.type == "cpu"


def _replaced(module: nn.Module, how: str) -> None:
    """Give the model's first parameter new memory."""
    weight = next(module.parameters())
    match how:
        case "data":
            weight.data = torch.full_like(weight, 3.0)
        case "columns":
            weight.data = torch.full((4, 4), 3.0).t()
            weight.data[0, 1] = 7.0
        case "dtype":
            weight.data = torch.full((4, 4), 3.0, dtype=torch.bfloat16)


@pytest.mark.parametrize("how", ["data", "columns", "dtype"])
def test_a_parameter_with_new_memory_is_read_and_written_there(how: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    store = ModuleStore(module)
    (fragment,) = partition(store.layout, 1)
    store.overwrite(fragment, torch.zeros(fragment.numel))  # from now on views are kept
    _replaced(module, how)
    module[2].running_mean = torch.full((4,), 5.0)  # type: ignore[union-attr]
    expected = gather(fragment, list(_tensors_now(module, store)))
    assert torch.equal(store.snapshot(fragment).values(), expected)
    assert {3.0, 5.0} <= set(expected.tolist())
    new = torch.arange(fragment.numel, dtype=torch.float32) % 64
    store.overwrite(fragment, new)
    assert torch.equal(gather(fragment, list(_tensors_now(module, store))), new)


def _tensors_now(module: nn.Module, store: ModuleStore) -> Iterator[Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return (named[spec.name] for spec in store.layout.tensors)


def test_autograd_detects_overwritten_weights() -> None:
    """A backward pass over overwritten weights must fail instead of giving wrong gradients."""
    module = nn.Linear(4, 4)
    store = ModuleStore(module)
    (fragment,) = partition(store.layout, 1)
    store.snapshot(fragment)
    loss = (module.weight * module.weight).sum()
    store.overwrite(fragment, torch.zeros(fragment.numel))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
