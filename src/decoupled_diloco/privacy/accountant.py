"""What a learner's contributions reveal: ε for a δ, by the package dp-accounting.

*The mechanism.* A contribution to a fragment with N_p of the N elements is clipped to C·√(N_p/N),
and each merge gets Gaussian noise of standard deviation z·C per element (see `dp`). So one merge is
a Gaussian mechanism with multiplier z/√(N_p/N). The squared inverses of multipliers add up under
composition, also if each mechanism is chosen after the results of the earlier ones. One merge of
every fragment, a *period*, is therefore one Gaussian mechanism with multiplier z, and T periods are
one with z/√T. That is exact, and so is the δ of one Gaussian mechanism. No amplification by
sampling is claimed.

*Discrete noise.* With secure sums the noise consists of integers. The discrete Gaussian mechanism
has the same concentrated differential privacy, ρ = T / 2z² (Canonne, Kamath and Steinke 2020, arXiv
2004.00010, theorem 14), but its δ is not known exactly. The bound of their proposition 12 makes ε
some percent larger.

*The limit.* A shard counts, for each learner and fragment, the merges in which the learner took
part. At most `periods_allowed` of each fragment keep the learner below its ε, however the merges of
different fragments are ordered. So each shard can enforce its share of the limit alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import exp, inf, log, log1p, sqrt
from typing import TYPE_CHECKING

from decoupled_diloco.errors import ConfigError

if TYPE_CHECKING:
    from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss


class MissingAccountantError(ConfigError):
    """The package dp-accounting is not installed."""


PERIODS_MAX = 2**40
"""The largest limit: no run has as many periods."""

EPSILON_MAX = 1e4
"""A larger ε is reported as infinite: it has no meaning."""

PRECISION = 1e-6
"""Relative error of a computed ε, upward."""


def periods_allowed(
    noise_multiplier: float, epsilon: float, delta: float, *, discrete: bool
) -> int:
    """Return the number of periods that cost at most ε; 0 if one costs more.

    Args:
        noise_multiplier: z > 0.
        epsilon: ε > 0.
        delta: δ, between 0 and 1.
        discrete: Whether the noise consists of integers, as in secure sums.

    Raises:
        MissingAccountantError: The package dp-accounting is not installed.
    """
    low, high = 0, 1
    while high < PERIODS_MAX and _delta(noise_multiplier, high, epsilon, discrete) <= delta:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _delta(noise_multiplier, middle, epsilon, discrete) <= delta:
            low = middle
        else:
            high = middle
    return low


@cache
def epsilon_spent(noise_multiplier: float, periods: int, delta: float, *, discrete: bool) -> float:
    """Return ε after a number of periods, rounded up by at most `PRECISION`.

    Args:
        noise_multiplier: z > 0.
        periods: The number of periods, at least 0.
        delta: δ, between 0 and 1.
        discrete: Whether the noise consists of integers, as in secure sums.

    Raises:
        MissingAccountantError: The package dp-accounting is not installed.
    """
    if periods == 0 or _delta(noise_multiplier, periods, 0.0, discrete) <= delta:
        return 0.0
    return _least(
        lambda epsilon: _delta(noise_multiplier, periods, epsilon, discrete) <= delta,
        PRECISION,
        EPSILON_MAX,
    )


def noise_multiplier_for(periods: int, epsilon: float, delta: float, *, discrete: bool) -> float:
    """Return the smallest z with which a number of periods cost at most ε, to three digits."""
    return _least(lambda z: _delta(z, periods, epsilon, discrete) <= delta, 1e-3)


def _least(is_enough: Callable[[float], bool], precision: float, most: float = inf) -> float:
    """Return the least number > 0 that is enough, rounded up; infinity if it exceeds `most`.

    Args:
        is_enough: Whether a number is; so is every greater one.
        precision: Relative error of the result, upward.
        most: The largest result.
    """
    low, high = 0.0, 1.0
    while not is_enough(high):
        low, high = high, 2 * high
        if high > most:
            return inf
    while high - low > precision * high:
        middle = (low + high) / 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def _delta(noise_multiplier: float, periods: int, epsilon: float, discrete: bool) -> float:
    """Return δ of T Gaussian mechanisms with multiplier z for an ε, at most 1."""
    if discrete:  # break: discrete-noise-counted-as-continuous
        return _delta_of_zcdp(periods / (2 * noise_multiplier**2), epsilon)
    return float(_gaussian(noise_multiplier / sqrt(periods)).get_delta_for_epsilon(epsilon))


def _delta_of_zcdp(rho: float, epsilon: float) -> float:
    """Return the least of the bounds on δ for an ε that a concentrated ρ implies, at most 1.

    Each order α > 1 has one: exp((α - 1)(α·ρ - ε)) / (α - 1) · (1 - 1/α)^α.
    """
    low, high = 1.0 + 1e-9, (epsilon + 1) / (2 * rho) + 2
    for _ in range(100):  # the derivative of the logarithm increases with α
        order = (low + high) / 2
        if (2 * order - 1) * rho - epsilon + log1p(-1 / order) < 0:
            low = order
        else:
            high = order
    order = high
    bound = (order - 1) * (order * rho - epsilon) - log(order - 1) + order * log1p(-1 / order)
    return exp(min(0.0, bound))


def _gaussian(noise_multiplier: float) -> GaussianPrivacyLoss:
    try:
        from dp_accounting.pld.privacy_loss_mechanism import GaussianPrivacyLoss
    except ImportError as error:
        raise MissingAccountantError(
            "[privacy.dp] needs the package dp-accounting, which is not installed: "
            "pip install -e '.[privacy]' in a clone"
        ) from error
    return GaussianPrivacyLoss(noise_multiplier)
