"""Clipping and noise of one merge: the claimed bounds and the claimed distribution."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

from decoupled_diloco.privacy.dp import NOISE_BLOCK, Mechanism, gaussian

MECHANISM = Mechanism(clip=2.0, noise_multiplier=1.5, numel=400)
SEED = np.random.default_rng(25)


def test_all_fragments_together_have_the_norm_c() -> None:
    parts = [100, 60, 240]
    assert math.hypot(*map(MECHANISM.clip_of, parts)) == pytest.approx(2.0)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1000.0])
def test_a_contribution_is_scaled_to_its_limit_and_keeps_its_direction(factor: float) -> None:
    values = torch.full((100,), 0.1 * factor)  # the limit of a quarter of the elements is 1
    before = values.clone()
    MECHANISM.clip_(values)
    assert values.norm() == pytest.approx(min(1.0, factor), rel=1e-5)
    assert torch.allclose(values / values.norm(), before / before.norm())


def test_values_that_are_not_finite_stay_so_that_the_shard_refuses_them() -> None:
    for bad in (math.nan, math.inf):
        assert not MECHANISM.clip_(torch.tensor([1.0, bad])).isfinite().all()


def test_the_noise_has_the_standard_deviation_z_c_over_the_weight() -> None:
    """The Kolmogorov-Smirnov statistic of 200,000 values is below 0.005 in all but 1 of 10⁴."""
    mean = torch.full((200_000,), 7.0)
    MECHANISM.add_noise_(mean, 4.0, SEED.bytes)
    noise = (mean - 7.0).double().numpy() / (1.5 * 2.0 / 4.0)
    assert stats.kstest(noise, "norm").statistic < 0.005
    assert noise.std() == pytest.approx(1.0, abs=0.01)


def test_every_element_of_several_blocks_gets_its_own_noise() -> None:
    mean = torch.zeros(NOISE_BLOCK + 7)
    MECHANISM.add_noise_(mean, 1.0, SEED.bytes)
    assert len(mean.unique()) > 0.9 * mean.numel()
    assert (mean != 0).float().mean() > 0.999


def test_neighboring_values_and_both_halves_are_uncorrelated() -> None:
    """Box-Muller makes two values from two others: they must be independent all the same."""
    values = gaussian(200_000, SEED.bytes)
    halves, pairs = values.reshape(2, -1), values.reshape(-1, 2)
    for left, right in ((halves[0], halves[1]), (pairs[:, 0], pairs[:, 1])):
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.015
        assert abs(np.corrcoef(left**2, right**2)[0, 1]) < 0.015


def test_the_tails_are_there() -> None:
    """One of 31,574 normal values is beyond four deviations; about 63 of two million."""
    beyond = (np.abs(gaussian(2_000_000, SEED.bytes)) > 4).sum()
    assert 90 < beyond < 170, "127 are expected on both sides"


def test_an_odd_number_of_values() -> None:
    assert gaussian(3, os.urandom).shape == (3,)
    assert not np.array_equal(gaussian(64, os.urandom), gaussian(64, os.urandom))
