"""A step's loss is read without waiting for a device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from decoupled_diloco import Learner
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.learner.reports import StepLosses


@pytest.mark.parametrize(
    ("given", "loss"),
    [
        (None, None),
        (2.5, 2.5),
        (2, 2.0),
        (np.float32(2.5), 2.5),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([[2.5]], dtype=torch.bfloat16), 2.5),
        (torch.tensor(2.5, requires_grad=True), 2.5),
        (float("inf"), float("inf")),
    ],
)
def test_any_number_is_a_loss(given: Any, loss: float | None) -> None:
    assert StepLosses().read(given) == loss


def test_a_loss_may_be_nan() -> None:
    found = StepLosses().read(torch.tensor(float("nan")))
    assert found is not None
    assert math.isnan(found)


@pytest.mark.parametrize("given", ["2.5", torch.zeros(3), 3j, object(), torch.zeros(0)])
def test_invalid_losses_are_rejected(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"loss.* (is not a number|elements): pass"):
        StepLosses().read(given)


class Joined(Learner):
    """A learner that does not join in its constructor."""

    def _enter(self) -> None:
        pass


@pytest.mark.parametrize("given", [4096, 0, np.int64(8)])
def test_a_whole_number_is_not_taken_for_a_loss(given: Any) -> None:
    """It is more likely a number of tokens, which was once the first argument."""
    learner = Joined(torch.nn.Linear(2, 2), "http://127.0.0.1:9")
    with pytest.raises(ConfigError) as caught:
        learner.step(given)
    assert str(caught.value) == (
        f"step({given}): pass the number of tokens as tokens={given}; loss is a float or a tensor"
    )


class Copying:
    """An event of a device that finishes its copies when the test requests it."""

    done = False

    def __init__(self, device: object) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return Copying.done


def test_a_loss_on_a_device_is_reported_when_its_copy_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "Event", Copying)
    losses = StepLosses()
    assert losses._later(torch.tensor(1.0)) is None
    assert losses._later(torch.tensor(2.0)) is None, (
        "the first copy is in progress, and `read` does not wait"
    )
    monkeypatch.setattr(Copying, "done", True)
    assert losses._later(torch.tensor(3.0)) == 1.0
    assert losses._later(torch.tensor(4.0)) == 3.0
