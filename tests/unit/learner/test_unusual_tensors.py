"""Unusual tensors are synchronized exactly, or rejected by name before the join."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco import Learner
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.parameter_store import ModuleStore
from decoupled_diloco.merge import layout_of, partition
from wrapped import Rounding, Wrapped


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


PARAMETERS: dict[str, Callable[[], Tensor]] = {
    "0-d": lambda: torch.tensor(1.0),
    "channels last": lambda: torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 6).t(),
    "sliced": lambda: torch.randn(8, 8)[2:5, 1:7],
    "one row expanded": lambda: torch.randn(1, 4).expand(1, 4),
    "strided window": lambda: torch.randn(12)[::3],
    "wrapper": lambda: Wrapped(torch.randn(4, 6)),
    "wrapper, transposed": lambda: Wrapped(torch.randn(4, 6).t()),
}
BUFFERS: dict[str, Callable[[], Tensor]] = {
    "0-d": lambda: torch.tensor(2.0),
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "inference": inference,
}


def made(**tensors: Tensor) -> nn.Module:
    model = nn.Linear(3, 3)
    for name, tensor in tensors.items():
        if name == "buffer":
            model.register_buffer(name, tensor)
        else:
            setattr(model, name, nn.Parameter(tensor))
    return model


@pytest.mark.parametrize(
    ("name", "form"),
    [("x", form) for form in PARAMETERS] + [("buffer", form) for form in BUFFERS],
)
def test_values_are_read_and_written_exactly(name: str, form: str) -> None:
    model = made(**{name: (PARAMETERS if name == "x" else BUFFERS)[form]()})
    store = ModuleStore(model)
    for fragment in partition(store.layout, 3):
        values = torch.randn(fragment.numel)
        store.overwrite(fragment, values)
        assert torch.equal(store.snapshot(fragment).values(), values)
        store.combine(fragment, values + 1, None, 0.0)
        assert torch.equal(store.snapshot(fragment).values(), values + 1)


def test_a_tied_expanded_buffer_stays_tied() -> None:
    model = nn.ModuleDict({"a": made(), "b": made()})
    tied = torch.zeros(1).expand(4)
    model["a"].register_buffer("table", tied)
    model["b"].register_buffer("table", tied)
    store = ModuleStore(model)
    assert model["a"].table is model["b"].table
    assert [spec.aliases for spec in store.layout.tensors][-1] == ("b.table",)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (lambda: torch.randn(4, 1).expand(4, 6), "has several elements in one place of memory"),
        (lambda: torch.zeros(9).as_strided((3, 3), (2, 1)), "has several elements in one place"),
        (lambda: torch.eye(3).to_sparse(), "has layout torch.sparse_coo: make it dense"),
        (lambda: Rounding(torch.ones(3)), "is a Rounding, a tensor subclass that does not keep"),
        (inference, "was created in inference mode"),
    ],
)
def test_a_tensor_that_cannot_keep_its_values_is_rejected_by_name(
    tensor: Callable[[], Tensor], problem: str
) -> None:
    with torch.inference_mode(tensor is inference):
        model = made(x=tensor())
    with pytest.raises(ConfigError, match=f"^trainable parameter '(x|weight)' {problem}"):
        Learner(model, "http://127.0.0.1:9")


@pytest.mark.parametrize("form", [Wrapped, Rounding])
def test_a_frozen_wrapper_is_left_out(form: type[Wrapped]) -> None:
    model = nn.Sequential(made(), made())
    for each in model:
        each.weight = nn.Parameter(form(torch.randn(3, 3)), requires_grad=False)
    store = ModuleStore(model)
    assert [spec.name for spec in store.layout.tensors] == ["0.bias", "1.bias"]
    assert set(store.layout.excluded) == {"0.weight", "1.weight"}


def test_wrappers_are_tied_by_what_is_inside() -> None:
    inner = torch.randn(3, 3)
    model = nn.ModuleDict({name: made() for name in "abc"})
    model["a"].weight = nn.Parameter(Wrapped(inner))
    model["b"].weight = nn.Parameter(Wrapped(inner))
    model["c"].weight = nn.Parameter(Wrapped(inner.clone()))
    aliases = {spec.name: spec.aliases for spec in layout_of(model).tensors}
    assert aliases["a.weight"] == ("b.weight",)
    assert aliases["c.weight"] == ()


@pytest.mark.parametrize(
    ("lazy", "what"),
    [
        (lambda: nn.LazyLinear(4), "parameter '0.weight'"),
        (lambda: nn.LazyBatchNorm1d(), "parameter '0.weight'"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "buffer '0.running_mean'"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_module_is_rejected_before_its_first_batch(
    lazy: Callable[[], nn.Module], what: str
) -> None:
    model = nn.Sequential(lazy(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=f"^{what} of a lazy module has no shape yet: run the"):
        Learner(model, "http://127.0.0.1:9")
