"""How long a token budget takes: the arithmetic of Scaling Laws for DiLoCo (arXiv 2503.09799)."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.errors import ConfigError
from decoupled_diloco_plan.checks import above

BITS = 16
"""bf16: the paper's N parameters in a reduction are 16 N bits."""


@dataclass(frozen=True, slots=True)
class Reach:
    """A network as the model sees it: W in bytes a second, ε in seconds for each reduction."""

    bandwidth: float
    latency_seconds: float


NETWORKS = {
    "high": Reach(400e9 / 8, 1e-4),
    "medium": Reach(100e9 / 8, 1e-3),
    "low": Reach(10e9 / 8, 1e-2),
}
"""The paper's three networks."""


@dataclass(frozen=True, slots=True)
class WallClock:
    """Seconds for a whole training, by what they go into."""

    compute: float
    within: float
    between: float

    @property
    def total(self) -> float:
        """Nothing overlaps in this model."""
        return self.compute + self.within + self.between


def wall_clock(
    *,
    params: float,
    tokens: float,
    tokens_per_step: float,
    chips: float,
    flops_per_chip: float,
    learners: int,
    period: int,
    between: Reach,
    within: Reach = NETWORKS["high"],
) -> WallClock:
    """T_comp = 6ND/(RQ); T_intra = (2N/W₀·(1 - M/R) + ε₀)·T; T_inter = (2N/W₁·(1 - 1/R) + ε₁)·T/H.

    Args:
        params: N.
        tokens: D, the whole budget.
        tokens_per_step: B, of all learners together; T = D/B.
        chips: R, of all learners together.
        flops_per_chip: Q, FLOP/s of a chip.
        learners: M; 1 for data-parallel, whose chips all reduce over the slow network.
        period: H; 1 for data-parallel.
        between: W₁ and ε₁, between the sites.
        within: W₀ and ε₀, within a learner.

    Raises:
        ConfigError: a number is out of its range.
    """
    above(0, params=params, tokens=tokens, tokens_per_step=tokens_per_step)
    above(0, chips=chips, flops=flops_per_chip)
    if learners > chips:
        raise ConfigError(f"learners={learners} exceeds chips={chips:g}: a learner needs a chip")
    steps = tokens / tokens_per_step
    reduction = 2 * params * BITS / 8
    inside = reduction / within.bandwidth * (1 - learners / chips) + within.latency_seconds
    across = reduction / between.bandwidth * (1 - 1 / chips) + between.latency_seconds
    return WallClock(
        compute=6 * params * tokens / (chips * flops_per_chip),
        within=inside * steps if learners > 1 or period > 1 else 0.0,
        between=across * steps / period,
    )
