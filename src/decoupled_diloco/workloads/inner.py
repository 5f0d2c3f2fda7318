"""What the built-in workloads have in common inside a learner: optimizer, schedule, seed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import count
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from decoupled_diloco.config.settings import Settings
from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.muon import MuonAndAdamW, hidden_matrices

LR_FINAL = 0.1


class InnerOptions(Settings):
    """The options of `[workload.options]` that every built-in workload has."""

    table: ClassVar[str] = "[workload.options]"

    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """Inner optimizer: "adamw" (paper); "muon" for the hidden matrices, with "adamw" for all else
    (MuLoCo; torch 2.9 or newer); "sgd", without momentum, for the data-parallel baseline."""

    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate, greater than 0. Tune it for each batch size and inner optimizer before
    comparing runs."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices towards 0, not of norms; 0 and up."""

    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """Averaging factors of AdamW's two moments, 0 to less than 1. 0.95 as usual for language
    models: it forgets early gradients sooner than 0.999."""

    warmup_steps: int = Field(default=20, ge=0)
    """Global steps until the learning rate reaches its peak, 0 to less than total_steps. 20 are
    enough for AdamW's moments to mean something."""

    total_steps: int | None = Field(default=None, ge=1)
    """Global step at which the learning rate has fallen to a tenth, by a cosine. Filled in with
    the run's max_steps; without one the rate stays at its peak."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights and of the order of the data. Filled in with the run's seed."""

    def inapplicable(self) -> dict[str, str]:
        """`betas` are AdamW's."""
        return {"betas": "with optimizer='sgd'"} if self.optimizer == "sgd" else {}

    @model_validator(mode="after")
    def _check_inner(self) -> InnerOptions:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas={list(self.betas)} in {self.table} are out of range: "
                "each must be at least 0 and less than 1"
            )
        explicit = "warmup_steps" in self.model_fields_set
        if explicit and self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} in {self.table} is not below "
                f"total_steps={self.total_steps}: lower warmup_steps or train longer"
            )
        return self


class BuiltIn:
    """What the built-in workloads do alike: see `decoupled_diloco.workloads.Workload`."""

    has_experts: ClassVar[bool] = False
    """Whether a step may leave parameters without a gradient, as experts that get no token."""

    options: InnerOptions

    def model(self) -> nn.Module:
        """A new model, its weights drawn from the seed; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            return self._build()

    def _build(self) -> nn.Module:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(self.options, model)

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Any]:
        """The endless batches of one learner, from its own region of the data."""
        return (self._batch(part, parts, step) for step in count(start))

    def _batch(self, part: int, parts: int, step: int) -> Any:
        raise NotImplementedError

    def schedule(self, step: int) -> float:
        return rate_factor(self.options, step)


def make_optimizer(options: InnerOptions, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, Muon or plain SGD; weight decay on matrices only."""
    hidden = hidden_matrices(model) if options.optimizer == "muon" else []
    inside = {id(parameter) for parameter in hidden}
    parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in inside]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2]},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if options.optimizer == "muon":
        rate, decay = options.learning_rate, options.weight_decay
        return MuonAndAdamW(hidden, groups, rate, options.betas, decay)
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, weight_decay=options.weight_decay)
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=options.betas, weight_decay=options.weight_decay
    )


def rate_factor(options: InnerOptions, step: int) -> float:
    """Linear warm-up to 1, then a cosine to 0.1 at `total_steps`, then constant."""
    warmup, total = options.warmup_steps, options.total_steps
    if step < warmup:
        return (step + 1) / warmup
    if total is None:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return LR_FINAL + (1 - LR_FINAL) * 0.5 * (1 + math.cos(math.pi * progress))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; leaves it as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def check_heads(options: InnerOptions, width: int, heads: int, unit: int, why: str) -> None:
    """Refuses a width that the heads cannot share.

    Raises:
        ConfigError: `width` is not a multiple of `unit` × heads; `why` says what needs that.
    """
    if width % (unit * heads):
        needed = f"heads={heads}" if unit == 1 else f"{unit} × heads={unit * heads}"
        raise ConfigError(
            f"width={width} in {options.table} is not a multiple of {needed}: "
            f"{why}; change width or heads"
        )
