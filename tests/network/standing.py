"""A workload whose loop stalls once: `name = "standing:standing"`."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from decoupled_diloco.workloads.gpt import TextBatch
from decoupled_diloco.workloads.paced import PacedOptions, PacedWorkload


class Standing(PacedWorkload):
    """Learner `learner` sleeps for `seconds` before its step `step`."""

    def __init__(self, options: PacedOptions, learner: int, step: int, seconds: float) -> None:
        super().__init__(options)
        self.learner, self.step, self.seconds = learner, step, seconds
        self.steps = 0

    def take_place(self, index: int, learners: int) -> None:
        super().take_place(index, learners)
        self.place = index

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        self.steps += 1
        if self.place == self.learner and self.steps == self.step:
            time.sleep(self.seconds)
        return super().loss(model, batch)


def standing(options: dict[str, Any]) -> Standing:
    """Create the workload, as `load_workload` calls it."""
    own = {key: options.pop(key) for key in ("learner", "step", "seconds")}
    return Standing(PacedOptions(**options), **own)
