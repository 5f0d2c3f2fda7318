"""ε of the merges in which a learner took part, against the accountants of dp-accounting."""

from __future__ import annotations

import math
import sys
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from decoupled_diloco.errors import ConfigError
from decoupled_diloco.privacy.accountant import (
    epsilon_spent,
    noise_multiplier_for,
    periods_allowed,
)
from decoupled_diloco.privacy.dp import Mechanism

PARTS = (1000, 600, 2400)
DELTA = 1e-5


def merges(z: float, periods: int) -> Any:
    """Every merge of a run as an event of its own, with the bounds of `Mechanism`."""
    mechanism = Mechanism(clip=0.3, noise_multiplier=z, numel=sum(PARTS))
    noise = mechanism.noise_multiplier * mechanism.clip
    one = [dp_accounting.GaussianDpEvent(noise / mechanism.clip_of(part)) for part in PARTS]
    return dp_accounting.ComposedDpEvent([each for each in one for _ in range(periods)])


@pytest.mark.parametrize(("z", "periods"), [(4.0, 3), (8.0, 20), (20.0, 100)])
def test_epsilon_is_that_of_all_merges_composed_one_by_one(z: float, periods: int) -> None:
    ours = epsilon_spent(z, periods, DELTA, discrete=False)
    tight, loose = PLDAccountant(), RdpAccountant()
    tight.compose(merges(z, periods))
    loose.compose(merges(z, periods))
    assert ours == pytest.approx(tight.get_epsilon(DELTA), rel=2e-3)
    assert ours <= loose.get_epsilon(DELTA)
    assert ours > 0.8 * loose.get_epsilon(DELTA), "the bound by Rényi divergences is close"


@pytest.mark.parametrize(("z", "periods"), [(1.0, 1), (1.0, 50), (30.0, 1000)])
def test_delta_is_that_of_the_analytic_formula(z: float, periods: int) -> None:
    """Balle and Wang 2018 (arXiv 1805.06530), without the package."""
    epsilon, mu = epsilon_spent(z, periods, DELTA, discrete=False), math.sqrt(periods) / z

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    delta = below(mu / 2 - epsilon / mu) - math.exp(epsilon) * below(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(DELTA, rel=1e-3)
    assert delta <= DELTA


@pytest.mark.parametrize(("z", "epsilon"), [(1.0, 8.0), (5.0, 2.0), (50.0, 1.0)])
def test_one_more_period_than_allowed_costs_too_much(z: float, epsilon: float) -> None:
    allowed = periods_allowed(z, epsilon, DELTA, discrete=False)
    assert allowed >= 1
    assert (
        epsilon_spent(z, allowed, DELTA, discrete=False)
        <= epsilon
        < epsilon_spent(z, allowed + 1, DELTA, discrete=False)
    )
    assert noise_multiplier_for(allowed, epsilon, DELTA, discrete=False) <= z * 1.002


def test_nothing_is_spent_before_the_first_merge() -> None:
    assert epsilon_spent(1.0, 0, DELTA, discrete=False) == 0.0


def test_too_little_noise_allows_no_period_and_has_no_epsilon() -> None:
    assert periods_allowed(0.1, 1.0, DELTA, discrete=False) == 0
    assert epsilon_spent(1e-3, 1, DELTA, discrete=False) == math.inf


def test_without_the_package_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_mechanism", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[privacy\]'"):
        periods_allowed(1.0, 1.0, DELTA, discrete=False)


def delta_of_integers(deviation: float, epsilon: float) -> float:
    """δ of one discrete Gaussian for two neighbors that differ by one unit, summed up."""
    support = np.arange(-40 * int(deviation + 1), 40 * int(deviation + 1))
    near = np.exp(-(support**2) / (2 * deviation**2))
    far = np.exp(-((support - 1) ** 2) / (2 * deviation**2))
    near, far = near / near.sum(), far / far.sum()
    return float(np.maximum(0, near - math.exp(epsilon) * far).sum())


@pytest.mark.parametrize("z", [0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_discrete_noise_has_at_most_the_computed_epsilon(z: float, delta: float) -> None:
    epsilon = epsilon_spent(z, 1, delta, discrete=True)
    assert delta_of_integers(z, epsilon) <= delta
    assert epsilon > epsilon_spent(z, 1, delta, discrete=False)


@pytest.mark.parametrize(("z", "periods"), [(4.0, 3), (8.0, 20), (20.0, 100), (1.0, 1)])
def test_discrete_noise_costs_a_little_more_than_continuous_noise(z: float, periods: int) -> None:
    exact, bound = (epsilon_spent(z, periods, DELTA, discrete=each) for each in (False, True))
    assert exact < bound < 1.12 * exact
    peer = RdpAccountant(orders=[1 + 0.02 * n for n in range(1, 1500)])
    peer.compose(merges(z, periods))
    assert bound == pytest.approx(peer.get_epsilon(DELTA), rel=2e-3)


def test_the_limits_of_discrete_noise_fit_together() -> None:
    allowed = periods_allowed(5.0, 2.0, DELTA, discrete=True)
    assert 1 <= allowed < periods_allowed(5.0, 2.0, DELTA, discrete=False)
    assert epsilon_spent(5.0, allowed, DELTA, discrete=True) <= 2.0
    assert epsilon_spent(5.0, allowed + 1, DELTA, discrete=True) > 2.0
    assert noise_multiplier_for(allowed, 2.0, DELTA, discrete=True) <= 5.0 * 1.002
    assert periods_allowed(0.1, 1.0, DELTA, discrete=True) == 0


def test_an_adaptive_clip_costs_nothing_beyond_the_noise_of_the_settings() -> None:
    """Every sum and every count of a run as an event of its own."""
    z, periods = 8.0, 20
    mechanism = Mechanism.with_quantile(0.3, z, sum(PARTS), quantile=0.5, rate=0.2)
    assert mechanism.adaptive is not None
    events = []
    for part in PARTS:
        noise = mechanism.noise_multiplier * mechanism.clip / mechanism.clip_of(part)
        count = mechanism.adaptive.noise_multiplier * math.sqrt(sum(PARTS) / part)
        events += [dp_accounting.GaussianDpEvent(noise), dp_accounting.GaussianDpEvent(count)]
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.ComposedDpEvent(events * periods))
    ours = epsilon_spent(z, periods, DELTA, discrete=False)
    assert ours == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
