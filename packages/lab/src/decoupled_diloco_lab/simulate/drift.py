"""A nearly free workload whose parameters drift, for runs whose loss does not matter."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decoupled_diloco.workloads import Batch, Workload

POISON = 1e6


class Vectors(nn.Module):
    """A model with one vector per fragment."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(
            [nn.Parameter(torch.zeros(size, dtype=torch.float32, device="cpu")) for size in sizes]
        )


class Stage(nn.Module):
    """The consecutive vectors of a model that belong to one rank."""

    def __init__(self, whole: Vectors, rank: int, ranks: int) -> None:
        super().__init__()
        count = len(whole.vectors)
        own = range(count * rank // ranks, count * (rank + 1) // ranks)
        self.vectors = nn.ParameterDict({str(n): whole.vectors[n] for n in own})


class Drift(Workload):
    """A workload in which each batch moves all parameters a little, by an amount from its number.

    Args:
        sizes: Elements of each fragment.
        tokens: Tokens per batch.
        pass_batches: Batches per epoch.
        on_drawn: Called with the epoch and the number of each batch that is taken.

    Attributes:
        poisoned: Returns whether the next step must go a million times too far. The step after it
            takes that back.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        tokens: int = 1,
        pass_batches: int = 64,
        on_drawn: Callable[[int, int], None] = lambda turn, index: None,
    ) -> None:
        self._sizes = tuple(sizes)
        self._tokens = tokens
        self._pass_batches = pass_batches
        self._on_drawn = on_drawn
        self.poisoned: Callable[[], bool] = lambda: False
        self._excess = 0.0

    def model(self) -> Vectors:
        """See `Workload`."""
        return Vectors(self._sizes)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """See `Workload`."""
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=True)

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Batch]:
        """See `Workload`."""
        return (number * parts + part for number in itertools.count(start))

    def pass_batches(self) -> int:
        """See `InPasses`."""
        return self._pass_batches

    def pass_batch(self, turn: int, index: int) -> Batch:
        """See `InPasses`."""
        self._on_drawn(turn, index)
        return turn * self._pass_batches + index

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return a loss whose gradient is equal for all elements: −0.5 to 0.5 by batch number."""
        slope = (batch * 0.618034) % 1.0 - 0.5 - self._excess
        self._excess = 0.0
        if self.poisoned():
            self._excess = POISON
            slope += POISON
        return _Sloping.apply(slope, *model.parameters())  # type: ignore[no-untyped-call, no-any-return]

    def tokens(self, batch: Batch) -> int:
        """See `Workload`."""
        return self._tokens

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """See `Workload`."""
        return {"loss": 0.0}


class _Sloping(torch.autograd.Function):
    """A loss of zero with a constant gradient, ten times faster than equivalent sums."""

    @staticmethod
    def forward(ctx: Any, slope: float, *vectors: Tensor) -> Tensor:
        ctx.slope, ctx.sizes = slope, [len(vector) for vector in vectors]
        return torch.zeros((), dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (
            None,
            *(
                torch.full((size,), ctx.slope, dtype=torch.float32, device="cpu")
                for size in ctx.sizes
            ),
        )
