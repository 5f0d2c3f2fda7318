"""Methods of other papers, each written as a user would write it: see docs/how-to/own-method.md.

`settings_sweep.py methods` measures them. The rates and momenta are in its cells.

    M  contributions, at least 1
    N  elements of one piece, of one fragment, or of one group of a codec
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

GROUP = 128
"""Elements that share the values of `Statistical2Bit`."""


def isotropic(contributions: Tensor, weights: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the weighted mean; that of a matrix gets equal singular values, their average.

    Source:
        Iso-C, as a merge rule: github.com/shoroi/isoloco.
    """
    mean = weights @ contributions
    if len(shape) != 2 or min(shape) == 1:
        return mean
    left, values, right = torch.linalg.svd(mean.view(shape), full_matrices=False)
    return (left @ right * values.mean()).flatten()


KEPT = 0.2
"""Least cosine to the momentum of a contribution that `heloco` does not change."""


def heloco(contributions: Tensor, weights: Tensor, momentum: Tensor) -> Tensor:
    """Return the weighted mean of contributions that are turned towards the outer momentum.

    One with a cosine below 0 loses a part of what opposes the momentum. One with a cosine from 0 to
    `KEPT` is turned and keeps its norm. Both are changed less if they are short compared with the
    momentum. The other constants are 1: the paper's values were not available.

    Source:
        HeLoCo (arXiv 2606.00271).
    """
    length = float(momentum.norm())
    if length == 0:
        return weights @ contributions
    direction = momentum / length
    return weights @ torch.stack([_turned(each, direction, length) for each in contributions])


def _turned(vector: Tensor, direction: Tensor, length: float) -> Tensor:
    """Return a contribution [N], turned towards a momentum with this direction [N] and length."""
    norm = float(vector.norm())
    along = float(vector @ direction)
    if norm == 0 or along >= KEPT * norm:
        return vector
    cosine, confidence = along / norm, norm / (norm + length)
    if cosine < 0:
        return vector + cosine * confidence * along * direction
    mixed = torch.lerp(vector / norm, direction, (1 - cosine) * confidence)
    return norm / mixed.norm() * mixed


class GPA(torch.optim.Optimizer):
    """Generalized primal averaging: learners train at a mixture of an average and fast weights.

    `z ← z - lr·g`, `x ← μx·x + (1 - μx)·z`, `y = μy·x + (1 - μy)·z`; y is what learners train. A
    step here is a round, so that μx is the 0.9 of the paper for a step of its own.

    Source:
        arXiv 2512.17131.
    """

    def __init__(self, params: Any, lr: float, mu_x: float = 0.9, mu_y: float = 0.7) -> None:
        super().__init__(params, {"lr": lr, "mu_x": mu_x, "mu_y": mu_y})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                z = state.setdefault("z", p.clone())
                x = state.setdefault("x", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 - group["mu_x"])
                p.copy_(torch.lerp(z, x, group["mu_y"]))


class ConstantLength(torch.optim.Optimizer):
    """SGD with momentum μ whose rate keeps the effective length of its steps constant.

    Successive gradients with the correlation ρ let momentum lengthen a step by `1/(1 - μ·ρ)`. The
    rate is `lr·(1 - μ·ρ)`, with ρ averaged over about the last five rounds.

    Source:
        The effective rate of AutoDiLoCo.
    """

    def __init__(self, params: Any, lr: float, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                last = state.setdefault("last", torch.zeros_like(p))
                buffer = state.setdefault("momentum", torch.zeros_like(p))
                norms = float(last.norm() * p.grad.norm())
                now = float(last @ p.grad) / norms if norms > 0 else 0.0
                rho = state["rho"] = 0.8 * state.get("rho", 0.0) + 0.2 * now
                mu = group["momentum"]
                buffer.mul_(mu).add_(p.grad)
                p.sub_(buffer, alpha=group["lr"] * (1 - mu * rho))
                last.copy_(p.grad)


def short_at_the_end(step: int, steps: int | None) -> int:
    """Return H = 24, and 8 in the last fifth."""
    return 8 if steps is not None and step >= 0.8 * steps else 24


def half_at_the_end(step: int, steps: int | None) -> int:
    """Return H = 48, and 24 in the last fifth."""
    return 24 if steps is not None and step >= 0.8 * steps else 48


def long_at_the_end(step: int, steps: int | None) -> int:
    """Return H = 8, 24 and 48, inverse to the squared rate of a cosine, as the quadratic rule.

    Source:
        QSR (arXiv 2310.14423).
    """
    if steps is None:
        return 24
    rate = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps))
    return max(h for h in (8, 24, 48) if h == 8 or h <= 12 / rate**2)


class _Grouped:
    """A codec of groups of `GROUP` elements: each has values in bf16, and then its bits.

    A partial last group has fewer bits. Subclasses set the number of values, and of bits per
    element.
    """

    group = GROUP
    values: int
    bits: int

    def nbytes(self, numel: int) -> int:
        """Return the bytes of N elements."""
        whole, rest = divmod(numel, GROUP)
        return whole * self._record(GROUP) + (self._record(rest) if rest else 0)

    def encode(self, vector: Tensor) -> Tensor:
        """Encode fp32 [N] as uint8 [nbytes(N)]."""
        whole = len(vector) // GROUP * GROUP
        rows = [vector[:whole].view(-1, GROUP), vector[None, whole:]]
        return torch.cat([self._encoded(each).flatten() for each in rows])

    def decode(self, body: Tensor, numel: int) -> Tensor:
        """Return the vector, fp32 [N], of its encoded form."""
        whole, rest = divmod(numel, GROUP)
        size = self._record(GROUP)
        rows = [(body[: whole * size].view(-1, size), GROUP), (body[None, whole * size :], rest)]
        return torch.cat([self._decoded(*each).flatten() for each in rows])

    def _record(self, numel: int) -> int:
        return 2 * self.values + -(-numel * self.bits // 8)

    def _encoded(self, rows: Tensor) -> Tensor:
        """Encode groups, fp32 [G, N] with N up to `GROUP`, as uint8 [G, record]."""
        if not rows.numel():
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        values, codes = self.coded(rows)
        codes = torch.nn.functional.pad(codes.to(torch.uint8), (0, -rows.shape[1] % 8))
        packed = (codes.view(len(rows), -1, 8 // self.bits) << self._shifts).sum(2)
        size = self._record(rows.shape[1]) - 2 * self.values
        return torch.cat([values.view(torch.uint8), packed.to(torch.uint8)[:, :size]], dim=1)

    def _decoded(self, rows: Tensor, numel: int) -> Tensor:
        """Return the groups, fp32 [G, N], of their encoded form."""
        if not rows.numel():
            return torch.empty(0, device="cpu")
        start = 2 * self.values
        values = rows[:, :start].flatten().clone().view(torch.bfloat16).view(-1, self.values)
        codes = rows[:, start:, None] >> self._shifts & 2**self.bits - 1
        return self.levels(values.float()).gather(1, codes.flatten(1)[:, :numel].long())

    @property
    def _shifts(self) -> Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device="cpu")

    def coded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values, bf16 [G, values], and the codes [G, N] of groups, fp32 [G, N]."""
        raise NotImplementedError

    def levels(self, values: Tensor) -> Tensor:
        """Return what the codes of each group decode to, [G, 2 ** bits]."""
        raise NotImplementedError


class Statistical2Bit(_Grouped):
    """Two bits: each value becomes the mean of the values of its bin.

    The bins of a group are divided at its mean, and at one standard deviation on either side of it.
    A group is sent as four values in bf16 and its bits: 2.5 bits per element.

    Source:
        The statistical quantization of MuLoCo (arXiv 2505.23725), whose bins divide 6 σ.
    """

    values, bits = 4, 2

    def coded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and numbers of the bins."""
        mean, spread = rows.mean(dim=1, keepdim=True), rows.std(dim=1, keepdim=True, correction=0)
        bins = (rows >= mean - spread).long() + (rows >= mean) + (rows >= mean + spread)
        sums = rows.new_zeros(len(rows), 4).scatter_add_(1, bins, rows)
        counts = rows.new_zeros(len(rows), 4).scatter_add_(1, bins, torch.ones_like(rows))
        return (sums / counts.clamp(min=1)).to(torch.bfloat16), bins

    def levels(self, values: Tensor) -> Tensor:
        """Return the means."""
        return values


class ScaledSign(_Grouped):
    """One bit: the sign, times the mean of the absolute values of the group.

    Source:
        EF-SignSGD (arXiv 1901.09847), with a scale per group.
    """

    values, bits = 1, 1

    def coded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and signs."""
        return rows.abs().mean(dim=1, keepdim=True).to(torch.bfloat16), rows >= 0

    def levels(self, values: Tensor) -> Tensor:
        """Return the scale, negative and positive."""
        return torch.cat([-values, values], dim=1)
