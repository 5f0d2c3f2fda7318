"""A learner's checkpoint with every kind of content."""

from __future__ import annotations

import torch

from decoupled_diloco.learner.learner_checkpoint import (
    HeldFragment,
    LearnerCheckpoint,
)
from decoupled_diloco.merge import digest
from decoupled_diloco.protocol.messages import Version


def checkpoint(steps: int = 7, run_checkpoint: int | None = None) -> LearnerCheckpoint:
    torch.manual_seed(steps)
    published = [torch.randn(5), torch.randn(3)]
    tied = torch.randn(2, 2)
    return LearnerCheckpoint(
        learner="a",
        run="run-1",
        epoch=2,
        steps=steps,
        tokens=8 * steps,
        discarded_tokens=3,
        global_step=steps + 1,
        fragments=tuple(
            HeldFragment(Version(1, index), digest(tensor), f"seal-{index}", 4, 32, tensor)
            for index, tensor in enumerate(published)
        ),
        model={"embedding": tied, "head": tied, "buffer": torch.tensor(True)},
        state={"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "data": {"batch": steps}},
        run_checkpoint=run_checkpoint,
    )
