"""Models and optimizers that a learner rejects."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from decoupled_diloco import Learner
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.learner_model import (
    OWN_COPIES,
    layout_text,
    refuse_own_copies,
    refuse_what_is_not_finite,
)
from decoupled_diloco.merge import Layout, TensorSpec


def stepped(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_rejected_before_the_join(value: float) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    refuse_what_is_not_finite(model)
    with torch.no_grad():
        model[1].bias[1] = value
    with pytest.raises(ConfigError, match=r"the model's '1\.bias' has NaN or infinite values"):
        Learner(model, "http://127.0.0.1:9")
    model[1].bias.requires_grad_(False)
    refuse_what_is_not_finite(model)


@pytest.mark.parametrize(
    ("name", "kind"), [("0.weight", "parameter"), ("1.running_mean", "buffer")]
)
def test_a_tensor_without_values_is_rejected_before_the_join(name: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    if kind == "parameter":
        model[0].to("meta")
    else:
        model[1].running_mean = model[1].running_mean.to("meta")
    with pytest.raises(ConfigError, match=f"^{kind} '{name}' is on the meta device: give it mem"):
        Learner(model, "http://127.0.0.1:9")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_optimizers_are_accepted(dtype: torch.dtype) -> None:
    refuse_own_copies(*stepped(dtype))
    model = nn.Linear(4, 3).to(dtype)
    refuse_own_copies(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("key", ["master_param", "master", "fp32_param", "main_param", "p_master"])
def test_a_master_copy_in_the_state_is_rejected_by_its_name(key: str) -> None:
    model, optimizer = stepped(torch.bfloat16)
    optimizer.state[model.weight][key] = torch.zeros(3, 4)
    with pytest.raises(ConfigError, match=f"AdamW keeps 'weight' in fp32 as '{key}': this copy"):
        refuse_own_copies(model, optimizer)


def test_a_master_copy_in_the_state_is_rejected_by_its_values() -> None:
    model, optimizer = stepped(torch.bfloat16)
    optimizer.state[model.weight]["shadow"] = model.weight.detach().float() * (1 + 1e-5)
    with pytest.raises(ConfigError, match="keeps 'weight' in fp32 as 'shadow'"):
        refuse_own_copies(model, optimizer)
    full, optimizer = stepped(torch.float32)
    optimizer.state[full.weight]["shadow"] = full.weight.detach().clone()
    refuse_own_copies(full, optimizer)


@pytest.mark.parametrize("stash", [False, True])
@pytest.mark.parametrize("name", OWN_COPIES)
def test_a_wrapper_with_separate_weights_is_rejected(name: str, stash: bool) -> None:
    model, optimizer = stepped(torch.bfloat16)
    own: Any = SimpleNamespace() if stash else optimizer
    if stash:
        optimizer._amp_stash = own  # type: ignore[attr-defined]
    setattr(own, name, [])
    refuse_own_copies(model, optimizer)
    setattr(own, name, [[torch.zeros(3, 4)]])
    with pytest.raises(ConfigError, match=f"AdamW has '{name}': this copy of the weights"):
        refuse_own_copies(model, optimizer)


def test_a_layout_too_large_for_a_message_is_rejected() -> None:
    spec, rng = TensorSpec("a", (1,), "float32", "matrix"), random.Random(0)
    tensors = tuple(replace(spec, name=rng.randbytes(500).hex()) for _ in range(2000))
    with pytest.raises(ConfigError, match=r"2000 trainable tensors take .* stack small tensors"):
        layout_text(Layout(tensors, ()))
    assert json.loads(layout_text(Layout(tensors[:3], ())))["tensors"]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_an_unsupported_dtype_is_reported_before_any_connection(
    dtype: torch.dtype,
) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.zeros(2, 2).to(dtype))
    with pytest.raises(ConfigError) as error:
        Learner(model, "http://127.0.0.1:1", name="a")
    assert str(error.value) == (
        f"parameter 'weight' has dtype {str(dtype).removeprefix('torch.')}, supported dtypes are "
        "float32, bfloat16, float16, float64: convert or freeze it"
    )
