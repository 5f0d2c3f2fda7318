"""The byte-level GPT with steps of fixed length: `name = "paced"`.

It serves tests and demonstrations of timing with several learners on few cores. The training is
real, but slowed down to a known speed. The model is so small that learners do not slow down each
other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.gpt import GptOptions, GptWorkload, TextBatch


class PacedOptions(GptOptions):
    """`[workload.options]` of "paced": "gpt" with a smaller default size, and a step length."""

    layers: int = Field(default=2, ge=1)
    """Transformer blocks, at least 1."""

    width: int = Field(default=64, ge=2)
    """Size of the residual stream, a multiple of 2 × heads."""

    context: int = Field(default=64, ge=1)
    """Context length in bytes, at least 1."""

    batch_size: int = Field(default=4, ge=1)
    """Sequences in one learner's batch, at least 1. A default step computes a few milliseconds."""

    corpus_bytes_max: int | None = Field(default=2_000_000, ge=1)
    """Limit of the training text in bytes. The default is small, so that a learner starts fast."""

    step_seconds: float | Annotated[tuple[float, ...], Field(strict=False)] = 0.1
    """Seconds from the start of a step to the start of the next one, greater than 0. A list has one
    number per learner, for fast and slow learners in one run. A step that computes longer is not
    shortened."""

    @model_validator(mode="after")
    def _check_pace(self) -> PacedOptions:
        seconds = self.step_seconds
        each = seconds if isinstance(seconds, tuple) else (seconds,)
        if not each or any(value <= 0 for value in each):
            raise ConfigError(
                f"step_seconds={seconds!r} in {self.table} is out of range: "
                "use numbers greater than 0"
            )
        return self


class PacedWorkload(GptWorkload):
    """The built-in workload "paced".

    `loss`, which a training loop calls once per step, first sleeps until `step_seconds` have passed
    since the last sleep ended. So all other work of the loop is a part of the step's length.
    `evaluate` does not sleep.
    """

    name: ClassVar[str] = "paced"
    options: PacedOptions

    def __init__(self, options: PacedOptions) -> None:
        super().__init__(options)
        self._part: int | None = None
        self._started: float | None = None

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[TextBatch]:
        """Return the endless batches of one learner, and set its step length."""
        self.take_place(part, parts)
        return super().batches(part, parts, start)

    def take_place(self, index: int, learners: int) -> None:
        """Set this learner's step length; a learner beyond the list has that of the last one."""
        seconds = self.options.step_seconds
        if isinstance(seconds, tuple) and len(seconds) != learners:
            raise ConfigError(
                f"step_seconds has {len(seconds)} numbers, but there are {learners} learners: "
                "use one number for all, or one per learner"
            )
        self._part = min(index, learners - 1)

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Wait until the step may start, then return the mean cross-entropy of the next byte."""
        self._pace()
        return super().loss(model, batch)

    def _pace(self) -> None:
        if self._started is not None:
            time.sleep(max(0.0, self._started + self._step_seconds() - time.monotonic()))
        self._started = time.monotonic()

    def _step_seconds(self) -> float:
        seconds = self.options.step_seconds
        if isinstance(seconds, tuple):
            return seconds[self._part or 0]
        return seconds
