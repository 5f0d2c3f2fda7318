"""The blocks of the built-in transformers: pre-norm, without biases, with a replaceable MLP.

Query, key and value have separate matrices. So all tensors have similar sizes, and there are enough
of them for a balanced partition into many fragments.

Shapes: `B` sequences, `T` positions, `W` width, `H` heads, `D` = W / H.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROTARY_BASE = 10_000.0

Angles: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary position angles, [T, D / 2] each."""


class Block(nn.Module):
    """Attention, then an MLP; each has a normed input and adds to the residual stream.

    Args:
        width: W.
        heads: H, a divisor of W.
        mlp: The module after the attention, [B, T, W] to [B, T, W].
        causal: Whether a position attends only to itself and earlier positions.
    """

    def __init__(self, width: int, heads: int, mlp: nn.Module, *, causal: bool = True) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = mlp

    def forward(
        self, x: Tensor, angles: Angles | None = None, attended: Tensor | None = None
    ) -> Tensor:
        """Return the residual stream [B, T, W] after the block.

        Args:
            angles: Rotary angles of the positions; None: no rotary positions.
            attended: Positions to attend to in non-causal attention, bool [B, 1, 1, T]; None: all.
        """
        x = x + self.attention(self.attention_norm(x), angles, attended)
        x = x + self.mlp(self.mlp_norm(x))
        return x  # noqa: RET504 (the two residual lines belong together)


class Attention(nn.Module):
    """Multi-head attention, optionally causal, optionally with rotary positions."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Angles | None, attended: Tensor | None = None) -> Tensor:
        """Map [B, T, W] to [B, T, W]; see `Block`."""
        q, k, v = (self._split(f(x)) for f in (self.query, self.key, self.value))
        if angles is not None:
            q, k = _rotate(q, angles), _rotate(k, angles)
        y = F.scaled_dot_product_attention(q, k, v, attended, is_causal=self.causal)
        projected: Tensor = self.project(y.transpose(1, 2).flatten(2))
        return projected

    def _split(self, x: Tensor) -> Tensor:
        """Reshape [B, T, W] to [B, H, T, D]."""
        sequences, steps, width = x.shape
        return x.view(sequences, steps, self.heads, width // self.heads).transpose(1, 2)


class MLP(nn.Module):
    """Two matrices, W to `hidden` and back, with a squared ReLU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden, bias=False)
        self.project = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map […, W] to […, W]."""
        projected: Tensor = self.project(F.relu(self.expand(x)).square())
        return projected


def rotary(positions: int, size: int) -> Angles:
    """Return the rotary angles for heads of this size, at positions 0 to `positions` - 1."""
    here = torch.get_default_device()  # the device on which the module's parameters are built
    even = torch.arange(0, size, 2, dtype=torch.float32, device=here)
    frequencies = ROTARY_BASE ** (-even / size)
    places = torch.arange(positions, dtype=torch.float32, device=here)
    angles = torch.outer(places, frequencies)
    return angles.cos(), angles.sin()


def initialize(model: nn.Module, blocks: int) -> None:
    """Initialize matrices from normal distributions.

    The standard deviation is 1 for the embedding and 1/√fan-in for other matrices. Matrices that
    add to the residual stream have 1/√(2 · blocks) of it. With an embedding of σ = 1, the residual
    stream starts at the size of normed values, and the blocks change it in small steps. This learns
    clearly faster than an embedding of σ = 1/√width.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        std = 1.0 if name == "embedding.weight" else parameter.shape[1] ** -0.5
        if name.endswith("project.weight"):
            std /= math.sqrt(2 * blocks)
        nn.init.normal_(parameter, std=std)


def _rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate the two halves of each head, [B, H, T, D], by the angles of the position."""
    cos, sin = (each[: x.shape[2]] for each in angles)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
