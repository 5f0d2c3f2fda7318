"""Tokens of a step: counted from the model's inputs, or passed."""

from __future__ import annotations

import logging
from collections import UserDict
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.loops import StepTokens, TokenCounter, whole_tokens

IDS = torch.zeros(4, 64, dtype=torch.int64)


@dataclass
class Batch:
    """A batch as a dataclass."""

    input_ids: Tensor
    name: str = ""


class Agent(nn.Module):
    """A model that is also called through another method than `forward`."""

    def act(self, x: Any) -> Any:
        return x

    def forward(self, *batch: Any, **named: Any) -> Any:
        return batch


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        (0, 0),
        (7, 7),
        (12.0, 12),
        (0.4, 0),
        (np.int64(5), 5),
        (np.float32(5.0), 5),
        (np.array([5]), 5),
        (torch.tensor(0), 0),
        (torch.tensor(5.0), 5),
        (torch.tensor([5]), 5),
        (Fraction(6, 2), 3),
    ],
)
def test_any_number_of_tokens_becomes_a_whole_number(given: Any, tokens: int) -> None:
    found = whole_tokens(given)
    assert (found, type(found)) == (tokens, int)


@pytest.mark.parametrize(
    "given",
    [
        -1,
        -0.6,
        float("nan"),
        float("inf"),
        torch.tensor(float("nan")),
        True,
        np.bool_(True),
        torch.tensor(True),
        None,
        "8",
        torch.tensor([5, 6]),
        np.array([]),
        3j,
    ],
    ids=repr,
)
def test_invalid_numbers_of_tokens_are_rejected(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokens=.* is not a valid number of tokens: pass"):
        whole_tokens(given)


@pytest.mark.parametrize(
    ("call", "tokens"),
    [
        (lambda model: model(IDS), 256),
        (lambda model: model(IDS.to(torch.uint8)), 256),
        (lambda model: model({"input_ids": IDS}), 256),
        (lambda model: model(UserDict(input_ids=IDS)), 256),
        (lambda model: model((IDS, IDS)), 256),
        (lambda model: model([{"text": "x", "ids": IDS}]), 256),
        (lambda model: model(Batch(IDS)), 256),
        (lambda model: model({"input_ids": IDS, "attention_mask": (IDS + 1).tril()}), 10),
        (lambda model: model(input_ids=IDS, attention_mask=IDS), 0),
        (lambda model: model(IDS[:0]), 0),
        (lambda model: model(torch.zeros(4, 3, 8, 8)), 4),
    ],
)
def test_tokens_of_a_call_are_counted_wherever_its_tensors_are(
    call: Any, tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = Agent()
    counter = TokenCounter(model)
    call(model)
    assert counter.take() == tokens
    assert not caplog.records


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.act(IDS),
        lambda model: model("a text"),
        lambda model: model.eval()(IDS),
        lambda model: None,
    ],
)
def test_tokens_that_cannot_be_counted_are_reported_once(
    call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = Agent()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # as in two epochs: the warning must not repeat
            counter = TokenCounter(model)
            call(model)
            assert counter.take() == 1
            counter.close()
    (warning,) = caplog.messages
    assert "each such step counts as 1 token" in warning
    assert "Pass tokens=" in warning


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["stages", "scripted"])
def test_a_model_without_hooks_needs_tokens(kind: str) -> None:
    module = nn.Linear(2, 2)
    tokens = StepTokens([module, module] if kind == "stages" else torch.jit.script(module))
    with pytest.raises(ConfigError, match=r"^step\(\) without tokens=: .*cannot be counted: pass"):
        tokens.read(None)
    assert tokens.read(3) == 3
    tokens.forget()
    tokens.close()


def test_a_count_belongs_to_one_step() -> None:
    model = Agent()
    tokens = StepTokens(model)
    model(IDS)
    tokens.forget()
    model(IDS[:1])
    assert tokens.read(None) == 64
    model(IDS[:2])
    model(IDS[:1])
    assert tokens.read(None) == 192
    tokens.close()
    assert not model._forward_pre_hooks
