"""Clipping and noise of one merge: the claimed bounds and the claimed distribution."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats

from decoupled_diloco.privacy.dp import (
    COUNT_UNIT,
    NOISE_BLOCK,
    SHARE_MIN,
    AdaptiveClip,
    Mechanism,
    bits_needed,
    discrete_gaussian,
    gaussian,
)

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


@pytest.mark.parametrize("deviation", [0.3, 1.0, 4.0, 7.3])
def test_each_integer_has_its_exact_probability(deviation: float) -> None:
    """Chi-square over all integers that 500,000 draws should contain at least 10 times."""
    draws = 500_000
    values = discrete_gaussian(draws, deviation, np.random.default_rng(3).bytes)
    support = np.arange(-100, 101)
    weights = np.exp(-(support**2) / (2 * deviation**2))
    expected = draws * weights / weights.sum()
    found = np.array([(values == each).sum() for each in support])
    usual = expected >= 10
    expected = np.append(expected[usual], expected[~usual].sum())
    found = np.append(found[usual], found[~usual].sum())
    assert found.sum() == draws, "all values are in the support"
    if expected[-1] < 10:
        expected, found = expected[:-1], found[:-1] * (expected[:-1].sum() / found[:-1].sum())
    assert stats.chisquare(found, expected).pvalue > 1e-3


@pytest.mark.parametrize("deviation", [1e3, 12345.678, 5e8])
def test_many_integers_look_like_a_normal_distribution(deviation: float) -> None:
    values = discrete_gaussian(200_000, deviation, SEED.bytes)
    assert stats.kstest(values / deviation, "norm").statistic < 0.005
    assert (values % 2).mean() == pytest.approx(0.5, abs=0.01), "even and odd integers"


def test_the_tails_of_integers_are_there() -> None:
    beyond = (np.abs(discrete_gaussian(2_000_000, 1e4, SEED.bytes)) > 4e4).sum()
    assert 90 < beyond < 170, "127 are expected on both sides"


def test_a_proposal_of_zero_counts_once() -> None:
    """Otherwise 0 would be drawn twice as often: it is its own negative."""
    values = discrete_gaussian(200_000, 1.0, SEED.bytes)
    assert (values == 0).mean() == pytest.approx(0.3989, abs=0.006)


@pytest.mark.parametrize("needed", [2, 5, 64])
def test_as_many_shares_as_needed_have_the_noise_z_c(needed: int) -> None:
    numel, one = 100_000, 2**15 - 1
    mechanism = Mechanism(clip=2.0, noise_multiplier=1.5, numel=4 * numel)
    shares = torch.zeros(needed, numel, dtype=torch.int32)
    for share in shares:
        mechanism.add_share_(share, one, needed, SEED.bytes)
    noise = shares.sum(0).double().numpy() * mechanism.clip_of(numel) / one
    assert stats.kstest(noise / (1.5 * 2.0), "norm").statistic < 0.007
    between = np.corrcoef(shares[:2].numpy())[0, 1]
    assert abs(between) < 0.015, "learners draw their shares independently"


def test_every_element_of_several_blocks_gets_its_own_share() -> None:
    share = torch.zeros(NOISE_BLOCK + 7, dtype=torch.int32)
    Mechanism(1.0, 1.0, share.numel()).add_share_(share, 2**20, 2, SEED.bytes)
    assert (share[-7:] != 0).all()
    assert len(share.unique()) > 0.1 * share.numel()


@pytest.mark.parametrize(("z", "learners"), [(0.05, 1000), (1.0, 8), (20.0, 10_000)])
def test_the_bits_that_a_share_needs(z: float, learners: int) -> None:
    def share(bits: int) -> float:
        return z * (2 ** (bits - 1) - 1) / math.sqrt(learners)

    least = bits_needed(z, learners)
    assert share(least - 1) < SHARE_MIN <= share(least)


@pytest.mark.parametrize("z", [0.5, 20.0])
def test_the_noise_of_sums_and_counts_together_is_that_of_the_settings(z: float) -> None:
    """Andrew et al. 2021, theorem 1: z_sum = (z^-2 - (2σ_b)^-2)^-1/2; a count has the noise σ_b."""
    mechanism = Mechanism.with_quantile(2.0, z, 400, quantile=0.5, rate=0.2)
    assert mechanism.adaptive is not None
    sigma_b = mechanism.adaptive.noise_multiplier / 2  # a sign is twice a count from 0 to 1
    expected = (z**-2 - (2 * sigma_b) ** -2) ** -0.5
    assert mechanism.noise_multiplier == pytest.approx(expected)
    assert z < mechanism.noise_multiplier < 1.06 * z


def test_a_count_has_the_noise_of_its_fragment() -> None:
    mechanism = Mechanism.with_quantile(2.0, 1.5, 400, quantile=0.5, rate=0.2)
    claimed = 1.5 / math.sqrt(0.1) * math.sqrt(400 / 100)
    counts = [mechanism.count_of(3, 100, SEED.bytes) for _ in range(20_000)]
    assert stats.kstest((np.array(counts) - 3) / claimed, "norm").pvalue > 1e-3
    shares = [
        sum(mechanism.count_share(True, 100, 4, SEED.bytes) for _ in range(4)) / COUNT_UNIT
        for _ in range(2_000)
    ]
    assert stats.kstest((np.array(shares) - 4) / claimed, "norm").pvalue > 1e-3
    assert mechanism.count_share(False, 400, 10**12, SEED.bytes) == pytest.approx(-COUNT_UNIT, 0.01)


@pytest.mark.parametrize(
    ("signs", "factor"),
    [
        (8.0, math.exp(-0.2 * 0.3)),  # all are within the clip
        (-8.0, math.exp(0.2 * 0.7)),  # none is
        (8 * 0.4, 1.0),  # 70 % are
        (1e9, math.exp(-1)),  # a learner lies
        (-1e9, math.exp(1)),
    ],
)
def test_the_clip_follows_the_quantile(signs: float, factor: float) -> None:
    adaptive = AdaptiveClip(quantile=0.7, rate=0.2, noise_multiplier=1.0)
    assert adaptive.next(3.0, signs, 8) == pytest.approx(3.0 * factor)


def test_the_clip_stays_within_limits() -> None:
    adaptive, small, large = AdaptiveClip(0.5, 1.0, 1.0), 1.0, 1.0
    for _ in range(100):
        small, large = adaptive.next(small, 1e9, 1), adaptive.next(large, -1e9, 1)
    assert (small, large) == (2.0**-40, 2.0**40)


def test_the_clip_finds_the_quantile_of_its_contributions() -> None:
    """Norms of 1,000 learners are log-normal; the noise of a count is 63 of 1,000."""
    mechanism = Mechanism.with_quantile(1.0, 20.0, 400, quantile=0.8, rate=0.2)
    assert mechanism.adaptive is not None
    clip, clips = 1000.0, []
    for _ in range(300):
        norms = np.exp(SEED.normal(size=1000))
        signs = int(np.where(norms <= clip, 1, -1).sum())
        clip = mechanism.adaptive.next(clip, mechanism.count_of(signs, 400, SEED.bytes), 1000)
        clips.append(clip)
    assert np.mean(np.log(clips[200:])) == pytest.approx(stats.norm.ppf(0.8), abs=0.1)
