"""The interface of a workload: the model and the data that a learner process trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Batch: TypeAlias = Any
"""A batch of any type, as `Workload.batches` yields it and `Workload.loss` accepts it."""


@runtime_checkable
class InPasses(Protocol):
    """A workload with finite data: each datum is in one batch of each epoch.

    The built-in workloads have finite data. For any other workload, `parts.WorkloadPartitions`
    takes a fixed number of batches of `Workload.batches` per partition and epoch.
    """

    def pass_batches(self) -> int:
        """Return the number of batches per epoch, at least 1."""

    def pass_batch(self, turn: int, index: int) -> Batch:
        """Return batch number `index` of epoch `turn`; both count from 0.

        The batch depends only on the options and these arguments. Each epoch is shuffled again.
        """


@runtime_checkable
class Placed(Protocol):
    """A workload that needs the number of its learner, even if its data do not depend on it."""

    def take_place(self, index: int, learners: int) -> None:
        """Receive the learner's number and the number of learners, once, before the first batch."""


class Picture(NamedTuple):
    """A gray picture for the report of a run.

    Attributes:
        caption: What the picture shows, in a few words.
        pixels: Rows from top to bottom, float [H, W], 0 (background) to 1.
    """

    caption: str
    pixels: Tensor


@runtime_checkable
class Pictured(Protocol):
    """A workload whose results can be seen: the report of a run shows its pictures."""

    def pictures(self, model: torch.nn.Module) -> list[Picture]:
        """Return a few pictures of held-out data with the model's results as captions.

        The model does not change; its training mode is restored.
        """


@runtime_checkable
class Workload(Protocol):
    """Model, data, loss and schedule; equal in all processes that have the same options.

    A custom workload may subclass this. Then `schedule`, `sample` and `describe` have defaults.
    """

    def model(self) -> torch.nn.Module:
        """Return a new model, with bitwise equal weights in all processes of a machine."""

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the inner optimizer of a model, with the peak learning rate."""

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Batch]:
        """Return the endless batches of one learner, starting with batch number `start`.

        Batch i depends only on the options, `part`, `parts` and i, so that a restarted learner
        continues at the same batch. Different partitions share no data.

        Args:
            part: The learner's partition of the data, 0 to parts - 1.
            parts: Number of partitions, at least 1.
            start: Number of the first batch, at least 0.
        """

    def loss(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar for `backward`."""

    def tokens(self, batch: Batch) -> int:
        """Return the size of a batch in tokens, or in samples if the data have no tokens."""

    def schedule(self, step: int) -> float:
        """Return the factor on the learning rate at a global step, which counts from 0."""
        return 1.0

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return metrics on held-out data, including "loss"; each call uses the same data.

        Other metrics, such as "accuracy", are shown next to the loss and recorded on the event
        tape. "tokens", if present, is the number of evaluated tokens. The model does not change;
        its training mode is restored.
        """

    def sample(self, model: torch.nn.Module, prompt: str = "", length: int = 200) -> str | None:
        """Return text that the model generates, for people to read; ``None``: it generates none."""
        return None

    def describe(self) -> dict[str, Any]:
        """Return facts for the event tape (digest of the data, sizes), as plain JSON values."""
        return {}
