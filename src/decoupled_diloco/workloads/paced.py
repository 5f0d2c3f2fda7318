"""The byte-level GPT with a step of a fixed length: `name = "paced"`.

For tests and demonstrations of timing with several learners on few cores: real training of a
model so small that its learners do not disturb each other, slowed down to a known speed.
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
    """`[workload.options]` of "paced": those of "gpt", smaller, and the length of a step."""

    layers: int = Field(default=2, ge=1)
    """Transformer blocks, at least 1."""

    width: int = Field(default=64, ge=2)
    """Size of the residual stream, a multiple of 2 × heads."""

    context: int = Field(default=64, ge=1)
    """Bytes that the model sees at once, at least 1."""

    batch_size: int = Field(default=4, ge=1)
    """Sequences in one learner's batch, at least 1. The defaults train in a few milliseconds."""

    corpus_bytes_max: int | None = Field(default=2_000_000, ge=1)
    """Limit of the training text, bytes; small, so that a learner starts quickly."""

    step_seconds: float | Annotated[tuple[float, ...], Field(strict=False)] = 0.1
    """Seconds from the start of a step to that of the next one, greater than 0: one number, or a
    list with one for each learner, to mix fast and slow ones. A step that takes longer by itself is
    not shortened."""

    @model_validator(mode="after")
    def _check_pace(self) -> PacedOptions:
        seconds = self.step_seconds
        each = seconds if isinstance(seconds, tuple) else (seconds,)
        if not each or any(value <= 0 for value in each):
            raise ConfigError(
                f"step_seconds={seconds!r} in {self.table} is out of range: "
                "it must be greater than 0 for each learner"
            )
        return self


class PacedWorkload(GptWorkload):
    """The built-in workload "paced".

    The waiting happens at the start of `loss`, which a training loop calls once in a step: it
    sleeps until `step_seconds` have passed since it last went on. Whatever else the loop does in a
    step is thus part of the step's length. `evaluate` does not wait.
    """

    name: ClassVar[str] = "paced"
    options: PacedOptions

    def __init__(self, options: PacedOptions) -> None:
        super().__init__(options)
        self._part: int | None = None
        self._started: float | None = None

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[TextBatch]:
        """The endless batches of one learner; from here on its own pace holds."""
        self.take_place(part, parts)
        return super().batches(part, parts, start)

    def take_place(self, index: int, learners: int) -> None:
        """From here on the pace of this learner holds; one that came later has the last one's."""
        seconds = self.options.step_seconds
        if isinstance(seconds, tuple) and len(seconds) != learners:
            raise ConfigError(
                f"step_seconds lists {len(seconds)}, but there are {learners} learners: "
                "give one number for all, or one for each"
            )
        self._part = min(index, learners - 1)

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Wait for the step's time, then compute the mean cross-entropy of the next byte."""
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
