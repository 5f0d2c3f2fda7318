"""Streaming DiLoCo takes the steps that torchft's regression test records.

Its `diloco_regression_test` trains two parameters with a constant gradient of 2, in two fragments
that are synced every 6 steps. Its fixtures have the parameters before each of 16 steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from decoupled_diloco_lab.study import Study

STEPS, PERIOD, GRADIENT, OUTER_LR = 16, 6, 2.0, 2.0
APPLIED = (3, 0)
"""The step modulo the period at which each fragment's merged value is applied."""


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        for parameter in self.parameters():
            nn.init.ones_(parameter)


def expected(overlap: int, alpha: float) -> list[list[float]]:
    """Return the two parameters before each step, by the rule of Streaming DiLoCo."""
    local, merged, sent = [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]
    found = []
    for step in range(STEPS):
        for p, phase in enumerate(APPLIED):
            if step and step % PERIOD == (phase - overlap) % PERIOD:
                sent[p] = local[p]
            if step and step % PERIOD == phase:
                merged[p] -= OUTER_LR * (merged[p] - sent[p])
                local[p] = alpha * local[p] + (1 - alpha) * merged[p]
        found.append(list(local))
        local = [value - GRADIENT for value in local]
    return found


@pytest.mark.parametrize(
    ("overlap", "alpha", "last"),
    [
        (0, 0.0, [-59.0, -53.0]),
        (0, 0.5, [-40.25, -38.0]),
        (0, 1.0, [-29.0, -29.0]),
        (1, 0.0, [-47.0, -45.0]),
        (1, 0.5, [-35.75, -35.0]),
        (1, 1.0, [-29.0, -29.0]),
    ],
)
def test_the_parameters_are_those_of_torchft(overlap: int, alpha: float, last: list[float]) -> None:
    seen: dict[tuple[int, int], list[float]] = {}

    def batches(learner: int, learners: int, seed: int) -> Iterator[Tensor]:
        step = 0
        while True:
            yield torch.tensor([learner, step])
            step += 1

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        learner, step = batch.tolist()
        seen[learner, step] = [parameter.item() for parameter in model.parameters()]
        return GRADIENT * torch.stack([parameter.sum() for parameter in model.parameters()]).sum()

    study = Study(
        model=Pair,
        batches=batches,
        loss=loss,
        evaluation=lambda: [torch.tensor([9, 0])],
        inner=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        learners=2,
        steps=STEPS,
        seeds=1,
        device="cpu",
    )
    study.run(
        "streaming-diloco",
        sync_every=PERIOD,
        settings={
            "sync.fragments": 2,
            "sync.overlap_steps": overlap,
            "sync.partition": {
                "map": [["first"], ["second"]],
                "phases": [(phase - overlap) % PERIOD for phase in APPLIED],
            },
            "sync.apply.blend_alpha": alpha,
            "sync.codec.uplink": "fp32",
            "sync.codec.downlink": "fp32",
            "outer.optimizer": "sgd",
            "outer.lr": OUTER_LR,
            "outer.momentum": 0.0,
        },
    )
    reference = expected(overlap, alpha)
    assert reference[-1] == last
    for learner in range(2):
        assert [seen[learner, step] for step in range(STEPS)] == reference
