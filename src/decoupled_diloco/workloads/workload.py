"""What a workload is: the model and the data that a learner process trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Batch: TypeAlias = Any
"""Whatever `Workload.batches` yields and `Workload.loss` takes."""


@runtime_checkable
class InPasses(Protocol):
    """A workload whose data end: each datum is in one batch of each pass over them.

    The built-in workloads are like this. Of any other one, `parts.WorkloadParts` takes so many
    batches of `Workload.batches` for a part.
    """

    def pass_batches(self) -> int:
        """How many batches a pass has, at least 1."""

    def pass_batch(self, turn: int, index: int) -> Batch:
        """Batch number `index` of a pass; depends on nothing but the options and these two.

        Each pass, `turn` 0 and up, is shuffled anew.
        """


@runtime_checkable
class Placed(Protocol):
    """A workload that wants to know which learner it trains in, where the data do not say so."""

    def take_place(self, index: int, learners: int) -> None:
        """Called once, before the first batch, with the learner's number and the run's learners."""


@runtime_checkable
class Workload(Protocol):
    """Model, data, loss and schedule, the same in each process that is built with the same options.

    One's own workload may subclass this: then `schedule`, `sample` and `describe` have defaults.
    """

    def model(self) -> torch.nn.Module:
        """A new model; the same initial weights, bit by bit, in each process on one machine."""

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The inner optimizer of a model, with the peak learning rate."""

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Batch]:
        """The endless batches of one learner, from batch number `start` on.

        Batch i of a part depends on nothing but the options, `part`, `parts` and i, so that a
        restarted learner goes on where it was. Different parts share no data.

        Args:
            part: The learner's part of the data, 0 to parts - 1.
            parts: Number of parts, at least 1.
            start: Number of the first batch, at least 0.
        """

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch, a scalar to call backward on."""

    def tokens(self, batch: Batch) -> int:
        """How much a batch counts for, in tokens (or samples, if the data has no tokens)."""

    def schedule(self, step: int) -> float:
        """The factor on the learning rate at a global step, 0 and up."""
        return 1.0

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Metrics on held-out data, "loss" among them; the same data at each call.

        Others, such as "accuracy", are shown beside it and kept on the event tape; "tokens", if
        given, is how many were evaluated. Leaves the model as it was, its training mode too.
        """

    def sample(self, model: torch.nn.Module, prompt: str = "", length: int = 200) -> str | None:
        """Something that the model says, for people to look at, or None."""
        return None

    def describe(self) -> dict[str, Any]:
        """Facts for the event tape (digest of the data, sizes), as plain JSON values."""
        return {}
