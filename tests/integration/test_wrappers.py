"""Wrapper subclasses (quantized weights, 8-bit optimizer states) in a run and after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from decoupled_diloco import Checkpointing
from integration.real_system import System, until
from wrapped import Wrapped

Make = Callable[..., System]


def model(seed: int, *, trainable: bool) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    for each in net[:2]:
        each.weight = nn.Parameter(Wrapped(torch.randn(4, 4)), requires_grad=trainable)
    return net


@pytest.mark.parametrize("trainable", [False, True])
def test_each_wrapper_is_restored_after_a_restart(
    make: Make, tmp_path: Path, trainable: bool
) -> None:
    system = make(run={"max_steps": 400}, sync={"quorum": 1, "fragments": 2})
    system.start()
    net = model(1, trainable=trainable)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for n in (0, 1):
        optimizer.state[net[n].weight]["momentum"] = Wrapped(torch.full((4, 4), float(n)))
    options = {"checkpoint": Checkpointing(tmp_path, interval_seconds=0.0)}
    with system.learner(net, "a", optimizer=optimizer, **options) as learner:
        until(lambda: learner.step(tokens=4) and learner.versions[0] >= "1.3", "three rounds")
    again = model(2, trainable=trainable)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    with system.learner(again, "a", optimizer=optimizer, **options):
        assert optimizer.state[again[1].weight]["momentum"].inner.mean() == 1.0
        assert optimizer.state[again[0].weight]["momentum"].inner.mean() == 0.0
    for n in (0, 1):
        assert torch.equal(net[n].weight.inner, again[n].weight.inner)
