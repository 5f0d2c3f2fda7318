"""A byte-level GPT with a mixture of experts instead of each MLP: `name = "moe"`.

A router sends each token to its top k experts. Experts have no capacity limit, so no token is
dropped. Two auxiliary losses keep the router balanced. Each learner computes them over its own
batches. Learners exchange only parameters, and no other information about routing.

Shapes: `N` tokens, `E` experts, `K` experts of one token, `W` width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.workloads.gpt import GPT, GptOptions, GptWorkload, TextBatch, cross_entropy
from decoupled_diloco.workloads.transformer import MLP


class MoeOptions(GptOptions):
    """`[workload.options]` of "moe": the options of "gpt", plus the experts."""

    experts: int = Field(default=8, ge=2)
    """Experts per block, at least 2. More experts make the model and its payloads larger, but not
    slower, because a token still visits experts_per_token experts. The defaults result in 2.4 M
    parameters. A token uses 0.9 M of them, as many as the default of "gpt"."""

    experts_per_token: int = Field(default=2, ge=1)
    """Experts that each token visits, 1 to experts. With 2 or more, their weights are normalized to
    sum to 1. With 1, the weight is the router's probability, so that the router still learns
    (Switch)."""

    expert_hidden: int = Field(default=256, ge=1)
    """Hidden size of an expert, at least 1. By default experts_per_token × expert_hidden =
    4 × width, so a token costs as much as in the dense model."""

    balance_weight: float = Field(default=0.01, ge=0)
    """Weight of the balancing loss, at least 0 (Switch: 0.01). Raise it if a few experts receive
    most tokens; see expert_load_max in the evaluations."""

    router_z_weight: float = Field(default=0.001, ge=0)
    """Weight of the router's z-loss, which keeps its logits small, at least 0 (ST-MoE: 0.001)."""

    @model_validator(mode="after")
    def _check_experts(self) -> MoeOptions:
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} in {self.table} exceeds "
                f"experts={self.experts}: lower experts_per_token or add experts"
            )
        return self


class MoeWorkload(GptWorkload):
    """The built-in workload "moe"; see `decoupled_diloco.workloads.Workload` for the methods."""

    name: ClassVar[str] = "moe"
    has_experts: ClassVar[bool] = True

    options: MoeOptions

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        """Return the mean cross-entropy of the next byte, in nats, plus both auxiliary losses."""
        options = self.options
        with recorded_logits(model) as logits:
            loss = cross_entropy(model, batch)
        balance = [balancing_loss(each, options.experts_per_token) for each in logits]
        z = [router_z_loss(each) for each in logits]
        loss = loss + options.balance_weight * torch.stack(balance).mean()
        return loss + options.router_z_weight * torch.stack(z).mean()

    def _build(self) -> GPT:
        options = self.options
        return GPT(
            options,
            partial(
                MixtureOfExperts,
                options.width,
                options.expert_hidden,
                options.experts,
                options.experts_per_token,
            ),
        )

    def _metrics(self, model: nn.Module, batch: TextBatch) -> dict[str, float]:
        """Return the loss without auxiliary losses, and the spread of tokens over experts."""
        with recorded_logits(model) as logits:
            metrics = super()._metrics(model, batch)
        experts, chosen = self.options.experts, self.options.experts_per_token
        loads = torch.stack([expert_shares(each, chosen) * experts for each in logits])
        entropies = [entropy(each) / math.log(experts) for each in logits]
        return metrics | {
            "expert_load_min": loads.amin(1).mean().item(),
            "expert_load_max": loads.amax(1).mean().item(),
            "router_entropy": sum(entropies) / len(entropies),
        }


class MixtureOfExperts(nn.Module):
    """A router and its experts, each of which is an MLP with separate matrices.

    The matrices are not stacked. Merging by directions and norms treats each matrix as one vector,
    and an expert that a learner has hardly used should not be weighed with the others.
    """

    def __init__(self, width: int, hidden: int, experts: int, experts_per_token: int) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(MLP(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        """Map […, W] to […, W]: the weighted sum of the outputs of each token's experts."""
        tokens = x.flatten(0, -2)
        weights, chosen = route(self.router(tokens), self.experts_per_token)
        mixed = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, rank = (chosen == index).nonzero(as_tuple=True)
            if len(token):  # An expert without tokens gets no gradient, so AdamW skips it.
                made = expert(tokens[token]) * weights[token, rank, None].to(x.dtype)
                mixed = mixed.index_add(0, token, made)
        return mixed.view_as(x)


def route(logits: Tensor, experts_per_token: int) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by logits [N, E], the most likely first.

    Returns:
        Their weights, fp32 [N, K], divided by their sum if K is above 1, and their indices, int64
        [N, K].
    """
    weights, chosen = logits.float().softmax(-1).topk(experts_per_token, dim=-1)
    if experts_per_token > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, chosen


def expert_shares(logits: Tensor, experts_per_token: int) -> Tensor:
    """Return each expert's share of all choices, fp32 [E]. The shares sum to 1."""
    _, chosen = route(logits.detach(), experts_per_token)
    counts = torch.bincount(chosen.flatten(), minlength=logits.shape[-1])
    return counts / chosen.numel()


def balancing_loss(logits: Tensor, experts_per_token: int) -> Tensor:
    """Return E · Σₑ fₑ · Pₑ: 1 for an even spread, up to E if one expert receives all tokens.

    For logits [N, E], fₑ is an expert's share of the choices (without a gradient), and Pₑ is its
    mean probability.

    Source:
        Switch Transformers (arXiv 2101.03961), Eq. 4; for K > 1 over all choices.
    """
    probabilities = logits.float().softmax(-1).mean(0)
    return logits.shape[-1] * (expert_shares(logits, experts_per_token) * probabilities).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Return the mean of (log Σₑ exp(logit))², which is small for small logits.

    Source:
        ST-MoE (arXiv 2202.08906), Eq. 5.
    """
    return logits.float().logsumexp(-1).square().mean()


def entropy(logits: Tensor) -> float:
    """Return the mean entropy of the router's probabilities in nats, from 0 to log E."""
    logarithms = F.log_softmax(logits.float(), dim=-1)
    return -(logarithms.exp() * logarithms).sum(-1).mean().item()


@contextlib.contextmanager
def recorded_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the logits [N, E] of all routers of a model, in the order of their forward passes."""
    logits: list[Tensor] = []

    def record(router: nn.Module, inputs: object, output: Tensor) -> None:
        logits.append(output)

    routers = [layer.router for layer in model.modules() if isinstance(layer, MixtureOfExperts)]
    hooks = [router.register_forward_hook(record) for router in routers]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()
