"""Common parts of the built-in workloads: optimizer, schedule, seed."""

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
"""The last learning rate as a share of the peak."""


class InnerOptions(Settings):
    """The `[workload.options]` that all built-in workloads have."""

    table: ClassVar[str] = "[workload.options]"

    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """Inner optimizer. "adamw": as in the paper. "muon": Muon for the hidden matrices and AdamW for
    all other parameters (MuLoCo; needs torch 2.9). "sgd": without momentum, for the data-parallel
    baseline."""

    learning_rate: float = Field(default=2e-3, gt=0)
    """Peak learning rate, greater than 0. Tune it for each batch size and inner optimizer before
    comparing runs."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of matrices, at least 0. Norms are not decayed."""

    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """Averaging factors of AdamW's two moments, at least 0 and less than 1. The second is 0.95, as
    usual for language models: early gradients lose their influence sooner than with 0.999."""

    warmup_steps: int = Field(default=20, ge=0)
    """Global steps until the learning rate reaches its peak, at least 0 and less than total_steps.
    After 20 steps, AdamW's moments are reliable enough."""

    total_steps: int | None = Field(default=None, ge=1)
    """Global step at which the learning rate has fallen to a tenth of its peak, along a cosine.
    Default: the run's max_steps. Without either, the rate stays at its peak."""

    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial weights and of the order of the data. Default: the run's seed."""

    def inapplicable(self) -> dict[str, str]:
        """Return `betas` with SGD, which has none."""
        return {"betas": "with optimizer='sgd'"} if self.optimizer == "sgd" else {}

    @model_validator(mode="after")
    def _check_inner(self) -> InnerOptions:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"betas={list(self.betas)} in {self.table} is out of range: "
                "each number must be at least 0 and less than 1"
            )
        explicit = "warmup_steps" in self.model_fields_set
        if explicit and self.total_steps is not None and self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} in {self.table} is not below "
                f"total_steps={self.total_steps}: lower warmup_steps or train longer"
            )
        return self


class BuiltIn:
    """Base class of the built-in workloads; see `decoupled_diloco.workloads.Workload`."""

    has_experts: ClassVar[bool] = False
    """Whether parameters may have no gradient after a step, such as experts without tokens."""

    options: InnerOptions

    def model(self) -> nn.Module:
        """Return a new model with weights from the seed; the global generator does not change."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.options.seed)
            return self._build()

    def _build(self) -> nn.Module:
        raise NotImplementedError

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(self.options, model)

    def batches(self, part: int, parts: int, start: int = 0) -> Iterator[Any]:
        """Return the endless batches of one learner, from its partition of the data."""
        return (self._batch(part, parts, step) for step in count(start))

    def _batch(self, part: int, parts: int, step: int) -> Any:
        raise NotImplementedError

    def schedule(self, step: int) -> float:
        return rate_factor(self.options, step)


def make_optimizer(options: InnerOptions, model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW, Muon or SGD without momentum; only matrices have weight decay."""
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
    """Return the learning rate as a share of its peak, at a global step.

    It rises linearly to 1 during the warm-up. Then it falls along a cosine to `LR_FINAL` at
    `total_steps` and stays there.
    """
    warmup, total = options.warmup_steps, options.total_steps
    if step < warmup:
        return (step + 1) / warmup
    if total is None:
        return 1.0
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return LR_FINAL + (1 - LR_FINAL) * 0.5 * (1 + math.cos(math.pi * progress))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, without gradients; restore its mode at the end."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def check_heads(options: InnerOptions, width: int, heads: int, unit: int, why: str) -> None:
    """Reject a width that cannot be divided among the heads.

    Args:
        why: The reason of the requirement, for the message.

    Raises:
        ConfigError: `width` is not a multiple of `unit` × heads.
    """
    if width % (unit * heads):
        needed = f"heads={heads}" if unit == 1 else f"{unit} × heads={unit * heads}"
        raise ConfigError(
            f"width={width} in {options.table} is not a multiple of {needed}: "
            f"{why}; change width or heads"
        )
