"""A model that changes after the join is reported by name in the next step."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.learner_model import SLICE, ModelGuard
from decoupled_diloco.merge import layout_of


class Tied(nn.Module):
    """A model with a tied head, a frozen layer and a synchronized buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(6))


def guarded(**options: bool) -> tuple[Tied, ModelGuard]:
    model = Tied()
    guard = ModelGuard(model, layout_of(model), **options)
    guard.check()
    return model, guard


def renewed(model: Tied) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def parametrized(model: Tied) -> None:
    nn.utils.parametrizations.weight_norm(model.hidden)


CHANGES: dict[str, tuple[Callable[[Tied], object], str]] = {
    "assigned": (renewed, "was replaced"),
    "new parameter": (
        lambda m: setattr(m.hidden, "weight", nn.Parameter(torch.ones(4, 4))),
        "'hidden.weight' was replaced by another tensor",
    ),
    "new module": (
        lambda m: setattr(m, "hidden", nn.Linear(4, 4)),
        "'hidden.weight' was replaced by another tensor",
    ),
    "untied": (
        lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
        "'head.weight' was replaced or untied from 'embedding.weight'",
    ),
    "tied": (
        lambda m: setattr(m.hidden, "weight", m.frozen.weight),
        "'hidden.weight' was replaced by another tensor",
    ),
    "deleted": (lambda m: delattr(m.hidden, "bias"), "'hidden.bias' was removed"),
    "became None": (lambda m: setattr(m.hidden, "bias", None), "'hidden.bias' was removed"),
    "added": (
        lambda m: m.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "'scale' was added",
    ),
    "added module": (lambda m: m.add_module("more", nn.Linear(2, 2)), r"'more\.\w+' was added"),
    "parametrized": (parametrized, "'hidden.weight' was removed"),
    "cast": (lambda m: m.to(torch.bfloat16), "was cast from torch.float32 to torch.bfloat16"),
    "one cast": (
        lambda m: m.hidden.double(),
        "'hidden.weight' was cast from torch.float32 to torch.float64",
    ),
    "moved": (lambda m: m.hidden.to("meta"), "'hidden.weight' was (moved|replaced)"),
    "unfrozen": (
        lambda m: m.frozen.requires_grad_(True),
        "'frozen.weight' was unfrozen after the learner joined and is not synchronized",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_parameter_is_reported_by_name(change: str) -> None:
    model, guard = guarded()
    act, problem = CHANGES[change]
    act(model)
    with pytest.raises(ConfigError, match=f"^parameter .*{problem}.*create a new one$"):
        guard.check()


BUFFER_CHANGES: dict[str, tuple[Callable[[Tied], object], str]] = {
    "longer": (lambda m: setattr(m, "seen", torch.zeros(9)), r"from .*\(6,\).* to .*\(9,\)"),
    "None": (lambda m: setattr(m, "seen", None), "became None"),
    "deleted": (lambda m: delattr(m, "seen"), "was removed"),
    "half": (lambda m: setattr(m, "seen", m.seen.half()), "to torch.float16"),
    "whole": (lambda m: setattr(m, "seen", m.seen.long()), "to torch.int64"),
    "resized": (lambda m: m.seen.resize_(3), r"to .*\(3,\)"),
}


@pytest.mark.parametrize("change", BUFFER_CHANGES)
def test_a_buffer_of_another_form_is_reported_by_name(change: str) -> None:
    model, guard = guarded()
    act, problem = BUFFER_CHANGES[change]
    act(model)
    guard.compares_buffers = False  # sync.merge.buffers = "local"
    guard.check()
    guard.compares_buffers = True
    with pytest.raises(ConfigError, match=f"^buffer 'seen' .*{problem}"):
        guard.check()


def test_a_buffer_may_be_replaced_by_one_of_the_same_form() -> None:
    model, guard = guarded()
    model.seen = torch.ones(6)
    guard.check()
    model.seen = torch.zeros(1).expand(6)
    guard.check()
    model.seen.copy_(torch.arange(6.0))
    assert model.seen.tolist() == [0, 1, 2, 3, 4, 5], "each element has memory"
    with torch.inference_mode():
        model.seen = torch.zeros(6)
    guard.check()
    model.seen.add_(1)


def test_several_ranks_write_to_the_buffer_of_the_join() -> None:
    model, guard = guarded(buffers_in_place=True)
    model.seen.add_(1)
    guard.check()
    model.seen = torch.ones(6)
    with pytest.raises(ConfigError, match=r"^buffer 'seen' was replaced by another tensor"):
        guard.check()


def test_a_parameter_that_is_frozen_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Training loops of adversarial networks alternately freeze and unfreeze."""
    model, guard = guarded()
    with caplog.at_level(logging.WARNING):
        for trains in (False, True, False):
            model.hidden.requires_grad_(trains)
            guard.check()
    assert [record.args for record in caplog.records] == [("hidden.weight",), ("hidden.bias",)]


def test_ordinary_training_is_not_reported() -> None:
    model, guard = guarded()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model.head(model.hidden(model.embedding(torch.arange(5)))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        guard.check()
    model.load_state_dict(model.state_dict())
    model.float()
    model.hidden.weight.data = model.hidden.weight.data.clone()
    guard.check()


def test_each_step_compares_a_slice_of_a_large_model() -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(2 * SLICE)))
    guard = ModelGuard(model, layout_of(model))
    model[-1].weight = nn.Parameter(torch.ones(1, 1))
    assert len(guard._slices) > 2
    for _ in guard._slices[:-1]:
        guard.check()
    with pytest.raises(ConfigError, match=rf"'{2 * SLICE - 1}\.weight' was replaced"):
        guard.check()


def test_a_difference_that_settles_is_not_reported() -> None:
    """After an evaluation, the root module of FSDP2 holds other parameters."""
    model = Tied()
    own, other = model.hidden.weight, nn.Parameter(torch.ones(4, 4))
    guard = ModelGuard(model, layout_of(model), settle=lambda: setattr(model.hidden, "weight", own))
    model.hidden.weight = other
    guard.check()
    assert model.hidden.weight is own
