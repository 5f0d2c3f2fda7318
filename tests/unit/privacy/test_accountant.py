"""ε of the merges in which a learner took part, against the accountants of dp-accounting."""

from __future__ import annotations

import math
import sys
from typing import Any

import dp_accounting
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
    ours = epsilon_spent(z, periods, DELTA)
    tight, loose = PLDAccountant(), RdpAccountant()
    tight.compose(merges(z, periods))
    loose.compose(merges(z, periods))
    assert ours == pytest.approx(tight.get_epsilon(DELTA), rel=2e-3)
    assert ours <= loose.get_epsilon(DELTA)
    assert ours > 0.8 * loose.get_epsilon(DELTA), "the bound by Rényi divergences is close"


@pytest.mark.parametrize(("z", "periods"), [(1.0, 1), (1.0, 50), (30.0, 1000)])
def test_delta_is_that_of_the_analytic_formula(z: float, periods: int) -> None:
    """Balle and Wang 2018 (arXiv 1805.06530), without the package."""
    epsilon, mu = epsilon_spent(z, periods, DELTA), math.sqrt(periods) / z

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    delta = below(mu / 2 - epsilon / mu) - math.exp(epsilon) * below(-mu / 2 - epsilon / mu)
    assert delta == pytest.approx(DELTA, rel=1e-3)
    assert delta <= DELTA


@pytest.mark.parametrize(("z", "epsilon"), [(1.0, 8.0), (5.0, 2.0), (50.0, 1.0)])
def test_one_more_period_than_allowed_costs_too_much(z: float, epsilon: float) -> None:
    allowed = periods_allowed(z, epsilon, DELTA)
    assert allowed >= 1
    assert epsilon_spent(z, allowed, DELTA) <= epsilon < epsilon_spent(z, allowed + 1, DELTA)
    assert noise_multiplier_for(allowed, epsilon, DELTA) <= z * 1.002


def test_nothing_is_spent_before_the_first_merge() -> None:
    assert epsilon_spent(1.0, 0, DELTA) == 0.0


def test_too_little_noise_allows_no_period_and_has_no_epsilon() -> None:
    assert periods_allowed(0.1, 1.0, DELTA) == 0
    assert epsilon_spent(1e-3, 1, DELTA) == math.inf


def test_without_the_package_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_mechanism", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[privacy\]'"):
        periods_allowed(1.0, 1.0, DELTA)
